"""How good predicted probabilities are: ECE, AUROC, Brier score. Pure functions of numbers."""

from typing import Any

import torch


def ece(predicted: Any, observed: Any, *, num_bins: int = 15) -> float:
    """Expected calibration error: mean distance between prediction and outcome over bins of equal width.

    Σ_bins n_b / N · |mean prediction − mean outcome|, for c_k or a_j (paper, sequential temperature scaling).

    Args:
        predicted: [N] probabilities, a tensor, array or list.
        observed: [N] outcomes, 0 or 1; or their probabilities, where these are known.
        num_bins: bins over [0, 1]; a prediction on an edge belongs to the bin above it.

    Raises:
        ValueError: no numbers, two different lengths, or values outside [0, 1].
    """
    if num_bins < 1:
        raise ValueError(f"`num_bins` must be at least 1, got {num_bins}.")
    p, y = _probabilities("predicted", predicted), _probabilities("observed", observed)
    _same_length(p, y)
    bins = (p * num_bins).long().clamp(max=num_bins - 1)
    gaps = torch.zeros(num_bins, dtype=torch.float64).index_add_(0, bins, p - y)
    return float(gaps.abs().sum() / len(p))


def auroc(scores: Any, labels: Any) -> float | None:
    """Probability that an accepted draft has the higher score than a rejected one; a tie counts half.

    Only the order of the scores matters, so logits do as well as probabilities, and a temperature changes nothing.

    Args:
        scores: [N] finite numbers.
        labels: [N] in [0, 1]. A label between counts as that share of an accepted and the rest of a rejected draft.

    Returns:
        In [0, 1], 0.5 for scores that say nothing; `None` where nothing was accepted or nothing rejected.

    Raises:
        ValueError: no numbers, two different lengths, scores that are not finite or labels outside [0, 1].
    """
    s, y = _numbers("scores", scores), _probabilities("labels", labels)
    _same_length(s, y)
    _, group = s.unique(return_inverse=True)  # ascending, ties share a group
    groups = int(group.max()) + 1
    accepted = torch.zeros(groups, dtype=torch.float64).index_add_(0, group, y)
    rejected = torch.zeros(groups, dtype=torch.float64).index_add_(0, group, 1 - y)
    pairs = float(accepted.sum() * rejected.sum())
    if pairs <= 0:
        return None
    below = rejected.cumsum(0) - rejected
    return float((accepted * (below + rejected / 2)).sum()) / pairs


def brier(predicted: Any, observed: Any) -> float:
    """Mean squared distance between prediction and outcome; arguments and errors as for `ece`."""
    p, y = _probabilities("predicted", predicted), _probabilities("observed", observed)
    _same_length(p, y)
    return float((p - y).square().mean())


def _numbers(name: str, values: Any) -> torch.Tensor:
    """[N] float64 on the CPU."""
    numbers = torch.as_tensor(values, dtype=torch.float64, device="cpu").detach()
    if numbers.dim() != 1 or len(numbers) == 0:
        raise ValueError(f"`{name}` must be a list of at least one number, got shape {tuple(numbers.shape)}.")
    if not numbers.isfinite().all():
        raise ValueError(f"`{name}` must be finite, got {float(numbers[~numbers.isfinite()][0])}.")
    return numbers


def _probabilities(name: str, values: Any) -> torch.Tensor:
    numbers = _numbers(name, values)
    if numbers.min() < 0 or numbers.max() > 1:
        raise ValueError(f"`{name}` must lie in [0, 1], got {float(numbers.min())} to {float(numbers.max())}.")
    return numbers


def _same_length(first: torch.Tensor, second: torch.Tensor) -> None:
    if len(first) != len(second):
        raise ValueError(f"Predictions and outcomes differ in number: {len(first)} and {len(second)}.")
