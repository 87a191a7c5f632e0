"""What validation reports, as the reference counts it: along the text, teacher-forced."""

from dataclasses import dataclass
from typing import Any

import torch

from .blocks import BlockOutput
from .losses import CHUNK_ELEMENTS
from .rows import LogitRows


@dataclass(frozen=True)
class Validation:
    """How good a draft is on texts.

    Attributes:
        tau: expected committed tokens a round when sampling, mean over blocks of 1 + Σ_j Π_{k≤j} Σ min(q_k, p_k).
        tau_greedy: the same for greedy decoding, 1 + the drafts before the first whose arg max is not the target's.
        acceptance_by_position: [γ] mean acceptance probability of each slot, the tokens before it being right.
        confidence_error: mean |c_k − acceptance probability|, `None` without confidence head.
        confidence_bias: the same with sign.
        num_blocks: blocks measured. Blocks at the end of a text have fewer than γ slots.
    """

    tau: float
    tau_greedy: float
    acceptance_by_position: list[float]
    confidence_error: float | None
    confidence_bias: float | None
    num_blocks: int


@torch.no_grad()
def block_sums(
    block: BlockOutput, target_logits: torch.Tensor | LogitRows, chunk_elements: int = CHUNK_ELEMENTS
) -> torch.Tensor:
    """Sums over the blocks of a batch that `summarise` turns into means; float64 [5 + 2γ], to be added up."""
    rows, target_rows = LogitRows.of(block.draft_logits), LogitRows.of(target_logits)
    shape = block.eval_mask.shape
    accept, match = (torch.empty(shape, device=block.eval_mask.device).flatten() for _ in range(2))
    for chunk in rows.chunks(chunk_elements):
        logits, target = rows[chunk], target_rows[chunk]
        accept[chunk] = torch.minimum(logits.softmax(-1), target.softmax(-1)).sum(-1)
        match[chunk] = (logits.argmax(-1) == target.argmax(-1)).float()
    counts = block.eval_mask.double()
    accept, match = (x.view(shape).double() * counts for x in (accept, match))
    blocks = block.eval_mask[..., 0].double().sum()
    error = torch.zeros((), dtype=torch.float64, device=accept.device)
    bias = error
    if block.confidence_logits is not None:
        difference = (block.confidence_logits.sigmoid().double() - accept) * counts
        error, bias = difference.abs().sum(), difference.sum()
    scalars = torch.stack((blocks, accept.cumprod(-1).sum(), match.cumprod(-1).sum(), error, bias))
    return torch.cat((scalars, accept.sum((0, 1)), counts.sum((0, 1))))


def summarise(sums: torch.Tensor, *, has_confidence: bool) -> Validation:
    """Means from the sums of `block_sums` over all batches."""
    blocks, survival, prefix, error, bias, *by_slot = sums.tolist()
    gamma = len(by_slot) // 2
    accepted, counts = by_slot[:gamma], by_slot[gamma:]
    slots = max(sum(counts), 1.0)
    return Validation(
        tau=1 + survival / max(blocks, 1.0),
        tau_greedy=1 + prefix / max(blocks, 1.0),
        acceptance_by_position=[a / max(n, 1.0) for a, n in zip(accepted, counts, strict=True)],
        confidence_error=error / slots if has_confidence else None,
        confidence_bias=bias / slots if has_confidence else None,
        num_blocks=int(blocks),
    )


def flat(validation: Validation) -> dict[str, Any]:
    """Scalars under the names that TensorBoard shows."""
    values = {
        "tau": validation.tau,
        "tau_greedy": validation.tau_greedy,
        "confidence_error": validation.confidence_error,
        "confidence_bias": validation.confidence_bias,
    }
    values |= {f"acceptance@{k}": a for k, a in enumerate(validation.acceptance_by_position, start=1)}
    return {f"validation/{name}": value for name, value in values.items() if value is not None}
