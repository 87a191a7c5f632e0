"""The objective of a DSpark draft: cross-entropy, total variation and confidence (paper, training objective)."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from ..compiling import compiled, many_shapes
from .blocks import BlockOutput
from .rows import LogitRows, total

CHUNK_ELEMENTS = 2**25
CUDA_CHUNK_ELEMENTS = 2**27  # fewer, larger kernels
EPSILON = 1e-6


@dataclass(frozen=True)
class LossOutput:
    """Loss of a batch; all float32.

    Attributes:
        loss: scalar with gradient, `ce` · ce + `tv` · tv + `confidence` · confidence.
        ce: weighted mean of the cross-entropy to the label, in nats.
        tv: weighted mean of Σ|q_k − p_k|, twice the total variation distance.
        confidence: weighted mean of the binary cross-entropy of the confidence logits; 0 without confidence head.
        accept_rate: [B, A, γ], 1 − Σ|q_k − p_k| / 2 = Σ min(q_k, p_k), the probability that x_k is accepted.
        num_slots: scalar, the slots that count.
    """

    loss: torch.Tensor
    ce: torch.Tensor
    tv: torch.Tensor
    confidence: torch.Tensor
    accept_rate: torch.Tensor
    num_slots: torch.Tensor


def slot_weights(eval_mask: torch.Tensor, decay: float | None) -> torch.Tensor:
    """w_k = exp(−(k−1) / decay) for slots k = 1..γ that count, else 0; without decay 1. Shapes [B, A, γ], float32."""
    weights = eval_mask.float()
    if decay is None:
        return weights
    if not decay > 0:
        raise ValueError(f"`decay` must be > 0, got {decay}. Use None for equal weights.")
    return weights * torch.exp(-torch.arange(eval_mask.shape[-1], device=eval_mask.device) / decay)


def dspark_loss(
    block_output: BlockOutput,
    target_logits: torch.Tensor | LogitRows,
    *,
    ce: float = 0.1,
    tv: float = 0.9,
    confidence: float = 1.0,
    decay: float | None = 4.0,
    chunk_elements: int | None = None,
) -> LossOutput:
    """Loss of anchor blocks against the target's distribution of the same tokens.

    Every component is a mean over slots weighted with w_k = exp(−(k−1)/decay). The confidence head learns the
    acceptance probability 1 − Σ|q_k − p_k|/2, which is a constant there.

    Memory: rows are taken `chunk_elements` logits at a time, forward and backward in one pass with exact gradients.
    With lazy logits no more than 64 bytes · `chunk_elements` are in use, whatever the batch: 2.1 GB by default. On CUDA
    the arithmetic of a chunk is compiled into a few kernels, which leaves about 20 bytes each, 2.7 GB.

    Args:
        block_output: from `forward_blocks`.
        target_logits: [B, A, γ, V], the target's logits for `target_ids`, that is at the positions before them.
        ce, tv, confidence: weights of the components.
        decay: in slots; `None` for equal weights.
        chunk_elements: logits that exist at a time; by default 2^25, on CUDA 2^27.

    Raises:
        ValueError: for logits of another shape than the draft's, or a decay that is not positive.
    """
    rows, target_rows = LogitRows.of(block_output.draft_logits), LogitRows.of(target_logits)
    if rows.shape != target_rows.shape:
        raise ValueError(f"`target_logits` must be {tuple(rows.shape)}, got {tuple(target_rows.shape)}.")
    weights = slot_weights(block_output.eval_mask, decay)
    chunk_elements = chunk_elements or (CUDA_CHUNK_ELEMENTS if weights.is_cuda else CHUNK_ELEMENTS)
    normal = weights / (weights.sum() + EPSILON)
    slots = _SlotLoss.apply(
        rows,
        target_rows,
        block_output.target_ids.flatten(),
        (ce * normal.flatten(), tv * normal.flatten()),
        chunk_elements,
        torch.is_grad_enabled(),
        *rows.per_row,
        *rows.shared,
    )
    loss, ce_rows, l1_rows = slots
    l1 = l1_rows.view_as(normal)
    ce_mean, tv_mean = _mean(normal, ce_rows.view_as(normal)), _mean(normal, l1)
    accept_rate = 1 - l1 / 2
    confidence_mean = torch.zeros_like(ce_mean)
    if block_output.confidence_logits is not None:
        c = accept_rate.clamp(0, 1).masked_fill(weights == 0, 0)
        entropy = F.binary_cross_entropy_with_logits(block_output.confidence_logits.float(), c, reduction="none")
        confidence_mean = _mean(normal, entropy)
        loss = loss + confidence * confidence_mean
    num_slots = block_output.eval_mask.float().sum()
    return LossOutput(loss, ce_mean, tv_mean, confidence_mean.detach(), accept_rate, num_slots)


def _mean(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Σ w · v; slots of weight 0 may hold anything, infinities too."""
    return torch.where(weights != 0, weights * values, 0).sum()


class _SlotLoss(torch.autograd.Function):
    """Σ (ce_weight · CE + tv_weight · Σ|q − p|) over rows, with the rows' own values.

    The gradient of a row's logits is known in closed form once its probabilities are, so each chunk goes straight on to
    its backward and its logits are dropped: nothing of size V outlives a chunk but the gradient of W2.
    """

    @staticmethod
    def forward(ctx, rows, target_rows, labels, weights, chunk_elements, with_grad, *inputs):
        wanted = [with_grad and needed for needed in ctx.needs_input_grad[-len(inputs) :]]
        gradients = [torch.zeros_like(x) if want else None for x, want in zip(inputs, wanted, strict=True)]
        per_row = len(rows.per_row)
        ce_rows, l1_rows = (torch.empty(labels.shape, device=labels.device) for _ in range(2))
        for chunk in rows.chunks(chunk_elements):
            with torch.set_grad_enabled(any(wanted)):
                leaves = [
                    (x[chunk] if i < per_row else x).detach().requires_grad_(wanted[i]) for i, x in enumerate(inputs)
                ]
                addends = rows.compute(*leaves)
            ce_weight, tv_weight = (w[chunk] for w in weights)
            ce_rows[chunk], l1_rows[chunk], gradient = _slots(
                tuple(addend.detach() for addend in addends),
                target_rows.addends(chunk),
                labels[chunk],
                ce_weight,
                tv_weight,
            )
            if any(wanted):
                asked = [leaf for leaf in leaves if leaf.requires_grad]
                reached = [addend for addend in addends if addend.requires_grad]
                upstream = [gradient.to(addend.dtype) for addend in reached]
                _add(gradients, wanted, per_row, chunk, torch.autograd.grad(reached, asked, upstream))
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(ce_rows, l1_rows)
        return _mean(weights[0], ce_rows) + _mean(weights[1], l1_rows), ce_rows, l1_rows

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream, *_):
        return (None,) * 6 + tuple(g if g is None else g * upstream.to(g.dtype) for g in ctx.saved_tensors)


def _add(gradients: list, wanted: list[bool], per_row: int, chunk: slice, found: tuple[torch.Tensor, ...]) -> None:
    indices = [i for i, want in enumerate(wanted) if want]
    for i, gradient in zip(indices, found, strict=True):
        if i < per_row:
            gradients[i][chunk] = gradient
        else:
            gradients[i] += gradient


def slot_values(
    addends: tuple[torch.Tensor, ...],
    target_addends: tuple[torch.Tensor, ...],
    labels: torch.Tensor,
    ce_weight: torch.Tensor,
    tv_weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cross-entropy and Σ|q − p| of rows, and the gradient of their weighted sum by the draft's logits.

    With s = sign(q − p): ∂CE/∂z = q − 1[label] and ∂Σ|q − p|/∂z = q (s − Σ q s). Shapes: addends of the logits [n, V],
    the others [n]. The gradient has the addends' precision, as it is theirs.
    """
    logits = total(addends)
    log_q = logits.log_softmax(dim=-1)
    q, p = log_q.exp(), total(target_addends).softmax(dim=-1)
    label = torch.arange(logits.shape[-1], device=labels.device) == labels.unsqueeze(-1)
    cross_entropy = -log_q.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    difference = q - p
    sign = difference.sign()
    l1_gradient = q * (sign - (q * sign).sum(dim=-1, keepdim=True))
    gradient = ce_weight.unsqueeze(-1) * (q - label.float()) + tv_weight.unsqueeze(-1) * l1_gradient
    gradient = gradient.masked_fill(((ce_weight == 0) & (tv_weight == 0)).unsqueeze(-1), 0)
    return cross_entropy, difference.abs().sum(dim=-1), gradient.to(addends[0].dtype)


def _slots(addends: tuple[torch.Tensor, ...], *others: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if addends[0].device.type != "cuda":
        return slot_values(addends, *others)
    with many_shapes():
        return compiled(slot_values)(addends, *others)
