"""The tables that `hf-dspark eval` and `bench` print."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from . import console

Row = Mapping[str, Any]


def show(report: Mapping[str, Any]) -> None:
    """Print a report's tables."""
    if "throughput" in report:
        _print(_throughput(report["throughput"]))
    else:
        for title, groups in (("Sets", report["sets"]), ("Categories", report["categories"])):
            # One group would repeat the table of everything.
            if len(groups) > 1 and not (title == "Categories" and groups.keys() == report["sets"].keys()):
                _print(_groups(title, groups))
        if len(report["sets"]) > 1:
            _print(_macro_mean(report["macro_mean"]))
        _print(_groups("All prompts", {"": report["overall"]}))
        for name, row in report["overall"]["methods"].items():
            if row.get("num_spec_steps") and "acceptance_by_position" in row:
                _print(_positions(name, row))
    console.out.print(f"Texts against plain decoding: {_verdict(report)}")


def show_speed(report: Mapping[str, Any]) -> None:
    """Print a report of `measure_speed`: its rows, and below what they cannot hold."""
    columns = ("batch", "method", "ms/step", "tok/s", "× plain", "× compiled", "τ", "rounds", "captured", "path")
    for mode in dict.fromkeys(row["mode"] for row in report["rows"]):
        table = _table(f"{mode.capitalize()}, median of {report['repeats']}", *columns, "identical", "first call")
        for row in report["rows"]:
            if row["mode"] == mode:
                table.add_row(str(row["batch_size"]), row["method"], *_speed_cells(row))
        _print(table)
    reasons = {(row["method"], reason): None for row in report["rows"] for reason in row.get("reasons", ())}
    for method, reason in reasons:
        console.out.print(f"{method}: {reason}", markup=False)
    for name, reason in report["left_out"].items():
        console.out.print(f"{name}: left out, {reason}", markup=False)
    if report["warmup_seconds"] is not None:
        console.out.print(f"hf_dspark.warmup took {report['warmup_seconds']:.1f} s before the first calls")
    console.out.print(f"Texts against plain decoding: {_verdict(report)}")


def _speed_cells(row: Row) -> list[str]:
    cells = [_number(row["ms_per_step"]), _number(row.get("tokens_per_second"), 1)]
    cells += [_number(row.get(name)) for name in ("speedup", "speedup_over_compiled")]
    cells += [_number(row.get("mean_acceptance_length")), str(row.get("num_spec_steps", "-"))]
    captured = "-" if "captured" not in row else f"{row['captured']}/{row['batches']}"
    same = row.get("identical_to_plain")
    texts = row["batch_size"] * row.get("batches", 0)
    cells += [captured, ", ".join(row.get("paths", ())) or "-", "-" if same is None else f"{same}/{texts}"]
    return [*cells, f"{row['warm_up_seconds']:.1f} s" if "warm_up_seconds" in row else "-"]


def _print(table: Table) -> None:
    # On a narrow terminal lines wrap; columns cut to fit would lose digits.
    Console(highlight=False, width=max(console.out.width, 130)).print(table)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="left" if column in ("", "method") else "right", no_wrap=True)
    return table


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _speed(row: Row) -> list[str]:
    return [_number(row.get("tokens_per_second"), 1), _number(row.get("speedup"))]


def _acceptance(row: Row) -> list[str]:
    return [_number(row.get("mean_acceptance_length")), _number(row.get("draft_acceptance_rate"))]


def _groups(title: str, groups: Mapping[str, Any]) -> Table:
    """τ, acceptance and speed of each group and method."""
    table = _table(
        title, "", "prompts", "method", "tokens", "tok/s", "speed-up", "τ", "1 + Σa", "accepted", "identical"
    )
    for name, group in groups.items():
        head = [name, str(group["prompts"])]
        for method, row in group["methods"].items():
            tau, rate = _acceptance(row)
            same = row.get("identical_to_plain")
            identical = "-" if same is None else f"{same}/{group['turns']}"
            expected = _number(row.get("expected_acceptance_length"))
            table.add_row(*head, method, str(row["tokens"]), *_speed(row), tau, expected, rate, identical)
            head = ["", ""]
    return table


def _macro_mean(means: Mapping[str, Row]) -> Table:
    table = _table("Mean over sets", "method", "tok/s", "speed-up", "τ", "accepted")
    for method, row in means.items():
        table.add_row(method, *_speed(row), *_acceptance(row))
    return table


def _positions(name: str, row: Row) -> Table:
    """Conditional acceptance and quality of the confidence at each position."""
    table = _table(f"{name}: by position", "k", "tried", "accepted", "c_k", "ECE c", "AUROC c", "ECE a", "AUROC a")
    confidence = row["confidence_by_position"] or [{"c": None, "a": None}] * len(row["acceptance_by_position"])
    columns = zip(row["tried_by_position"], row["acceptance_by_position"], confidence, strict=True)
    for k, (tried, rate, at) in enumerate(columns, start=1):
        c, a = at["c"] or {}, at["a"] or {}
        numbers = (rate, c.get("predicted"), c.get("ece"), c.get("auroc"), a.get("ece"), a.get("auroc"))
        table.add_row(str(k), str(tried), *(_number(value, 3) for value in numbers))
    return table


def _throughput(rows: list[Row]) -> Table:
    table = _table("Throughput", "batch", "method", "tok/s", "speed-up", "tok/s a row", "τ", "accepted")
    for row in rows:
        per_row = _number(row["tokens_per_second_per_row"], 1)
        table.add_row(str(row["batch_size"]), row["method"], *_speed(row), per_row, *_acceptance(row))
    return table


def _verdict(report: Mapping[str, Any]) -> str:
    gaps = [d["logit_gap"] for d in report["differences"] if d["logit_gap"] is not None]
    if not report["differences"]:
        return str(report["outputs"])
    widest = f", widest logit gap {max(gaps):.3g}" if gaps else ""
    return f"{report['outputs']} ({len(report['differences'])} differences over all methods{widest})"
