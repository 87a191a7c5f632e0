"""Which blocks a training step looks at, and what each slot of them is asked (paper, training objective)."""

from typing import NamedTuple

import torch


def sample_anchors(
    loss_mask: torch.Tensor, num_anchors: int, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the anchors of each sequence, without replacement, in ascending order.

    A position may be an anchor when it is supervised itself, as every anchor of a round is a token of the target, and
    when the token after it is, which the first slot predicts.

    Args:
        loss_mask: [B, S], 1 (or True) at supervised tokens.
        num_anchors: A, blocks a sequence.
        generator: random stream, on any device.

    Returns:
        `anchor_positions` [B, A] int64 and `keep_mask` [B, A] bool. Sequences with fewer than A possible anchors are
        filled with dummies: position 0, keep False.

    Raises:
        ValueError: for a mask that is not [B, S] or no anchors.
    """
    if loss_mask.dim() != 2:
        raise ValueError(f"`loss_mask` must be [B, S], got shape {tuple(loss_mask.shape)}.")
    if num_anchors < 1:
        raise ValueError(f"`num_anchors` must be at least 1, got {num_anchors}.")
    possible = possible_anchors(loss_mask)
    device = loss_mask.device if generator is None else generator.device
    scores = torch.rand(possible.shape, generator=generator, device=device).to(loss_mask.device)
    length = loss_mask.shape[1]
    best = scores.masked_fill(~possible, -1.0).topk(min(num_anchors, length), dim=1)
    positions = best.indices.masked_fill(best.values < 0, length).sort(dim=1).values
    positions = torch.nn.functional.pad(positions, (0, num_anchors - positions.shape[1]), value=length)
    keep = positions < length
    return positions.masked_fill(~keep, 0), keep


def possible_anchors(loss_mask: torch.Tensor) -> torch.Tensor:
    """[B, S] bool: the positions `sample_anchors` chooses from."""
    supervised = loss_mask.bool()
    possible = torch.zeros_like(supervised)
    possible[:, :-1] = supervised[:, :-1] & supervised[:, 1:]
    return possible


class SlotTargets(NamedTuple):
    """What is asked of each slot; all [B, A, γ].

    Attributes:
        prev_ids: x_{k-1}, the token before the label (teacher forcing).
        target_ids: the label x_k; the last token of the sequence for slots behind its end.
        eval_mask: bool, the slots that count: those before the first label of a block that is unsupervised or behind
            the end, in blocks that are no dummies.
    """

    prev_ids: torch.Tensor
    target_ids: torch.Tensor
    eval_mask: torch.Tensor


def slot_targets(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    anchor_positions: torch.Tensor,
    keep_mask: torch.Tensor,
    num_slots: int,
) -> SlotTargets:
    """Labels of the blocks after `anchor_positions`; shapes as in `sample_anchors` and `SlotTargets`."""
    length = input_ids.shape[1]
    slots = torch.arange(num_slots, device=input_ids.device)
    previous = anchor_positions.unsqueeze(-1) + slots
    labels = previous + 1
    supervised = gather_positions(loss_mask.bool(), labels) & (labels < length) & keep_mask.bool().unsqueeze(-1)
    return SlotTargets(
        prev_ids=gather_positions(input_ids, previous),
        target_ids=gather_positions(input_ids, labels),
        eval_mask=supervised.long().cumprod(dim=-1).bool(),
    )


def gather_positions(values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Entries of `values` [B, S] or [B, S, D] at `positions` [B, ...], clamped to the last one."""
    index = positions.clamp(max=values.shape[1] - 1)
    rows = torch.arange(values.shape[0], device=values.device).reshape(-1, *[1] * (index.dim() - 1))
    return values[rows, index]
