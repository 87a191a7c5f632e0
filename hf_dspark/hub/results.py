"""From JSON files of measurements to what a card says, whichever command wrote them."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

PLAIN, COMPILED = "plain", "plain, compiled"
ALL_SETS = "all sets"
VERSIONS = ("hf_dspark", "transformers", "torch", "python")


class Row(NamedTuple):
    """One prompt set with one method. Speeds are tokens/s; `None` is what was not measured."""

    set: str
    mode: str
    method: str
    prompts: int | None
    tau: float | None
    plain: float | None
    compiled: float | None
    dspark: float | None
    speedup: float | None
    speedup_over_compiled: float | None
    same_text: str
    acceptance: list[float | None] | None

    @property
    def is_own(self) -> bool:
        """Whether the row is about the card's draft, whose rows `eval` calls "dspark"; others are "draft NAME"."""
        return self.dspark is not None and self.method.startswith("dspark")


class Report(NamedTuple):
    """Rows that share a machine and settings, which `setting` says in one sentence. `dtype` without "torch."."""

    setting: str
    dtype: str
    rows: list[Row]


@dataclass
class Evidence:
    """Everything that files of measurements say about a draft.

    Attributes:
        reports: speeds and acceptance.
        reliability: the method and its row that a reliability diagram is drawn from, of the first `eval` report.
        calibration, training, texts: what `calibrate`, `train` and `synthesize` wrote, `None` without such a file.
        files: name → SHA-256 of every file read.
    """

    reports: list[Report] = field(default_factory=list)
    reliability: tuple[str, Mapping[str, Any]] | None = None
    calibration: Mapping[str, Any] | None = None
    training: Mapping[str, Any] | None = None
    texts: Mapping[str, Any] | None = None
    files: dict[str, str] = field(default_factory=dict)


def read(paths: Iterable[str | Path]) -> Evidence:
    """Read files that `hf-dspark eval`, `bench`, `calibrate`, `train` and `synthesize` wrote with `--json`, and those
    of the package's benchmark scripts. What a file is shows in its keys.

    Raises:
        ValueError: none of these, two of a kind of which a card has one, or two of one name.
        OSError: a file cannot be read.
    """
    evidence = Evidence()
    for path in map(Path, paths):
        content = path.read_bytes()
        try:
            values = json.loads(content)
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}. Give files that `--json` wrote.") from error
        if path.name in evidence.files:
            raise ValueError(f"Two files are called {path.name}: give them names that a reader can tell apart.")
        evidence.files[path.name] = hashlib.sha256(content).hexdigest()
        _sort_in(evidence, path, values if isinstance(values, dict) else {})
    return evidence


def _sort_in(evidence: Evidence, path: Path, values: Mapping[str, Any]) -> None:
    reports = {
        "overall": _eval_report,
        "prompts_per_set": _draft_benchmark,
        "rows": _bench_report,
        "results": _cpu_benchmark,
        "sets": _gpu_benchmark,
    }
    single = {"temperatures": "calibration", "step": "training", "num_conversations": "texts"}
    for key, name in single.items():
        if key in values:
            if getattr(evidence, name) is not None:
                raise ValueError(f"{path} is a second file about {name}: give one.")
            setattr(evidence, name, values)
            return
    for key, reader in reports.items():
        if key in values:
            evidence.reports += reader(values)
            if key == "overall" and evidence.reliability is None:
                evidence.reliability = _reliability(values)
            return
    raise ValueError(
        f"{path} is no measurement that a card shows. Give what `hf-dspark eval`, `bench`, `calibrate`, `train` or "
        "`synthesize` wrote with `--json`."
    )


def _reliability(report: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    rows = report["overall"]["methods"]
    return next(((name, row) for name, row in rows.items() if row.get("confidence_by_position")), None)


def _same(identical: int | None, texts: int) -> str:
    return "not compared" if identical is None else f"{identical} of {texts}"


def _ratio(speed: float | None, other: float | None) -> float | None:
    return None if speed is None or other is None else speed / other


def _versions(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {values[name]}" for name in VERSIONS if name in values)


def _mode(sampling: Mapping[str, Any] | None) -> str:
    """How tokens were chosen. What was not given came from the target's generation config."""
    if not sampling or not sampling.get("do_sample"):
        return "greedy"
    neutral = {"temperature": None, "top_p": 1.0, "top_k": 0}
    names = {"temperature": "T=", "top_p": "top-p ", "top_k": "top-k "}
    given = [f"{names[name]}{sampling[name]:g}" for name, off in neutral.items() if sampling.get(name, off) != off]
    missing = [names[name].strip(" =") for name in neutral if name not in sampling]
    return ", ".join(given + ([f"default {' and '.join(missing)}"] if missing else []))


# ---- one reader for each kind of report


def _eval_report(report: Mapping[str, Any]) -> list[Report]:
    settings = report["settings"]
    mode = _mode(settings["sampling"])
    groups = report["sets"] if len(report["sets"]) == 1 else report["sets"] | {ALL_SETS: report["overall"]}
    rows = []
    for name, group in groups.items():
        methods = group["methods"]
        plain, compiled = (methods.get(m, {}).get("tokens_per_second") for m in (PLAIN, COMPILED))
        for method, row in methods.items():
            if "acceptance_by_position" not in row:
                continue
            speed = row["tokens_per_second"]
            same = _same(row.get("identical_to_plain"), group["turns"]) if mode == "greedy" else "sampled"
            ratios = row.get("median_speedup", _ratio(speed, plain)), _ratio(speed, compiled)
            tau, acceptance = row["mean_acceptance_length"], row["acceptance_by_position"]
            rows.append(
                Row(name, mode, method, group["prompts"], tau, plain, compiled, speed, *ratios, same, acceptance)
            )
    setting = (
        f"{_device(report)}, at most {settings['max_new_tokens']} new tokens, {report['template']}, seed "
        f"{settings['seed']}; {_versions(report['versions'])}."
    )
    return [Report(setting, _dtype(report), rows)]


def _bench_report(report: Mapping[str, Any]) -> list[Report]:
    by_key = {(row["mode"], row["batch_size"], row["method"]): row for row in report["rows"]}
    rows = []
    for (mode, size, method), row in by_key.items():
        if "acceptance_by_position" not in row:
            continue
        plain, compiled = (by_key.get((mode, size, m), {}).get("tokens_per_second") for m in (PLAIN, COMPILED))
        name = "greedy" if mode == "greedy" else _mode(report["sampling"])
        same = _same(row.get("identical_to_plain"), size * row["batches"]) if mode == "greedy" else "sampled"
        speeds = plain, compiled, row["tokens_per_second"], row["speedup"], row.get("speedup_over_compiled")
        tau, acceptance = row["mean_acceptance_length"], row["acceptance_by_position"]
        rows.append(Row(f"batch {size}", name, method, None, tau, *speeds, same, acceptance))
    settings = report["settings"]
    setting = (
        f"{_device(report)}, answers of {settings['max_new_tokens']} tokens, median of {report['repeats']} passes, "
        f"seed {settings['seed']}; {_versions(report['versions'])}."
    )
    return [Report(setting, _dtype(report), rows)]


def _device(report: Mapping[str, Any]) -> str:
    return f"{report['threads']} CPU threads" if report["device"] == "cpu" else f"One {report['device']}"


def _dtype(report: Mapping[str, Any]) -> str:
    return str(report["dtype"]).removeprefix("torch.")


def _cpu_benchmark(report: Mapping[str, Any]) -> list[Report]:
    """`benchmarks/cpu_smollm2.json`: a report for each dtype."""
    env = report["environment"]
    setting = (
        f"{env['cpu']['threads']} CPU threads ({env['cpu']['capability']}), at most {env['max_new_tokens']} new "
        f"tokens, {env['template']}, seed {env['seed']}; {_versions(env['versions'])}."
    )
    by_dtype: dict[str, list[Row]] = {}
    for result in report["results"]:
        plain, ours = result["methods"]["plain"]["tokens_per_second"], result["methods"]["dspark"]
        mode, spec = result["mode"], result["dspark"]
        same = _same(ours["identical_to_plain"], result["prompts"]) if mode == "greedy" else "sampled"
        speeds = plain, None, ours["tokens_per_second"], ours["median_speedup"], None
        row = Row(result["set"], mode, "dspark", result["prompts"], spec["tau"], *speeds, same,
                  spec["acceptance_by_position"])  # fmt: skip
        by_dtype.setdefault(result["dtype"], []).append(row)
    return [Report(setting, dtype, rows) for dtype, rows in by_dtype.items()]


def _gpu_benchmark(report: Mapping[str, Any]) -> list[Report]:
    """`benchmarks/h200_smollm2.json`: the fast path against transformers' compiled static cache."""
    env, rows = report["environment"], []
    for name, result in report["sets"].items():
        speeds = result["tokens_per_second"]
        plain, compiled, ours = (speeds[m] for m in ("HF eager", "HF static compiled", "DSpark ragged path"))
        # Texts were compared with those of the compiled cache: in half precision near ties fall differently.
        same = _same(result["identical"], result["prompts"])
        # Eager decoding was measured on fewer prompts, so there is no ratio to it.
        ratios = None, result["ratio_to_static"]
        rows.append(Row(name, "greedy", "dspark, static", result["prompts"], result["tau"], plain, compiled, ours,
                        *ratios, same, None))  # fmt: skip
    new_tokens = {result["new_tokens"] for result in report["sets"].values()}
    setting = (
        f"One {env['device']}, answers of {max(new_tokens)} tokens, the target's chat template, seed {env['seed']}; "
        f"{_versions(env)}. Texts are compared with those of compiled plain decoding."
    )
    return [Report(setting, report["dtype"], rows)]


def _draft_benchmark(report: Mapping[str, Any]) -> list[Report]:
    """`benchmarks/embedded_draft.json`: τ of several drafts of one target, without speeds."""
    env, rows = report["environment"], []
    for name, modes in report["drafts"].items():
        for mode in ("greedy", "T=1"):
            for prompts, result in modes[mode].items():
                if isinstance(result, Mapping):
                    acceptance = result["acceptance_by_position"]
                    rows.append(Row(prompts, mode, name, report["prompts_per_set"], result["tau"], None, None, None,
                                    None, None, "-", acceptance))  # fmt: skip
    setting = (
        f"One {env['device']}, {report['new_tokens']} new tokens, the target's chat template, seed {env['seed']}; "
        f"{_versions(env)}. Each method is a draft."
    )
    return [Report(setting, "bfloat16", rows)]
