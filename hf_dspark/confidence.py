"""From confidence logits to survival and to how many drafts are verified. Pure functions."""

import torch


def conditional(
    confidence_logits: torch.Tensor, temperatures: list[float] | torch.Tensor | None = None
) -> torch.Tensor:
    """c_k = σ(logit_k / T_k), the conditional acceptance probability of each slot.

    Shapes: [..., γ] in and out, float32. `temperatures` are the γ STS temperatures; `None` means T_k = 1.
    """
    if temperatures is not None:
        confidence_logits = confidence_logits / torch.as_tensor(
            temperatures, device=confidence_logits.device, dtype=confidence_logits.dtype
        )
    return confidence_logits.sigmoid()


def survival(c: torch.Tensor) -> torch.Tensor:
    """a_j = c_1 · … · c_j, the probability that the first j drafts all pass. Shapes: [..., γ] in and out."""
    return c.cumprod(dim=-1)


def truncate(c: torch.Tensor, threshold: float | torch.Tensor) -> torch.Tensor:
    """ℓ: the drafts before the first slot with c_k < `threshold`. Threshold 0 keeps the whole block.

    Shapes: [..., γ] in, [...] int64 out.
    """
    return (c >= threshold).long().cumprod(dim=-1).sum(dim=-1)
