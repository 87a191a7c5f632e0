"""Which row, slot and position every token of a round has. Pure functions of small tensors, without host reads.

A round works on *lanes*: the rows that still run, in order, padded to a fixed width.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from .. import confidence
from .ragged_cache import SPARE, FlatTokens


class Lanes(NamedTuple):
    """The rows at work.

    Attributes:
        index: [L] int64, the row of each lane; a lane without a row has the number of one that does not run.
        active: [L] bool, whether the lane has a row.
        anchors, lengths: [L] int64, x_0 and the tokens in the caches.
        room: [L] int64, tokens that the row's text still takes.
        before: [R+1] int32, lanes of lower rows.
    """

    index: torch.Tensor
    active: torch.Tensor
    anchors: torch.Tensor
    lengths: torch.Tensor
    room: torch.Tensor
    before: torch.Tensor

    @property
    def rows(self) -> torch.Tensor:
        return torch.where(self.active, self.index, SPARE)


class Blocks(NamedTuple):
    """The draft's blocks: `ids` and `positions` [L, block_size], and where they stand."""

    ids: torch.Tensor
    positions: torch.Tensor
    tokens: FlatTokens


class VerifyTokens(NamedTuple):
    """The verify tokens of a round: `ids` [T], `slots` [T] within their row's block, first token of each lane [L]."""

    ids: torch.Tensor
    slots: torch.Tensor
    tokens: FlatTokens
    lane_starts: torch.Tensor


def bucket(count: int) -> int:
    """Lanes for `count` rows: the next power of two."""
    return 1 << (count - 1).bit_length()


def find_lanes(ends: torch.Tensor, lengths: torch.Tensor, anchors: torch.Tensor, width: int) -> Lanes:
    """The rows [R] whose text of `lengths` + 1 tokens has not reached its end, in `width` lanes."""
    room = ends - lengths - 1
    running = room > 0
    before = F.pad(running.cumsum(0), (1, 0))
    num_rows = ends.shape[0]
    if num_rows == 1:
        index = torch.zeros(1, dtype=torch.long, device=ends.device)
    else:
        places = torch.where(running, before[:-1], width)
        rest = torch.argmin(running.int()).expand(width + 1)
        index = rest.scatter(0, places, torch.arange(num_rows, device=ends.device))[:width]
    active = torch.arange(width, device=ends.device) < before[-1]
    return Lanes(index, active, anchors[index], lengths[index], room[index], before.int())


def lay_blocks(lanes: Lanes, size: int, mask_token_id: int) -> Blocks:
    """Blocks [x_0, MASK, ...] of `size` slots behind the committed tokens; every slot sees as far as the last."""
    slots = torch.arange(size, device=lanes.index.device)
    ids = torch.where(slots == 0, lanes.anchors[:, None], mask_token_id)
    positions = lanes.lengths[:, None] + slots
    limits = positions[:, -1:].expand(-1, size).int()
    rows = lanes.rows[:, None].expand(-1, size)
    tokens = FlatTokens(rows.flatten(), positions.flatten(), limits.flatten(), lanes.before * size, size)
    return Blocks(ids, positions, tokens)


def decide_lengths(
    lanes: Lanes,
    confidence_logits: torch.Tensor | None,
    temperatures: torch.Tensor,
    threshold: torch.Tensor,
    count: int,
    truncates: bool,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """c_k [L, γ], and ℓ [L]: what room, `count` and, if `truncates`, confidence allow; -1 in lanes without a row."""
    c = None if confidence_logits is None else confidence.conditional(confidence_logits, temperatures)
    verified = torch.clamp(lanes.room - 1, max=count)
    if truncates and c is not None:
        verified = torch.minimum(verified, confidence.truncate(c, threshold))
    return c, torch.where(lanes.active, verified, -1)


def share(lanes: Lanes, c: torch.Tensor | None, limits: torch.Tensor, gamma: int, size: int) -> torch.Tensor:
    """ℓ [L] within `limits` [L]: what a flat axis of `size` tokens has left beside the anchors goes to the drafts that
    are most likely to survive by c_k [L, γ]; without confidence head to the first ones."""
    if len(limits) == 1:  # its own drafts, and survivals fall
        return limits.clamp(max=size - 1)
    slots = torch.arange(gamma, device=limits.device)
    a = 1.0 / (2.0 + slots) if c is None else confidence.survival(c)
    a = torch.where(slots < limits[:, None], a.nan_to_num(0.0), 0.0).flatten()
    # As a scheduler shares it on the host, without a sort: counting who comes before whom is one fused step.
    index = torch.arange(len(a), device=a.device)
    before = (a > a[:, None]) | ((a == a[:, None]) & (index < index[:, None]))
    kept = before.sum(-1) < size - lanes.active.sum()
    return torch.minimum(limits, kept.view(-1, gamma).sum(-1))


def lay_verify(
    lanes: Lanes, lengths: torch.Tensor, drafts: torch.Tensor, verified: torch.Tensor, size: int | None
) -> VerifyTokens:
    """Anchor and the first `verified` [L] drafts of every lane on a flat axis of `size` tokens, the rest padding.

    Args:
        lengths: [R], of all rows.
        drafts: [L, γ].
        size: `None` for as many as there are, which costs a look at them.
    """
    num_rows, device = lengths.shape[0], lengths.device
    counts = torch.where(lanes.active, verified + 1, 0)
    starts = F.pad(torch.zeros_like(lengths).scatter(0, lanes.index, counts).cumsum(0), (1, 0))
    place = torch.arange(int(starts[-1]) if size is None else size, device=device)
    rows = (place[:, None] >= starts[1:]).sum(-1)
    padding = rows == num_rows
    inside = torch.where(padding, 0, rows)
    slots = torch.where(padding, 0, place - starts[inside])
    positions = torch.where(padding, 0, lengths[inside] + slots)
    blocks = torch.cat((lanes.anchors[:, None], drafts), dim=1)
    lane = lanes.before.long()[inside].clamp(max=lanes.index.shape[0] - 1)
    tokens = FlatTokens(
        torch.where(padding, SPARE, rows), positions, positions.int(), starts.int(), drafts.shape[1] + 1
    )
    return VerifyTokens(blocks[lane, slots], slots, tokens, starts[lanes.index].int())


def lay_commit(lanes: Lanes, verify: VerifyTokens, committed: torch.Tensor, num_rows: int) -> FlatTokens:
    """The verify tokens that stay: the first `committed` [L] of every lane. What was rejected goes to the spare row."""
    of_row = torch.zeros(num_rows + 1, dtype=torch.long, device=committed.device)
    of_row = of_row.scatter(0, lanes.index, torch.where(lanes.active, committed, 0))  # the spare row keeps none
    tokens = verify.tokens
    kept = verify.slots < of_row[torch.where(tokens.rows < 0, num_rows, tokens.rows)]
    rows, positions = torch.where(kept, tokens.rows, SPARE), torch.where(kept, tokens.positions, 0)
    return FlatTokens(rows, positions, positions.int(), tokens.row_starts, tokens.most)


def move_on(
    lanes: Lanes, anchors: torch.Tensor, lengths: torch.Tensor, committed: torch.Tensor, own: torch.Tensor
) -> None:
    """Update `anchors` and `lengths` [R] in place: `committed` [L] tokens more, `own` [L] are the next anchors."""
    anchors.scatter_(0, lanes.index, torch.where(lanes.active, own, lanes.anchors))
    lengths.scatter_(0, lanes.index, lanes.lengths + torch.where(lanes.active, committed, 0))


def report(
    drafts: torch.Tensor, own: torch.Tensor, accepted: torch.Tensor, verified: torch.Tensor, c: torch.Tensor | None
) -> torch.Tensor:
    """All that the host needs of a round in one tensor, [L, 2γ + 3] int32; see `Rounds.run`."""
    bits = torch.zeros_like(drafts, dtype=torch.int32) if c is None else c.contiguous().view(torch.int32)
    columns = (drafts, own[:, None], accepted[:, None], verified[:, None])
    return torch.cat([*(column.int() for column in columns), bits], dim=1)


# ---- the steps of a round that are compiled as one


def open_round(
    ends: torch.Tensor, lengths: torch.Tensor, anchors: torch.Tensor, width: int, size: int, mask_token_id: int
) -> tuple[Lanes, Blocks]:
    lanes = find_lanes(ends, lengths, anchors, width)
    return lanes, lay_blocks(lanes, size, mask_token_id)


def plan_verify(
    lanes: Lanes, lengths: torch.Tensor, drafts: torch.Tensor, size: int | None, shared: bool, *decision: Any
) -> tuple[torch.Tensor | None, torch.Tensor, VerifyTokens]:
    c, verified = decide_lengths(lanes, *decision)
    if shared and size is not None:
        verified = share(lanes, c, verified, drafts.shape[1], size)
    return c, verified, lay_verify(lanes, lengths, drafts, verified, size)


def close_round(
    lanes: Lanes, at: VerifyTokens, anchors: torch.Tensor, lengths: torch.Tensor, committed: torch.Tensor,
    own: torch.Tensor,
) -> FlatTokens:  # fmt: skip
    tokens = lay_commit(lanes, at, committed, lengths.shape[0])
    move_on(lanes, anchors, lengths, committed, own)
    return tokens
