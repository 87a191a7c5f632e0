"""Small line and bar charts as SVG that takes its colours from the page, and reads out its numbers. Pure functions."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from hf_dspark import Round, SpeculationStats

from .html import number, text

WIDTH, HEIGHT = 440, 220
LEFT, RIGHT, TOP, BOTTOM = 40, 10, 12, 38
STEPS = 5  # of the vertical axis

Points = Sequence[tuple[float, float]]


class Axes:
    """A frame with horizontal grid lines; data coordinates to SVG ones."""

    def __init__(self, title: str, xlabel: str, xlim: tuple[float, float], ylim: tuple[float, float]):
        self.title, self.xlim, self.ylim = title, xlim, ylim
        self.parts: list[str] = []
        for i in range(STEPS + 1):
            value = ylim[0] + (ylim[1] - ylim[0]) * i / STEPS
            y = self.y(value)
            self.parts.append(f'<line class="ds-grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
            self.label(LEFT - 6, y + 4, f"{value:.3g}", "end")
        self.label((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 4, xlabel, "middle")

    def x(self, value: float) -> float:
        low, high = self.xlim
        return round(LEFT + (value - low) / ((high - low) or 1) * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        low, high = self.ylim
        return round(HEIGHT - BOTTOM - (value - low) / ((high - low) or 1) * (HEIGHT - TOP - BOTTOM), 1)

    def label(self, x: float, y: float, words: str, anchor: str) -> None:
        self.parts.append(f'<text x="{x}" y="{y}" text-anchor="{anchor}">{text(words)}</text>')

    def ticks(self, values: Sequence[float]) -> None:
        for value in values:
            self.label(self.x(value), HEIGHT - BOTTOM + 15, f"{value:g}", "middle")

    def line(self, points: Points, kind: str) -> None:
        path = " ".join(f"{self.x(x)},{self.y(y)}" for x, y in points)
        self.parts.append(f'<polyline class="ds-line ds-{kind}" points="{path}"/>')

    def dots(self, points: Points, kind: str, radius: float = 3.5) -> None:
        for x, y in points:
            self.parts.append(
                f'<circle class="ds-dot ds-{kind}" cx="{self.x(x)}" cy="{self.y(y)}" r="{radius}">'
                f"<title>{number(y)}</title></circle>"
            )

    def bar(self, x: float, y: float, width: float, kind: str) -> None:
        top, bottom = self.y(y), self.y(self.ylim[0])
        left = self.x(x - width / 2)
        self.parts.append(
            f'<rect class="ds-fill ds-{kind}" x="{left}" y="{top}" width="{round(self.x(x + width / 2) - left, 1)}" '
            f'height="{round(bottom - top, 1)}" rx="2"><title>{number(y)}</title></rect>'
        )

    def figure(self, says: str, keys: Mapping[str, str]) -> str:
        """The chart with title and key; `says` is for those who cannot see it."""
        key = "".join(f'<li><i class="ds-swatch ds-{kind}"></i>{label}</li>' for kind, label in keys.items())
        return (
            f'<figure class="ds-figure"><figcaption>{self.title}</figcaption>'
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{text(says)}">{"".join(self.parts)}</svg>'
            f'<ul class="ds-legend">{key}</ul></figure>'
        )


def acceptance_by_position(stats: SpeculationStats) -> str:
    """Bars of `SpeculationStats.acceptance_by_position`, and what the confidence head expected."""
    rates = stats.acceptance_by_position
    axes = Axes(
        "Acceptance by position", "draft k, given that all before it were accepted", (0.4, len(rates) + 0.6), (0, 1)
    )
    axes.ticks(range(1, len(rates) + 1))
    for k, rate in enumerate(rates, 1):
        if rate is not None:
            axes.bar(k, rate, 0.6, "accepted")
    keys = {"accepted": "accepted"}
    if expected := mean_confidence(stats.rounds):
        axes.dots([(k + 1, c) for k, c in expected.items()], "own")
        keys["own"] = "mean c<sub>k</sub> of the same drafts"
    said = ", ".join(f"{k}: {number(rate, 2)}" for k, rate in enumerate(rates, 1))
    return axes.figure(f"Acceptance by position: {said}", keys)


def mean_confidence(rounds: Sequence[Round]) -> dict[int, float]:
    """Mean c_k over the rounds that tried slot k (from 0): reached it, and accepted or rejected it."""
    seen: dict[int, list[float]] = {}
    for r in rounds:
        tried = r.accepted + (r.next_token is not None and r.accepted < r.verified)
        for k, c in enumerate((r.confidence or [])[:tried]):
            seen.setdefault(k, []).append(c)
    return {k: sum(values) / len(values) for k, values in sorted(seen.items())}


def tau_over_time(stats: SpeculationStats) -> str:
    """Tokens of each round, and τ up to it."""
    tokens = [r.num_committed for r in stats.rounds]
    means = [total / n for n, total in enumerate(accumulate(tokens), 1)]
    high = max(STEPS, *tokens) if tokens else STEPS
    axes = Axes("τ over time", "round", (0.5, len(tokens) + 0.5), (0, high + -high % STEPS))
    step = max(1, -(-len(tokens) // 8))
    axes.ticks(range(1, len(tokens) + 1, step))
    axes.dots(list(enumerate(tokens, 1)), "accepted", radius=2.5)
    axes.line(list(enumerate(means, 1)), "own")
    keys = {"accepted": "tokens of a round", "own": "τ so far"}
    return axes.figure(f"τ over {len(tokens)} rounds: {number(stats.mean_acceptance_length, 2)}", keys)


def charts(stats: SpeculationStats | None) -> str:
    if stats is None or not stats.rounds:
        return '<p class="ds-empty">Charts show here once an answer has used drafts.</p>'
    return f'<div class="ds-figures">{acceptance_by_position(stats)}{tau_over_time(stats)}</div>'


def calibration(report: Mapping[str, Any] | None) -> str:
    """What a `CalibrationReport` (as JSON) says about a_j without and with the temperatures T_k."""
    if report is None:
        return '<p class="ds-empty">No calibration was recorded for this draft.</p>'
    before, after = report["ece_by_position_before"], report["ece_by_position"]
    high = 0.05 * -(-max(*before, *after, 0.01) // 0.05)
    axes = Axes("Calibration error (ECE) of a<sub>j</sub>", "draft j", (0.4, len(after) + 0.6), (0, high))
    axes.ticks(range(1, len(after) + 1))
    for j, pair in enumerate(zip(before, after, strict=True), 1):
        axes.bar(j - 0.18, pair[0], 0.32, "rejected")
        axes.bar(j + 0.18, pair[1], 0.32, "accepted")
    said = f"{number(report['ece_before'], 4)} before, {number(report['ece_after'], 4)} after"
    keys = {"rejected": "T<sub>k</sub> = 1", "accepted": "with temperatures (STS)"}
    figures = axes.figure(f"Calibration error, mean over positions: {said}", keys)
    temperatures = ", ".join(f"{t:.2f}" for t in report["temperatures"])
    notes = "".join(f"<li>{text(note)}</li>" for note in report.get("notes", []))
    if report.get("reliability"):
        figures += reliability(report["reliability_before"], report["reliability"])
    return (
        f'<div class="ds-figures">{figures}</div>'
        f'<p class="ds-help">ECE of a<sub>j</sub>, mean over positions: <b>{said}</b>; T<sub>k</sub> = {temperatures}. '
        f"{report['num_rounds']} rounds on {text(report.get('dataset') or 'texts')}.</p>"
        f'<ul class="ds-help">{notes}</ul>'
    )


def reliability(before: Sequence[Mapping[str, float]], after: Sequence[Mapping[str, float]]) -> str:
    """Share of drafts that got as far as predicted, in bins of a_j over all positions."""
    axes = Axes("Reliability of a<sub>j</sub>", "predicted", (0, 1), (0, 1))
    axes.ticks((0, 0.25, 0.5, 0.75, 1))
    axes.line(((0, 0), (1, 1)), "grid")
    for bins, kind in ((before, "rejected"), (after, "accepted")):
        points = [(b["predicted"], b["accepted"]) for b in bins]
        axes.line(points, kind)
        axes.dots(points, kind)
    keys = {"rejected": "T<sub>k</sub> = 1", "accepted": "with temperatures (STS)"}
    return axes.figure("Share that got this far against the prediction", keys)
