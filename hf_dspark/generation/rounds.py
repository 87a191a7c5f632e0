"""Rounds on fixed buffers: draft, verify and commit of many rows, all decisions on the device.

The host only says when a row ends and reads one small result a round. Everything here has shapes that depend on the
number of lanes alone and can be recorded in a CUDA graph; on a CPU the same code simply runs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .. import confidence, kernels
from ..compiling import compiled
from ..modeling_dspark import BackboneOutput
from ..proposal import Proposer, markov_walk
from .graphs import TURN, Graphs
from .layout import (
    Blocks,
    Lanes,
    VerifyTokens,
    bucket,
    close_round,
    lay_verify,
    open_round,
    plan_verify,
    report,
)
from .ragged_cache import RaggedContext
from .twin import Twin
from .warpers import DeviceWarpers


@dataclass(frozen=True)
class RoundOptions:
    """How a call decides. `count`: most drafts verified; `truncates`: by confidence; `one_hot`: drafts not drawn."""

    count: int
    truncates: bool
    samples: bool
    one_hot: bool


class Proposed(NamedTuple):
    """Drafts [L, γ] of the lanes, their distributions q [L, γ, V] if they were drawn, and confidence logits [L, γ]."""

    lanes: Lanes
    drafts: torch.Tensor
    q: torch.Tensor | None
    confidence_logits: torch.Tensor | None


class Verified(NamedTuple):
    """A verify forward: logits [T, V] and tapped features [1, T, ·] of its tokens."""

    at: VerifyTokens
    logits: torch.Tensor
    features: torch.Tensor


class Running:
    """A round, or a part of it, at work on the device; what the host needs of it is on its way.

    Args:
        result: a tensor on the device; the next replay may overwrite it.
    """

    def __init__(self, result: torch.Tensor):
        self._result = result.to("cpu", non_blocking=result.is_cuda, copy=True)
        self._event = torch.cuda.current_stream(result.device).record_event() if result.is_cuda else None

    def wait(self) -> torch.Tensor:
        """The result on the host, once it is there."""
        if self._event is not None:
            self._event.synchronize()
        return self._result


class Rounds:
    """State of up to `num_rows` rows and the steps of a round.

    Attributes:
        anchors: [R] int64, x_0 of each row.
        lengths: [R] int64, tokens of each row in the caches.
        ends: [R] int64, tokens of the row's text when it is full; 0 once it has ended.
        seed: [1] int64, of the random streams; it moves on with every round.
        compiles: whether the small steps are compiled where they are recorded.
        threshold: on c_k. temperatures: [γ] T_k. warpers: of the target's distribution.
    """

    def __init__(self, twin: Twin, proposer: Proposer, context: RaggedContext, num_rows: int, compiles: bool):
        self._twin, self._proposer, self._context = twin, proposer, context
        self.compiles = compiles
        config = proposer.draft.config
        self.gamma, self.block_size = config.num_draft_tokens, config.block_size
        self.num_rows = num_rows
        device = proposer.draft.device
        self.anchors = torch.zeros(num_rows, dtype=torch.long, device=device)
        self.lengths = torch.zeros(num_rows, dtype=torch.long, device=device)
        self.ends = torch.zeros(num_rows, dtype=torch.long, device=device)
        self.seed = torch.zeros(1, dtype=torch.long, device=device)
        self.threshold = torch.zeros(1, device=device, dtype=torch.float32)
        self.temperatures = torch.ones(self.gamma, device=device, dtype=torch.float32)
        self.warpers = DeviceWarpers(num_rows * (self.gamma + 1), device)
        self._drafts = torch.zeros(num_rows, self.gamma, dtype=torch.long, device=device)
        self._verified = torch.zeros(num_rows, dtype=torch.long, device=device)
        self._committed = torch.zeros(2, num_rows, dtype=torch.long, device=device)
        self._proposed: Proposed
        self._before: torch.Tensor
        self._c: torch.Tensor | None
        self._source: tuple  # of the recording that `_lanes` belongs to
        self._lanes: Lanes
        self._open: Verified

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

    def end(self, rows: list[int]) -> None:
        """Take rows off the lanes, from the next round on; rounds at work go on."""
        index = torch.tensor(rows, device="cpu")
        index = index.pin_memory() if self.ends.is_cuda else index  # any other copy would wait for them
        self.ends.index_fill_(0, index.to(self.ends.device, non_blocking=True), 0)

    def run(self, graphs: Graphs, width: int, options: RoundOptions, num_tokens: int | None = None) -> torch.Tensor:
        """One round of at most `width` running rows, all on the device.

        Args:
            num_tokens: to verify, anchors included: the drafts that are most likely to survive. `None` for all of
                them. Recordings take more, since theirs is a multiple of `width`, so there are γ + 1 at most; once rows
                have ended, a power of two times `width`: widths that last for a few rounds do not pay for many.

        Returns:
            [width, 2γ + 3] int32 on the host, lane by lane: drafts, the target's own token, accepted, verified, and the
            bits of c_k (0 without a confidence head).
        """
        return self.start(graphs, width, options, num_tokens).wait()

    def start(self, graphs: Graphs, width: int, options: RoundOptions, num_tokens: int | None = None) -> Running:
        """`run` without waiting for the device."""
        size = whole = width * (options.count + 1)
        if num_tokens is not None:
            size = min(whole, self._flat_size(num_tokens, width) if graphs.enabled else num_tokens)
        shared = size < whole
        key = ("round", self.num_rows, width, size, options, self.warpers.kind)
        static = self._static(width) and not shared
        function = partial(self._round, width, options, size, shared, graphs.enabled)
        with TURN:
            return Running(graphs.run(key, function, static))

    def _round(self, width: int, options: RoundOptions, size: int, shared: bool, recorded: bool) -> torch.Tensor:
        proposed = self._propose(width, options, recorded)
        decision = proposed.confidence_logits, self.temperatures, self.threshold, options.count, options.truncates
        plan, flat = self._do(plan_verify, recorded), size if recorded or shared else None
        c, lengths, at = plan(proposed.lanes, self.lengths, proposed.drafts, flat, shared, *decision)
        return self._conclude(proposed, c, lengths, at, options, recorded)

    def _propose(self, width: int, options: RoundOptions, recorded: bool) -> Proposed:
        with torch.profiler.record_function("dspark_propose"):
            self.seed.add_(1)
            if options.count == 0:  # the target goes on alone
                lanes, _ = self._open_round(width, recorded)
                return Proposed(lanes, lanes.anchors[:, None].expand(-1, self.gamma), None, None)
            lanes, backbone = self.draft(width, recorded, raw=True)
            drafts, q = self.walk(lanes, backbone, options)
            return Proposed(lanes, drafts, q, self._proposer.confidence_logits(backbone, lanes.anchors, drafts))

    def _conclude(
        self,
        proposed: Proposed,
        c: torch.Tensor | None,
        lengths: torch.Tensor,
        at: VerifyTokens,
        options: RoundOptions,
        recorded: bool,
    ) -> torch.Tensor:
        lanes, drafts, q, _ = proposed
        with torch.profiler.record_function("target_verify"):
            verified = self.verify(at)
        with torch.profiler.record_function("decode_sample"):
            accepted, own = self.accept(verified, drafts, q, lengths, options)
            self.commit(lanes, verified, accepted + 1, own, recorded)
            return self._do(report, recorded)(drafts, own, accepted, lengths, c)

    # ---- the same in two parts, for lengths that a scheduler chooses in between

    def propose(self, graphs: Graphs, width: int, options: RoundOptions) -> Running | None:
        """Draft a block in every lane. c_k [width, γ] are on their way then; `None` without confidence head."""

        def function() -> tuple[Proposed, torch.Tensor, torch.Tensor | None]:
            proposed = self._propose(width, options, graphs.enabled)
            logits = proposed.confidence_logits
            c = None if logits is None else confidence.conditional(logits, self.temperatures)
            return proposed, self.lengths.clone(), c

        key = ("propose", self.num_rows, width, options, self.warpers.kind)
        self._proposed, self._before, self._c = graphs.run(key, function, self._static(width))
        return None if self._c is None else Running(self._c)

    def conclude(self, graphs: Graphs, width: int, lengths: list[int], options: RoundOptions) -> torch.Tensor:
        """Verify `lengths[i]` drafts of each lane with a row; returns what `run` returns."""
        recorded, proposed, before, c = graphs.enabled, self._proposed, self._before, self._c
        size = self._flat_size(sum(lengths) + len(lengths), width) if recorded else None
        padded = torch.tensor(lengths + [-1] * (width - len(lengths)))
        self._verified[:width] = padded

        def function() -> torch.Tensor:
            lengths = self._verified[:width]
            # The lanes are those of the first part also while this one is recorded, when it runs more than once: so it
            # starts from the lengths of that time.
            at = self._do(lay_verify, recorded)(proposed.lanes, before, proposed.drafts, lengths, size)
            return self._conclude(proposed, c, lengths, at, options, recorded)

        key = ("conclude", self.num_rows, width, size, options, self.warpers.kind)
        whole = size == width * (self.gamma + 1)
        return graphs.run(key, function, whole and self._static(width)).cpu()

    def _flat_size(self, num_tokens: int, width: int) -> int:
        """Of a recording with room for `num_tokens`."""
        per_lane = -(-num_tokens // width)
        if width < self.num_rows:
            per_lane = min(bucket(per_lane), self.gamma + 1)
        return width * per_lane

    # ---- steps

    def _static(self, width: int) -> bool:
        """Whether rounds of this width are worth a compilation of their own: those before the first row ends."""
        return width == self.num_rows

    def _do(self, function: Callable, recorded: bool) -> Callable:
        """`function`, or its compiled form: dozens of launches for a handful of numbers become a few."""
        return compiled(function, fullgraph=True) if recorded and self.compiles else function

    def _open_round(self, width: int, recorded: bool) -> tuple[Lanes, Blocks]:
        config = self._proposer.draft.config
        state = self.ends, self.lengths, self.anchors
        return self._do(open_round, recorded)(*state, width, config.block_size, config.mask_token_id)

    def draft(self, width: int, recorded: bool, raw: bool) -> tuple[Lanes, BackboneOutput]:
        """Backbone output of a block behind the anchor of every lane; `raw` as in `Proposer.backbone`."""
        lanes, blocks = self._open_round(width, recorded)
        self._context.blocks = blocks.tokens
        return lanes, self._proposer.backbone(self._context, blocks.ids, blocks.positions, raw)

    def walk(
        self, lanes: Lanes, backbone: BackboneOutput, options: RoundOptions
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Drafts [L, γ] and, when they are drawn, their distributions q [L, γ, V]."""
        step = self._proposer.kernel_step(backbone)
        if not options.samples or options.one_hot:
            return markov_walk(lanes.anchors[:, None], self.gamma, step)[0], None

        def sampled(prefix: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
            logits = step(prefix, k)[1]
            q = self._proposer.on_vocabulary(self.warpers.probabilities(logits, logits.shape[-1]))
            return kernels.draw(q, (self.seed, k)), q

        tokens, q = markov_walk(lanes.anchors[:, None], self.gamma, sampled)
        return tokens, torch.stack(q, dim=1)

    def verify(self, at: VerifyTokens) -> Verified:
        return Verified(at, *self._twin.forward(at.ids, at.tokens))

    def accept(
        self,
        verified: Verified,
        drafts: torch.Tensor,
        q: torch.Tensor | None,
        lengths: torch.Tensor,
        options: RoundOptions,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Drafts accepted of each lane and the target's own token behind them, [L] each."""
        scores, seed = verified.logits, None
        if options.samples:
            size = max(scores.shape[-1], self._proposer.vocabulary.size)
            scores, seed = self.warpers.probabilities(scores, size), self.seed
            q = None if q is None else F.pad(q, (0, size - q.shape[-1]))
        starts = verified.at.lane_starts
        return kernels.accept_and_sample(drafts, q, scores, lengths.int(), seed=seed, row_starts=starts)

    def commit(
        self, lanes: Lanes, verified: Verified, committed: torch.Tensor, own: torch.Tensor, recorded: bool
    ) -> None:
        """Keep the first `committed` [L] tokens of every lane in the caches; `own` [L] are the next anchors."""
        state = self.anchors, self.lengths
        self._context.committed = self._do(close_round, recorded)(lanes, verified.at, *state, committed, own)
        positions = verified.at.tokens.positions[None]
        self._proposer.draft.append_context(self._context, verified.features, positions)

    # ---- the same in three parts, for decisions on the host

    def propose_lanes(self, graphs: Graphs, width: int, drafts: bool) -> BackboneOutput | None:
        """Backbone output of the next block of every lane; `None` when the round goes without `drafts`."""
        if not drafts:
            self._source = "lanes", self.num_rows
            open_round = partial(self._open_round, width, graphs.enabled)
            self._lanes, _ = graphs.run((*self._source, width), open_round, self._static(width))
            return None
        self._source = "draft", self.num_rows
        draft = partial(self.draft, width, graphs.enabled, raw=False)
        self._lanes, backbone = graphs.run((*self._source, width), draft, self._static(width))
        return backbone

    def verify_lanes(
        self, graphs: Graphs, width: int, drafts: torch.Tensor, lengths: list[int], count: int
    ) -> torch.Tensor:
        """Logits [T, V] of anchor and the first `lengths[i]` drafts of each lane, one lane after the other."""
        self._drafts[: len(lengths)] = drafts
        self._verified[: len(lengths)] = torch.tensor(lengths)
        recorded, lanes = graphs.enabled, self._lanes

        def function() -> Verified:
            size = width * (count + 1) if recorded else None
            given = self._drafts[:width], self._verified[:width], size
            return self.verify(self._do(lay_verify, recorded)(lanes, self.lengths, *given))

        self._open = graphs.run(("verify", *self._source, width, count), function, self._static(width))
        return self._open.logits

    def commit_lanes(self, graphs: Graphs, width: int, committed: list[int], own: list[int], count: int) -> None:
        """Close the round that `verify_lanes` opened: tokens to keep of each lane, and its next anchor."""
        lanes, verified = self._lanes, self._open
        self._committed[:, : len(committed)] = torch.tensor([committed, own])
        given = self._committed[0, :width], self._committed[1, :width]
        graphs.run(
            ("commit", *self._source, width, count),
            lambda: self.commit(lanes, verified, *given, graphs.enabled),
            self._static(width),
        )
