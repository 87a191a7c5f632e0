"""What rounds say about acceptance at each position: c_k and a_j against what happened, and what a threshold would do.

Slot k of a round is *tried* if x_1..x_{k-1} were accepted and x_k was then accepted or rejected. Slots behind ℓ, behind
a rejection, or behind the token that ended the text are not. Rounds are those of `SpeculationStats.rounds`.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from ..generation.record import Round
from .metrics import auroc, brier, ece

RELIABILITY_BINS = 10


def num_tried(r: Round) -> int:
    """How many slots of a round were tried: 1..num_tried."""
    rejected = r.next_token is not None and r.accepted < r.verified
    return r.accepted + rejected


def tried_by_position(rounds: Sequence[Round]) -> list[int]:
    """For each slot, the rounds in which it was tried: the counts behind `acceptance_by_position`."""
    slots = max((len(r.draft_tokens) for r in rounds), default=0)
    return [sum(num_tried(r) > k for r in rounds) for k in range(slots)]


def conditional_outcomes(rounds: Sequence[Round], k: int) -> tuple[list[float], list[int]]:
    """c_k of the rounds in which slot k (from 0) was tried, and whether x_k was accepted."""
    tried = [r for r in rounds if r.confidence is not None and num_tried(r) > k]
    return [r.confidence[k] for r in tried if r.confidence], [int(r.accepted > k) for r in tried]


def survival_outcomes(rounds: Sequence[Round], k: int) -> tuple[list[float], list[int]]:
    """a_j of slot k (from 0) and whether x_1..x_{k+1} all passed, of the rounds that verified the slot and know."""
    known = []
    for r in rounds:
        decided = r.accepted > k or num_tried(r) > r.accepted
        if r.survival is not None and r.verified > k and decided:
            known.append((r.survival[k], int(r.accepted > k)))
    return [a for a, _ in known], [label for _, label in known]


def confidence_by_position(rounds: Sequence[Round]) -> list[dict[str, Any]] | None:
    """ECE, AUROC and Brier score of c_k and a_j at each position; `None` without confidence head."""
    if not any(r.confidence for r in rounds):
        return None
    slots = max(len(r.draft_tokens) for r in rounds)
    return [
        {
            "position": k + 1,
            "c": _quality(*conditional_outcomes(rounds, k)),
            "a": _quality(*survival_outcomes(rounds, k)),
        }
        for k in range(slots)
    ]


def _quality(predicted: list[float], labels: list[int]) -> dict[str, Any] | None:
    """Numbers of one position, `None` where nothing was tried."""
    if not predicted:
        return None
    return {
        "count": len(predicted),
        "predicted": sum(predicted) / len(predicted),
        "accepted": sum(labels) / len(labels),
        "ece": ece(predicted, labels),
        "auroc": auroc(predicted, labels),
        "brier": brier(predicted, labels),
    }


def reliability(rounds: Sequence[Round]) -> dict[str, list[dict[str, float]]] | None:
    """Bins of a reliability diagram over all positions, for `c` and `a`: mean prediction, share accepted, count."""
    if not any(r.confidence for r in rounds):
        return None
    slots = range(max(len(r.draft_tokens) for r in rounds))
    outcomes = {"c": conditional_outcomes, "a": survival_outcomes}
    pairs = {name: [pair for k in slots for pair in zip(*of(rounds, k), strict=True)] for name, of in outcomes.items()}
    return {name: reliability_bins(of_all) for name, of_all in pairs.items()}


def reliability_bins(pairs: Iterable[tuple[float, float]]) -> list[dict[str, float]]:
    """Mean prediction, mean outcome (`accepted`) and count of the bins that (prediction, outcome) pairs fall into."""
    bins: list[list[tuple[float, float]]] = [[] for _ in range(RELIABILITY_BINS)]
    for predicted, label in pairs:
        bins[min(int(predicted * RELIABILITY_BINS), RELIABILITY_BINS - 1)].append((predicted, label))
    return [
        {"predicted": sum(p for p, _ in b) / len(b), "accepted": sum(y for _, y in b) / len(b), "count": len(b)}
        for b in bins
        if b
    ]


def threshold_curve(rounds: Sequence[Round], steps: int = 20) -> list[dict[str, float | None]] | None:
    """Tokens per round, drafts verified and their acceptance if blocks were cut at the first c_k below a threshold.

    A replay: recorded rounds are cut where the threshold would have cut them. A run with the threshold begins its later
    rounds at other anchors, so this is an estimate (paper, Figure 5). `None` without confidence head.
    """
    known = [r for r in rounds if r.confidence]
    if not known:
        return None
    curve: list[dict[str, float | None]] = []
    for step in range(steps + 1):
        threshold = step / steps
        tokens = verified = accepted = 0
        for r in known:
            c = r.confidence or []
            cut = next((k for k, value in enumerate(c[: r.verified]) if value < threshold), r.verified)
            passed = min(r.accepted, cut)
            # A draft that ended the text leaves no room for the target's own token.
            tokens += passed + (cut < r.accepted or r.next_token is not None)
            verified += cut
            accepted += passed
        curve.append(
            {
                "threshold": threshold,
                "tokens_per_step": tokens / len(known),
                "verified_per_step": verified / len(known),
                "draft_acceptance_rate": accepted / verified if verified else None,
            }
        )
    return curve
