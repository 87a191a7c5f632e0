"""What transformers' warpers keep, in float64, and where float32 may decide otherwise."""

import torch
from transformers import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper


def scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """What the temperature warper gives on CUDA, where torch multiplies by the reciprocal, in float32."""
    return logits.float() * torch.tensor(temperature).reciprocal()


def warped(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Scores of one row [V] after the warpers generate() builds for these options, in the dtype of `logits`."""
    scores = scaled(logits, temperature).to(logits.dtype)[None]
    warpers = LogitsProcessorList()
    if top_k > 0:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p > 0:
        warpers.append(MinPLogitsWarper(min_p))
    return warpers(torch.zeros(1, 1, dtype=torch.long), scores)[0]


def undecided(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, unit=1e-6):
    """Which places of the ascending order float32 rounding may put on either side of a limit [V]."""
    ascending = warped(scaled(logits, temperature).double(), top_k=top_k).sort().values
    near = (ascending.softmax(-1).cumsum(-1) - (1 - top_p)).abs() < unit if top_p < 1 else ascending.isnan()
    ratio = (ascending - ascending[-1]).exp()
    return near | (ratio < 1e-12) | ((ratio - min_p).abs() < unit * min_p)


def check(probabilities, logits, **options):
    """One row of probabilities against the warpers. Returns how many tokens were kept.

    The sort of the top-p warper is not stable: it keeps a determined number of equal scores, but any of them. Ours are
    those with the highest ids.
    """
    probabilities, logits = probabilities.cpu().double(), logits.cpu().float()
    kept, wanted = int((probabilities > 0).sum()), int((warped(logits.double(), **options) > float("-inf")).sum())
    scores, order = scaled(logits, options.get("temperature", 1.0)).double().sort(stable=True)
    assert kept >= 1 and (probabilities[order[-kept:]] > 0).all(), "not the likeliest tokens"
    between = slice(len(order) - max(kept, wanted), len(order) - min(kept, wanted))
    assert undecided(logits, **options)[between].all(), (options, kept, wanted)
    torch.testing.assert_close(probabilities[order[-kept:]], scores[-kept:].softmax(-1), atol=1e-6, rtol=2e-5)
    return kept
