"""From records of calls to the numbers of a report. Names are those of vLLM's `metrics.speculative_decoding` where it
has one."""

import hashlib
import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..generation.record import Round, SpeculationStats
from . import slots
from .methods import PLAIN, Method
from .prompts import Prompt

Call = Mapping[str, Any]
# Two tokens whose logits are closer than this are a near tie: other shapes of the same products may order them either
# way. Half precision keeps 8 or 11 bits of numbers around 30.
NEAR_TIE = {"torch.float32": 1e-3, "torch.float16": 0.1, "torch.bfloat16": 0.5}


def quality_report(
    records: Sequence[Mapping[str, Any]], prompts: Sequence[Prompt], methods: Sequence[Method], dtype: str
) -> dict[str, Any]:
    """Report of a run over prompts: `overall`, `sets`, `categories`, `sub_categories`, `macro_mean`, `differences`."""
    by_name = {prompt.name: prompt for prompt in prompts}
    pairs = [(by_name[record["prompts"][0]], record) for record in records]

    def grouped(key: Any) -> dict[str, Any]:
        groups: dict[str, list[Mapping[str, Any]]] = {}
        for prompt, record in pairs:
            if (name := key(prompt)) is not None:
                groups.setdefault(name, []).append(record)
        return {name: _group(members, methods) for name, members in groups.items()}

    def sub_category(prompt: Prompt) -> str | None:
        sub = prompt.details.get("sub_category")
        return f"{prompt.category} / {sub}" if sub else None

    sets, overall = grouped(lambda prompt: prompt.set), _group(records, methods)
    for method in methods:
        if method.draft is not None:
            rounds = _rounds(turn["calls"][method.name] for record in records for turn in record["turns"])
            curves = {"reliability": slots.reliability(rounds), "threshold_curve": slots.threshold_curve(rounds)}
            overall["methods"][method.name] |= curves
    return {
        "overall": overall,
        "sets": sets,
        "categories": grouped(lambda prompt: prompt.category),
        "sub_categories": grouped(sub_category),
        "macro_mean": {method.name: _macro_mean(sets, method.name) for method in methods},
        **_differences(records, methods, dtype),
    }


def throughput_report(records: Sequence[Mapping[str, Any]], methods: Sequence[Method], dtype: str) -> dict[str, Any]:
    """Report of a throughput run: a row for each batch size and method, with aggregate and per-row speed."""
    groups: dict[int, list[Mapping[str, Any]]] = {}
    for record in records:
        groups.setdefault(len(record["prompts"]), []).append(record)
    rows = []
    for size, members in groups.items():
        for name, row in _group(members, methods)["methods"].items():
            per_row = row["tokens_per_second"] / size
            head = {"batch_size": size, "method": name, "batches": len(members)}
            rows.append(head | {"tokens_per_second_per_row": per_row} | row)
    return {"throughput": rows, **_differences(records, methods, dtype)}


def _group(records: Sequence[Mapping[str, Any]], methods: Sequence[Method]) -> dict[str, Any]:
    turns = [turn for record in records for turn in record["turns"]]
    plain = [turn["calls"].get(PLAIN) for turn in turns]
    return {
        "prompts": sum(len(record["prompts"]) for record in records),
        "turns": sum(len(turn["prompt_tokens"]) for turn in turns),
        "prompt_tokens": sum(sum(turn["prompt_tokens"]) for turn in turns),
        "methods": {m.name: method_row([turn["calls"][m.name] for turn in turns], plain, m) for m in methods},
    }


def method_row(calls: Sequence[Call], plain: Sequence[Call | None], method: Method) -> dict[str, Any]:
    """One row of a table; `plain` are plain decoding's calls on the same inputs, `None` where it was not run."""
    tokens, seconds = _tokens(calls), sum(call["seconds"] for call in calls)
    ids = json.dumps([call["ids"] for call in calls]).encode()
    row: dict[str, Any] = {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "output_sha256": hashlib.sha256(ids).hexdigest(),
    }
    beside = [call for call in plain if call is not None]
    if beside:
        ratios = [_speed(call) / _speed(base) for call, base in zip(calls, beside, strict=True)]
        row["speedup"] = row["tokens_per_second"] * sum(c["seconds"] for c in beside) / _tokens(beside)
        row["median_speedup"] = statistics.median(ratios)
    if all("differences" in call for call in calls):
        texts = sum(len(call["ids"]) for call in calls)
        row["identical_to_plain"] = texts - sum(len(call["differences"]) for call in calls)
    if method.draft is not None:
        row |= speculation(calls, method)
    elif method.counts_forwards:
        forwards = sum(call["target_forwards"] for call in calls)
        row |= {"num_spec_steps": forwards, "mean_acceptance_length": tokens / forwards}
    return row


def _tokens(calls: Iterable[Call]) -> int:
    return sum(len(ids) for call in calls for ids in call["ids"])


def _rounds(calls: Iterable[Call]) -> list[Round]:
    return [Round(**values) for call in calls for values in call["rounds"]]


def _speed(call: Call) -> float:
    return _tokens([call]) / call["seconds"]


def speculation(calls: Sequence[Call], method: Method) -> dict[str, Any]:
    """What the rounds of a DSpark method's calls add up to.

    As in vLLM, `num_draft_tokens` counts drafts sent to verification. `mean_acceptance_length` is τ, the tokens that
    rounds committed: in the round that ends a text, the target's own token may be missing.
    """
    assert method.draft is not None
    rounds = _rounds(calls)
    gamma = method.draft.config.num_draft_tokens
    stats = SpeculationStats(rounds=rounds, gamma=gamma)
    histogram = Counter(r.accepted for r in rounds)
    return {
        "num_spec_tokens": method.options.get("num_assistant_tokens", gamma),
        "num_spec_steps": stats.num_rounds,
        "num_draft_tokens": stats.num_verified,
        "num_accepted_draft_tokens": stats.num_accepted,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "draft_acceptance_rate": stats.acceptance_rate,
        "acceptance_histogram": {str(accepted): histogram[accepted] for accepted in sorted(histogram)},
        "expected_acceptance_length": stats.expected_acceptance_length,
        "acceptance_by_position": stats.acceptance_by_position,
        "tried_by_position": slots.tried_by_position(rounds) or [0] * gamma,
        "confidence_by_position": slots.confidence_by_position(rounds),
        "paths": dict(Counter(call["path"] for call in calls)),
        "captured": sum(call["captured"] for call in calls),
        "reasons": sorted({call["reason"] for call in calls}),
    }


def _macro_mean(sets: Mapping[str, Any], method: str) -> dict[str, float]:
    """Means over the sets, each set counting once (paper, Table 1)."""
    rows = [group["methods"][method] for group in sets.values()]
    names = ("mean_acceptance_length", "draft_acceptance_rate", "tokens_per_second", "speedup")
    return {name: statistics.fmean(row[name] for row in rows) for name in names if name in rows[0]}


def _differences(records: Sequence[Mapping[str, Any]], methods: Sequence[Method], dtype: str) -> dict[str, Any]:
    """Greedy texts that differ from plain decoding's, and the verdict on those of DSpark.

    `outputs` is "identical", "near ties" (all differences begin where two logits are closer than `near_tie`),
    "different", or "not compared".
    """
    found: list[dict[str, Any]] = []
    compared = False
    drafts = {method.name for method in methods if method.draft is not None}
    for record in records:
        for turn, content in enumerate(record["turns"]):
            for name, call in content["calls"].items():
                compared |= "differences" in call and name in drafts
                for difference in call.get("differences", ()):
                    where = {"prompt": record["prompts"][difference["row"]], "turn": turn, "method": name}
                    found.append(where | {"at": difference["at"], "logit_gap": difference["logit_gap"]})
    tie = NEAR_TIE.get(dtype, NEAR_TIE["torch.bfloat16"])
    ours = [d for d in found if d["method"] in drafts]
    wide = [d for d in ours if d["logit_gap"] is None or d["logit_gap"] > tie]
    verdict = "different" if wide else "near ties" if ours else "identical"
    return {"outputs": verdict if compared else "not compared", "near_tie": tie, "differences": found}
