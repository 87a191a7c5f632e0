"""Pictures of a report: acceptance by position, reliability, calibration, tokens per step against threshold,
throughput."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


def check_available() -> None:
    """Refuse plots before the work, not after it.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError('Plots need matplotlib: pip install "hf-dspark[eval]".') from error


def plot(report: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw what the report has numbers for, as PNG files in `folder`; returns their paths."""
    if "throughput" in report:
        figures = {"throughput": throughput(report["throughput"])}
    else:
        rows = {name: row for name, row in report["overall"]["methods"].items() if "acceptance_by_position" in row}
        scored = {name: row for name, row in rows.items() if row["confidence_by_position"]}
        figures = {"acceptance_by_position": acceptance_by_position(rows)} if rows else {}
        if scored:
            first = next(iter(scored))
            figures |= {"reliability": reliability(first, scored[first]), "threshold": threshold(scored, report)}
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in figures.items():
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=150)
    return paths


def _figure(columns: int = 1) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6 * columns, 4.2), layout="constrained")
    axes = [figure.add_subplot(1, columns, i + 1) for i in range(columns)]
    for axis in axes:
        axis.grid(alpha=0.3)
    return figure, axes


def acceptance_by_position(rows: Mapping[str, Row]) -> Any:
    """Conditional acceptance at each position with a 68 % interval, and the mean c_k where there is a head."""
    figure, (axis,) = _figure()
    longest = 1
    for name, row in rows.items():
        known = [
            (k + 1, rate, *_interval(rate, count))
            for k, (rate, count) in enumerate(zip(row["acceptance_by_position"], row["tried_by_position"], strict=True))
            if rate is not None and count
        ]
        longest = max(longest, len(row["acceptance_by_position"]))
        if not known:
            continue
        positions, rates, below, above = zip(*known, strict=True)
        line = axis.errorbar(positions, rates, yerr=(below, above), marker="o", capsize=2, label=name)
        predicted = [(e["position"], e["c"]["predicted"]) for e in row["confidence_by_position"] or () if e["c"]]
        if predicted:
            style = {"linestyle": ":", "marker": "x", "color": line.lines[0].get_color()}
            axis.plot(*zip(*predicted, strict=True), label=f"{name}: mean $c_k$", **style)
    axis.set(xlabel="position k", ylabel="accepted, given that all before were", ylim=(0, 1.03))
    axis.set_xticks(range(1, longest + 1))
    axis.legend(fontsize="small")
    return figure


def _interval(rate: float, count: int) -> tuple[float, float]:
    """Distances below and above a share of `count` to the ends of its Wilson interval at one standard deviation."""
    middle = (rate + 0.5 / count) / (1 + 1 / count)
    half = (rate * (1 - rate) / count + 0.25 / count**2) ** 0.5 / (1 + 1 / count)
    return max(rate - middle + half, 0.0), max(middle + half - rate, 0.0)


def reliability(name: str, row: Row) -> Any:
    """What c_k and a_j predicted against what happened; the area of a point is its number of drafts."""
    figure, axes = _figure(2)
    titles = {"c": "$c_k$: this draft, given all before", "a": "$a_j$: all drafts up to this one"}
    for axis, (key, title) in zip(axes, titles.items(), strict=True):
        bins = row["reliability"][key]
        total = sum(b["count"] for b in bins)
        predicted, accepted = [b["predicted"] for b in bins], [b["accepted"] for b in bins]
        axis.plot((0, 1), (0, 1), color="grey", linewidth=1, linestyle="--")
        axis.plot(predicted, accepted, linewidth=1)
        axis.scatter(predicted, accepted, s=[15 + 600 * b["count"] / total for b in bins] if total else None, alpha=0.6)
        axis.set(title=f"{title} (n = {total})", xlabel="predicted", ylabel="accepted", xlim=(0, 1), ylim=(0, 1.03))
    figure.suptitle(name)
    return figure


def calibration(report: Mapping[str, Any]) -> Any:
    """ECE of a_j at each position without and with the temperatures of a `CalibrationReport`; and, where the report
    has its bins, what a_j predicted against what happened, over all positions."""
    bins = {"T = 1": report.get("reliability_before"), "fitted": report.get("reliability")}
    figure, axes = _figure(2 if all(bins.values()) else 1)
    before, after = report["ece_by_position_before"], report["ece_by_position"]
    positions = range(1, len(after) + 1)
    axes[0].bar([j - 0.2 for j in positions], before, width=0.4, label=f"T = 1, mean {report['ece_before']:.4f}")
    axes[0].bar([j + 0.2 for j in positions], after, width=0.4, label=f"fitted, mean {report['ece_after']:.4f}")
    axes[0].set(xlabel="position j", ylabel="ECE of $a_j$ on held-out texts", ylim=(0, None))
    axes[0].set_xticks(list(positions))
    for axis in axes[1:]:
        axis.plot((0, 1), (0, 1), color="grey", linewidth=1, linestyle="--")
        for name, points in bins.items():
            axis.plot(*([p[key] for p in points or ()] for key in ("predicted", "accepted")), marker="o", label=name)
        axis.set(xlabel="$a_j$", ylabel="share of blocks that got this far", xlim=(0, 1), ylim=(0, 1.03))
    for axis in axes:
        axis.legend(fontsize="small")
    return figure


def threshold(rows: Mapping[str, Row], report: Mapping[str, Any]) -> Any:
    """Tokens per step and drafts verified against the confidence threshold (paper, Figure 5).

    The line replays the rounds of the first method that ran without threshold; points are methods that ran with one.
    """
    figure, axes = _figure(2)
    options = report["methods"]
    whole = [name for name in rows if not options[name].get("assistant_confidence_threshold")]
    names = {"tokens_per_step": "tokens per step", "draft_acceptance_rate": "accepted / verified"}
    measured = {"tokens_per_step": "mean_acceptance_length", "draft_acceptance_rate": "draft_acceptance_rate"}
    for axis, (key, title) in zip(axes, names.items(), strict=True):
        for name in whole[:1]:
            curve = [point for point in rows[name]["threshold_curve"] if point[key] is not None]
            axis.plot([p["threshold"] for p in curve], [p[key] for p in curve], label=f"{name}, replayed")
        for name, row in rows.items():
            if name not in whole and row["num_spec_steps"]:
                axis.plot(options[name]["assistant_confidence_threshold"], row[measured[key]], "o", label=name)
        axis.set(xlabel="confidence threshold", ylabel=title, xlim=(0, 1), ylim=(0, None))
        axis.legend(fontsize="small")
    if whole:
        twin = axes[0].twinx()
        curve = rows[whole[0]]["threshold_curve"]
        twin.plot([p["threshold"] for p in curve], [p["verified_per_step"] for p in curve], ":", color="grey")
        twin.set(ylabel="drafts verified per step (dotted)", ylim=(0, None))
    return figure


def throughput(rows: list[Row]) -> Any:
    """Speed of one text against that of the whole batch; points are batch sizes."""
    figure, (axis,) = _figure()
    for name in dict.fromkeys(row["method"] for row in rows):
        mine = [row for row in rows if row["method"] == name]
        speeds = [row["tokens_per_second_per_row"] for row in mine], [row["tokens_per_second"] for row in mine]
        axis.plot(*speeds, marker="o", label=name)
        for row, x, y in zip(mine, *speeds, strict=True):
            axis.annotate(str(row["batch_size"]), (x, y), textcoords="offset points", xytext=(4, 4), fontsize=7)
    axis.set(xlabel="tokens/s of each row", ylabel="tokens/s of the batch", xlim=(0, None), ylim=(0, None))
    axis.legend(fontsize="small")
    return figure
