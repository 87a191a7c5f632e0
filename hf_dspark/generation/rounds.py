"""Rounds on fixed buffers: draft, verify and commit of many rows, all decisions on the device.

A round works on *lanes*: the rows that still run, in order, padded to a fixed width. Lanes are found on the device from
three numbers a row, so the host only says when a row ends and reads one small result a round. Everything here has
shapes that depend on the width alone and can be recorded in a CUDA graph; on a CPU the same code simply runs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .. import confidence, kernels
from ..modeling_dspark import BackboneOutput
from ..proposal import Proposer, markov_walk
from .graphs import Graphs
from .ragged_cache import SPARE, FlatTokens, RaggedContext
from .twin import Twin
from .warpers import DeviceWarpers


@dataclass(frozen=True)
class Lanes:
    """The rows at work: `index` [L] row of each lane, `active` [L] false for padding, and [L] numbers of its row."""

    index: torch.Tensor
    active: torch.Tensor
    anchors: torch.Tensor
    lengths: torch.Tensor
    room: torch.Tensor
    before: torch.Tensor  # [R+1] int32: lanes of lower rows

    @property
    def rows(self) -> torch.Tensor:
        return torch.where(self.active, self.index, SPARE)


@dataclass(frozen=True)
class Verified:
    """A verify forward: its tokens, the slot of each in its block, first token of each lane, and what came out."""

    tokens: FlatTokens
    slots: torch.Tensor
    lane_starts: torch.Tensor
    logits: torch.Tensor
    features: torch.Tensor


@dataclass(frozen=True)
class RoundOptions:
    """How a call decides. `count`: most drafts verified; `truncates`: by confidence; `one_hot`: drafts not drawn."""

    count: int
    truncates: bool
    samples: bool
    one_hot: bool


class Rounds:
    """State of up to `num_rows` rows and the steps of a round.

    Attributes:
        anchors: [R] int64, x_0 of each row.
        lengths: [R] int64, tokens of each row in the caches.
        ends: [R] int64, tokens of the row's text when it is full; 0 once it has ended.
        seed: [1] int64, of the random streams; it moves on with every round.
        threshold: on c_k. temperatures: [γ] T_k. warpers: of the target's distribution.
    """

    def __init__(self, twin: Twin, proposer: Proposer, context: RaggedContext, num_rows: int):
        self._twin, self._proposer, self._context = twin, proposer, context
        config = proposer.draft.config
        self.gamma, self.block_size = config.num_draft_tokens, config.block_size
        self.num_rows = num_rows
        device = proposer.draft.device
        self.anchors = torch.zeros(num_rows, dtype=torch.long, device=device)
        self.lengths = torch.zeros(num_rows, dtype=torch.long, device=device)
        self.ends = torch.zeros(num_rows, dtype=torch.long, device=device)
        self.seed = torch.zeros(1, dtype=torch.long, device=device)
        self.threshold = torch.zeros(1, device=device)
        self.temperatures = torch.ones(self.gamma, device=device)
        self.warpers = DeviceWarpers(num_rows * (self.gamma + 1), device)
        self._drafts = torch.zeros(num_rows, self.gamma, dtype=torch.long, device=device)
        self._verified = torch.zeros(num_rows, dtype=torch.long, device=device)
        self._committed = torch.zeros(num_rows, 2, dtype=torch.long, device=device)
        self._open: tuple[Lanes, Verified]

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Rounds inside change nothing: no row runs, and what is written goes to the spare row."""
        ends, seed = self.ends.clone(), self.seed.clone()
        self.ends.zero_()
        try:
            yield
        finally:
            self.ends.copy_(ends)
            self.seed.copy_(seed)

    def run(self, graphs: Graphs, width: int, options: RoundOptions) -> torch.Tensor:
        """One round of at most `width` running rows, all on the device.

        Returns:
            [width, 2γ + 3] int32 on the host, lane by lane: drafts, the target's own token, accepted, verified, and the
            bits of c_k (0 without a confidence head).
        """
        key = ("round", self.num_rows, width, options, self.warpers.kind)
        return graphs.run(key, lambda: self._round(width, options, exact=not graphs.enabled)).cpu()

    # ---- the same in three parts, for decisions on the host

    def propose_lanes(self, graphs: Graphs, width: int) -> BackboneOutput:
        """Backbone outputs of the next block of every lane."""
        key = ("draft", self.num_rows, width)
        return graphs.run(key, lambda: self.draft(self.lanes(width)))

    def verify_lanes(
        self, graphs: Graphs, width: int, drafts: torch.Tensor, lengths: list[int], count: int
    ) -> torch.Tensor:
        """Logits [T, V] of anchor and the first `lengths[i]` drafts of each lane, one lane after the other."""
        lanes = len(lengths)
        self._drafts[:lanes] = drafts
        self._verified[:lanes] = torch.tensor(lengths)

        def function() -> tuple[Lanes, Verified]:
            lanes = self.lanes(width)
            exact = not graphs.enabled
            return lanes, self.verify(lanes, self._drafts[:width], self._verified[:width], exact, count)

        self._open = graphs.run(("verify", self.num_rows, width, count), function)
        return self._open[1].logits

    def commit_lanes(self, graphs: Graphs, width: int, committed: list[int], own: list[int], count: int) -> None:
        """Close the round that `verify_lanes` opened: tokens to keep of each lane, and its next anchor."""
        lanes, verified = self._open
        self._committed[: len(committed)] = torch.tensor([committed, own]).T
        graphs.run(
            ("commit", self.num_rows, width, count),
            lambda: self.commit(lanes, verified, self._committed[:width, 0], self._committed[:width, 1]),
        )

    # ---- steps

    def lanes(self, width: int) -> Lanes:
        room = self.ends - self.lengths - 1
        running = room > 0
        before = F.pad(running.cumsum(0, dtype=torch.int32), (1, 0))
        if self.num_rows == 1:
            index = torch.zeros(1, dtype=torch.long, device=room.device)
        else:
            places = torch.where(running, before[:-1].long(), width)
            # Lanes without a row keep the number of one that does not run.
            rest = torch.argmin(running.int(), keepdim=True).expand(width + 1)
            index = rest.scatter(0, places, torch.arange(self.num_rows, device=room.device))[:width]
        lane = torch.arange(width, device=room.device)
        return Lanes(index, lane < before[-1], self.anchors[index], self.lengths[index], room[index], before)

    def draft(self, lanes: Lanes) -> BackboneOutput:
        """Backbone output of a block behind every lane's anchor."""
        size = self.block_size
        positions = lanes.lengths[:, None] + torch.arange(size, device=lanes.index.device)
        limits = positions[:, -1:].expand(-1, size).int()
        rows = lanes.rows[:, None].expand(-1, size)
        tokens = FlatTokens(rows.flatten(), positions.flatten(), limits.flatten(), lanes.before * size, size)
        self._context.blocks = tokens
        return self._proposer.backbone(self._context, lanes.anchors, positions)

    def walk(
        self, lanes: Lanes, backbone: BackboneOutput, options: RoundOptions
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Drafts [L, γ] and, when they are drawn, their distributions q [L, γ, V]."""
        step = self._proposer.kernel_step(backbone)
        if not options.samples or options.one_hot:
            return markov_walk(lanes.anchors[:, None], self.gamma, step)[0], None
        width = self._proposer.vocabulary.size

        def sampled(prefix: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
            q = self.warpers.probabilities(step(prefix, k)[1], width)
            return kernels.draw(q, (self.seed, k)), q

        tokens, q = markov_walk(lanes.anchors[:, None], self.gamma, sampled)
        return tokens, torch.stack(q, dim=1)

    def verify(self, lanes: Lanes, drafts: torch.Tensor, verified: torch.Tensor, exact: bool, count: int) -> Verified:
        """Target forward on anchor and `verified` [L] drafts of every lane, on a flat axis of fixed length.

        exact: without padding, which costs a look at the number of tokens.
        """
        counts = torch.where(lanes.active, verified + 1, 0)
        of_row = torch.zeros_like(self.lengths).scatter(0, lanes.index, counts)
        starts = F.pad(of_row.cumsum(0), (1, 0))
        size = int(starts[-1]) if exact else len(lanes.index) * (count + 1)
        place = torch.arange(size, device=starts.device)
        rows = torch.searchsorted(starts[1:], place, right=True)
        padding = rows == self.num_rows
        inside = torch.where(padding, 0, rows)
        slots = torch.where(padding, 0, place - starts[inside])
        positions = torch.where(padding, 0, self.lengths[inside] + slots)
        blocks = torch.zeros(self.num_rows, drafts.shape[1] + 1, dtype=torch.long, device=drafts.device)
        blocks[lanes.index] = torch.cat((lanes.anchors[:, None], drafts), dim=1)
        rows = torch.where(padding, SPARE, rows)
        tokens = FlatTokens(rows, positions, positions.int(), starts.int(), self.gamma + 1)
        logits, features = self._twin.forward(blocks[inside, slots], tokens)
        return Verified(tokens, slots, starts[lanes.index].int(), logits, features)

    def commit(self, lanes: Lanes, verified: Verified, committed: torch.Tensor, own: torch.Tensor) -> None:
        """Keep the first `committed` [L] tokens of every lane in the caches; `own` [L] are the next anchors."""
        committed = torch.where(lanes.active, committed, 0)
        of_row = torch.zeros(self.num_rows + 1, dtype=torch.long, device=own.device)
        of_row = of_row.scatter(0, lanes.index, committed)  # the spare row keeps none
        tokens = verified.tokens
        kept = verified.slots < of_row[tokens.rows]
        rows, positions = torch.where(kept, tokens.rows, SPARE), torch.where(kept, tokens.positions, 0)
        self._context.committed = FlatTokens(rows, positions, positions.int(), tokens.row_starts, tokens.most)
        self._proposer.draft.append_context(self._context, verified.features, tokens.positions[None])
        self.anchors[lanes.index] = torch.where(lanes.active, own, lanes.anchors)
        self.lengths[lanes.index] = lanes.lengths + committed

    def _round(self, width: int, options: RoundOptions, exact: bool) -> torch.Tensor:
        with torch.profiler.record_function("dspark_propose"):
            self.seed.add_(1)
            lanes = self.lanes(width)
            backbone = self.draft(lanes)
            drafts, q = self.walk(lanes, backbone, options)
            c = self._proposer.confidence_logits(backbone, lanes.anchors, drafts)
            c = None if c is None else confidence.conditional(c, self.temperatures)
            lengths = torch.clamp(lanes.room - 1, max=options.count)
            if options.truncates and c is not None:
                lengths = torch.minimum(lengths, confidence.truncate(c, self.threshold))
            lengths = torch.where(lanes.active, lengths, -1)
        with torch.profiler.record_function("target_verify"):
            verified = self.verify(lanes, drafts, lengths, exact, options.count)
        with torch.profiler.record_function("decode_sample"):
            scores, seed = verified.logits, None
            if options.samples:
                size = max(scores.shape[-1], self._proposer.vocabulary.size)
                scores, seed = self.warpers.probabilities(scores, size), self.seed
                q = None if q is None else F.pad(q, (0, size - q.shape[-1]))
            accepted, own = kernels.accept_and_sample(
                drafts, q, scores, lengths.int(), seed=seed, row_starts=verified.lane_starts
            )
            self.commit(lanes, verified, accepted + 1, own)
            bits = torch.zeros_like(drafts, dtype=torch.int32) if c is None else c.contiguous().view(torch.int32)
            columns = (drafts, own[:, None], accepted[:, None], lengths[:, None])
            return torch.cat([*(column.int() for column in columns), bits], dim=1)
