"""What recorded rounds tell about acceptance, against the shape of a healthy draft.

In a healthy draft the first slot is kept most of the time and the later ones, where they are reached, not much less
often.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from ..evaluation.slots import tried_by_position
from ..generation.record import Round, SpeculationStats
from .findings import NOTE, OK, PROBLEM, Finding

LOW_TAU = 1.3  # below it a round, which costs more than a plain step, cannot pay
NEVER, FAINT = 0.05, 0.2
ENOUGH = 10  # rounds that a rate must come from
SHAPES = {
    "never": (
        "even the first draft is nearly never right",
        "Suspect, in this order: another target than the draft's, the block layout, the taps, the chat template.",
    ),
    "first only": (
        "only the first slot works; the slots that read the mask token do not",
        "Check `mask_token_id` and that its embedding is the one of training, the block layout and the Markov head.",
    ),
    "falling": (
        "acceptance falls steeply from slot to slot",
        "Check `mask_token_id`, and the rotary settings of the draft (`rope_theta`, scaling) against its training.",
    ),
    "low": (
        "all slots are accepted too rarely",
        "Suspect the chat template or thinking mode, a quantised or fine-tuned target, the language or subject of the "
        "prompts, or a draft that needs more training.",
    ),
}


def check_acceptance(rounds: Sequence[Round], gamma: int) -> tuple[list[Finding], dict[str, Any]]:
    """Findings, and the numbers behind them, of all rounds."""
    stats = SpeculationStats(rounds=list(rounds), gamma=gamma)
    tau, rates, tried = stats.mean_acceptance_length, stats.acceptance_by_position, tried_by_position(rounds)
    parts = by_length(rounds)
    if not rounds:
        fix = "Examine prompts with longer answers, in the format that the target expects."
        findings = [Finding("acceptance", NOTE, "no rounds: answers ended at their first token", fix)]
    else:
        findings = [*_judge(tau, rates, tried), *_confidence(tau, stats.expected_acceptance_length), *_lengths(parts)]
    measured = {
        "num_rounds": len(rounds),
        "mean_acceptance_length": tau,
        "expected_acceptance_length": stats.expected_acceptance_length,
        "acceptance_by_position": rates,
        "tried_by_position": tried,
        "acceptance_by_length": parts,
    }
    return findings, measured


def shape(rates: Sequence[float | None], tried: Sequence[int]) -> str:
    """Key of `SHAPES`, or "healthy"."""
    known = [rate for rate, count in zip(rates, tried, strict=True) if rate is not None and count >= ENOUGH]
    if not known:
        return "healthy"  # as far as can be seen
    if known[0] < NEVER:
        return "never"
    if len(known) > 1 and known[1] < max(NEVER, known[0] / 4):
        return "first only"
    if len(known) > 2 and known[0] > 2 * FAINT and known[-1] < known[0] / 3:
        return "falling"
    return "low" if known[0] < 2 * FAINT else "healthy"


def _judge(tau: float, rates: Sequence[float | None], tried: Sequence[int]) -> Iterator[Finding]:
    numbers = f"τ = {tau:.2f}; accepted by slot: {' '.join('-' if r is None else f'{r:.2f}' for r in rates)}"
    kind = shape(rates, tried)
    if tau < LOW_TAU:
        seen, fix = SHAPES["low" if kind == "healthy" else kind]
        yield Finding("acceptance", PROBLEM, f"{numbers}: {seen}", fix)
    elif kind == "healthy":
        yield Finding("acceptance", OK, numbers)
    else:
        yield Finding("acceptance", NOTE, f"{numbers}: {SHAPES[kind][0]}", SHAPES[kind][1])


def _confidence(tau: float, expected: float | None) -> Iterator[Finding]:
    """A draft that is sure of what is rejected was trained on something else; one that doubts knows its limits."""
    if expected is None:
        return
    if expected - 1 > 2 * (tau - 1) + 0.5:
        seen = f"the draft expects τ = {expected:.2f}: it is sure of drafts that this target rejects"
        fix = "Check that target, taps and template are those of its training; else `hf-dspark calibrate` mends it."
        yield Finding("confidence", NOTE, seen, fix)
    elif tau < LOW_TAU:
        yield Finding("confidence", NOTE, f"the draft expects τ = {expected:.2f}: it knows that it guesses")


def by_length(rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """τ of the rounds that began in the first 1024 tokens of a text, from there to 4096, and behind."""
    bounds = [0, 1024, 4096, 2**40]
    parts = []
    for start, end in zip(bounds, bounds[1:], strict=False):
        members = [r for r in rounds if start <= r.position < end]
        if members:
            tau = SpeculationStats(rounds=members).mean_acceptance_length
            parts.append({"from": start, "num_rounds": len(members), "mean_acceptance_length": tau})
    return parts


def _lengths(measured: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    parts = [part for part in measured if part["num_rounds"] >= ENOUGH]
    if len(parts) > 1 and parts[-1]["mean_acceptance_length"] - 1 < (parts[0]["mean_acceptance_length"] - 1) / 2:
        first, last = parts[0], parts[-1]
        seen = (
            f"τ falls from {first['mean_acceptance_length']:.2f} to {last['mean_acceptance_length']:.2f} behind "
            f"{last['from']} tokens"
        )
        fix = "The draft was trained on shorter texts: try `draft.context_window`, or drop it for long prompts."
        yield Finding("context", NOTE, seen, fix)
