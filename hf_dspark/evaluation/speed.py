"""Speed of a pair on the machine at hand: every way to generate with its target, on the same prompts in one run."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from ..generation.engine import MAX_ROWS
from ..generation.warmup import warmup
from ..modeling_dspark import DSparkForCausalLM
from .chat import ChatFormat
from .floor import FLOOR, byte_floor, copy_bandwidth
from .methods import PLAIN, Method, dspark_methods, plain_methods
from .prompts import Prompt
from .records import Records
from .report import throughput_report
from .run import Progress, measurement
from .runner import Runner, Settings, Unit, plan_batches

COMPILED = f"{PLAIN}, compiled"
DSPARK, STATIC = "dspark", "dspark, static"
VERDICTS = ("not compared", "identical", "near ties", "different")
PROFILED_TOKENS = 16

QUESTIONS = (
    "A shop sells pens at 3 dollars and books at 12 dollars. Ann buys 4 pens and 2 books and pays with 50 dollars. "
    "How much money does she get back? Explain each step.",
    "Write a Python function that returns the longest word of a text, with a short explanation.",
    "Describe how rain forms, from the sea to the ground.",
)


def default_prompts(limit: int | None = None) -> list[Prompt]:
    """Three short questions, or the first so many of them.

    Raises:
        ValueError: `limit` is below 1.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"The number of prompts must be at least 1, got {limit}.")
    return [Prompt("built-in", i, (text,)) for i, text in enumerate(QUESTIONS[:limit])]


@dataclass
class Run:
    """One mode ("greedy" or "sampling") at one batch size. `passes` are the records of each repeat."""

    mode: str
    batch_size: int
    runner: Runner
    units: list[Unit]
    passes: list[list[dict[str, Any]]] = field(default_factory=list)


def measure_speed(
    target: PreTrainedModel,
    draft: DSparkForCausalLM,
    chat: ChatFormat,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int = 128,
    batch_sizes: Sequence[int] = (1,),
    sampling: dict[str, Any] | None = None,
    repeats: int = 5,
    compiled: bool = True,
    seed: int = 0,
    about: dict[str, Any] | None = None,
    profile_path: Path | None = None,
    progress: Progress = lambda iterable, total: iterable,
) -> dict[str, Any]:
    """Measure plain decoding, plain decoding compiled by transformers (CUDA), DSpark on its plain path (one row) and on
    its fast path, and compute the time that reading the weights of a round takes (CUDA).

    The first turns of the prompts are answered, every answer exactly `max_new_tokens` long. A batch takes the prompts
    in turn, again from the first where they do not fill it. Methods take turns on each batch, after a warm-up of each.

    Args:
        target, draft: the pair.
        chat: how conversations are written for the target.
        prompts: from `load_prompts` or `default_prompts`.
        batch_sizes: rows of a call, 1..64 each.
        sampling: keyword arguments of generate() for rows that sample, besides the greedy ones.
        repeats: passes over the prompts; numbers are medians of them.
        compiled: whether plain decoding is also measured compiled.
        about: what else the result depends on; part of the report.
        profile_path: where a trace of a few rounds of the DSpark rows is written, for chrome://tracing or Perfetto.
        progress: wraps an iterable of known length.

    Returns:
        Plain Python values: `rows`, `left_out` (row → reason), `warmup_seconds`, `outputs`, and what the numbers depend
        on. A row has `mode`, `batch_size`, `method`, `ms_per_step` (a step is a round, without draft a token of every
        row), `tokens_per_second` and `seconds` (end to end, prompt included), `speedup`, `speedup_over_compiled`, the
        statistics of `evaluate`'s throughput rows (of one pass), `warm_up_seconds` and `same_every_repeat`.

    Raises:
        ValueError: no prompts, one that is too long, or options out of range.
    """
    _check(prompts, batch_sizes, repeats, sampling)
    plans = {size: _plan(prompts, size) for size in batch_sizes}
    settings = {"greedy": Settings(max_new_tokens, seed=seed)}
    if sampling is not None:
        settings["sampling"] = Settings(max_new_tokens, sampling, seed)
    checker = Runner(target, chat, plain_methods(compiled=False), settings["greedy"])
    checker.check_lengths(unit for units in plans.values() for unit in units)

    left_out = _left_out(target, compiled)
    longest = max(len(chat.encode([prompt.turns[0]])) for prompt in prompts) + max_new_tokens
    try:
        # A round writes a whole block behind the last token.
        warmup_seconds = warmup(
            target, draft, batch_size=max(batch_sizes), max_length=longest + draft.config.block_size + 2
        )
    except ValueError as error:
        left_out[STATIC], warmup_seconds = str(error), None

    runs = [
        Run(mode, size, Runner(target, chat, _methods(draft, size, left_out), settings[mode]), units)
        for mode in settings
        for size, units in plans.items()
    ]
    head = (about or {}) | measurement(target, chat, runs[0].runner.methods, prompts, settings["greedy"], batch_sizes)
    for run in progress([run for run in runs for _ in range(repeats)], len(runs) * repeats):
        run.passes.append(list(run.runner.run(run.units, Records(None, {}))))
    if profile_path is not None:
        _profile(profile_path, runs[0])
    report = _report(runs, str(target.dtype))
    if FLOOR not in left_out:
        left_out |= _add_floor(report, target, draft, runs)
    extra = {"repeats": repeats, "sampling": sampling, "warmup_seconds": warmup_seconds, "left_out": left_out}
    return head | extra | report


def _check(
    prompts: Sequence[Prompt], batch_sizes: Sequence[int], repeats: int, sampling: dict[str, Any] | None
) -> None:
    if not prompts:
        raise ValueError("No prompts: there is nothing to measure.")
    if not batch_sizes or len(set(batch_sizes)) < len(batch_sizes):
        raise ValueError(f"`batch_sizes` must be different numbers, at least one, got {list(batch_sizes)}.")
    for size in batch_sizes:
        if not 1 <= size <= MAX_ROWS:
            raise ValueError(f"`batch_sizes` must be in 1..{MAX_ROWS}, got {size}.")
    if repeats < 1:
        raise ValueError(f"`repeats` must be at least 1, got {repeats}.")
    temperature, top_p = ((sampling or {}).get(name, 1.0) for name in ("temperature", "top_p"))
    if not temperature > 0:
        raise ValueError(f"`temperature` must be above 0, got {temperature}. Greedy rows are measured in any case.")
    if not 0 < top_p <= 1:
        raise ValueError(f"`top_p` must be above 0 and at most 1, got {top_p}.")


def _plan(prompts: Sequence[Prompt], size: int) -> list[Unit]:
    """Full batches that hold every prompt at least once."""
    rows = -(-len(prompts) // size) * size
    return plan_batches(list(islice(cycle(prompts), rows)), [size])


def _left_out(target: PreTrainedModel, compiled: bool) -> dict[str, str]:
    """Rows that this machine or call does not have, and why."""
    if target.device.type != "cuda":
        return dict.fromkeys((COMPILED, FLOOR), f"needs CUDA, the target is on {target.device}")
    return {} if compiled else {COMPILED: "switched off"}


def _methods(draft: DSparkForCausalLM, size: int, left_out: dict[str, str]) -> list[Method]:
    methods = plain_methods(compiled=COMPILED not in left_out)
    if size == 1:  # batches have no plain path
        methods += dspark_methods({DSPARK: draft})
    if STATIC not in left_out:
        methods += dspark_methods({STATIC: draft}, cache_implementation="static")
    return methods


# ---- from records to rows


def _report(runs: Sequence[Run], dtype: str) -> dict[str, Any]:
    """`rows`, and the verdict on all texts of all repeats."""
    rows: list[dict[str, Any]] = []
    differences: list[dict[str, Any]] = []
    verdict = VERDICTS[0]
    for run in runs:
        reports = [throughput_report(records, run.runner.methods, dtype) for records in run.passes]
        of_run = [_row(run, [report["throughput"][i] for report in reports]) for i in range(len(run.runner.methods))]
        seconds = {row["method"]: row["seconds"] for row in of_run}
        for row in of_run:
            row["speedup"] = seconds[PLAIN] / row["seconds"]
            row["speedup_over_compiled"] = seconds[COMPILED] / row["seconds"] if COMPILED in seconds else None
        rows += of_run
        for repeat, report in enumerate(reports):
            place = {"batch_size": run.batch_size, "repeat": repeat}
            differences += [place | difference for difference in report["differences"]]
            verdict = max(verdict, report["outputs"], key=VERDICTS.index)
    return {"rows": rows, "outputs": verdict, "differences": differences}


def _row(run: Run, repeats: list[dict[str, Any]]) -> dict[str, Any]:
    """A method's row: medians of its repeats over the statistics of the first."""
    first = repeats[0]
    name, tokens = first["method"], first["tokens"]
    seconds = statistics.median(repeat["seconds"] for repeat in repeats)
    calls = [turn["calls"][name] for records in run.passes for record in records for turn in record["turns"]]
    rounds = [round_["milliseconds"] for call in calls for round_ in call.get("rounds", ())]
    return first | {
        "mode": run.mode,
        "ms_per_step": statistics.median(rounds) if rounds else 1000 * seconds * run.batch_size / tokens,
        "seconds": seconds,
        "seconds_of_repeats": [repeat["seconds"] for repeat in repeats],
        "tokens_per_second": tokens / seconds,
        "tokens_per_second_per_row": tokens / seconds / run.batch_size,
        "warm_up_seconds": run.runner.warm_up_seconds[run.batch_size][name],
        "same_every_repeat": len({repeat["output_sha256"] for repeat in repeats}) == 1,
    }


def _add_floor(
    report: dict[str, Any], target: PreTrainedModel, draft: DSparkForCausalLM, runs: Iterable[Run]
) -> dict[str, str]:
    """Put a computed row behind the rows of each run; returns the reason if it cannot be computed."""
    bandwidth = copy_bandwidth(target.device)
    for run in runs:
        rows = [row for row in report["rows"] if (row["mode"], row["batch_size"]) == (run.mode, run.batch_size)]
        turns = [turn for record in run.passes[0] for turn in record["turns"]]
        prompt_tokens = statistics.fmean(length for turn in turns for length in turn["prompt_tokens"])
        context = round(prompt_tokens + run.runner.settings.max_new_tokens / 2)
        try:
            num_bytes = byte_floor(target, draft, num_rows=run.batch_size, context=context)
        except ValueError as error:
            return {FLOOR: str(error)}
        seconds = sum(num_bytes.values()) / bandwidth
        row = {"mode": run.mode, "batch_size": run.batch_size, "method": FLOOR, "ms_per_step": 1000 * seconds}
        row |= {"num_bytes": num_bytes, "context": context, "bytes_per_second": bandwidth}
        report["rows"].insert(report["rows"].index(rows[-1]) + 1, row)
    return {}


def _profile(path: Path, run: Run) -> None:
    """A trace of a few rounds of every DSpark method; ranges as in `docs/cli.md`."""
    methods = [method for method in run.runner.methods if method.draft is not None]
    settings = replace(run.runner.settings, max_new_tokens=PROFILED_TOKENS)
    runner = Runner(run.runner.target, run.runner.chat, methods, settings)
    list(runner.run(run.units[:1], Records(None, {})))  # warms up
    on_gpu = [ProfilerActivity.CUDA] if runner.target.device.type == "cuda" else []
    with profile(activities=[ProfilerActivity.CPU, *on_gpu]) as trace:
        list(runner.run(run.units[:1], Records(None, {})))
    trace.export_chrome_trace(str(path))
