"""Rounds whose every decision falls on the device, so that one CUDA graph holds a whole round.

Draft block, Markov walk, confidence, flat verify tokens, target forward, acceptance and the new draft context have
fixed shapes; only which rows still run and how much room they have comes from the host, and one small result goes back.
On a device without graphs the same code runs uncaptured.
"""

import torch

from .. import confidence
from ..proposal import Proposer
from .ragged_cache import FlatTokens, RaggedContext


class DeviceRounds:
    """Greedy rounds of `num_rows` rows.

    Args:
        forward: flat ids [T] and their tokens -> logits [T, V] and tapped features [1, T, ·].
        proposer, cache, context: of the pair.
        num_rows: R.
        threshold: on c_k, 0 for none.
    """

    def __init__(self, forward, proposer: Proposer, context: RaggedContext, num_rows: int, threshold: float):
        self._forward = forward
        self._proposer = proposer
        self._context = context
        self._threshold = threshold
        self._gamma = proposer.draft.config.num_draft_tokens
        self._block = proposer.draft.config.block_size
        self.num_rows = num_rows
        device = proposer.draft.device
        self.anchors = torch.zeros(num_rows, dtype=torch.long, device=device)
        self.lengths = torch.zeros(num_rows, dtype=torch.long, device=device)
        # Drafts that may be verified, by row; -1 for rows that have ended.
        self.limits = torch.full((num_rows,), -1, dtype=torch.long, device=device)
        # Drafts, the target's own token, accepted, verified, then the bits of c_k.
        self.result = torch.zeros(num_rows, 2 * self._gamma + 3, dtype=torch.int32, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def run(self, limits: list[int]) -> torch.Tensor:
        """One round; `limits[r]` drafts of row r may be verified, -1 leaves it out. Returns `result` on the host."""
        self.limits.copy_(torch.tensor(limits), non_blocking=True)
        bucket = self._bucket(sum(limit + 1 for limit in limits))
        if self.limits.device.type != "cuda":
            self._step(bucket)
        else:
            if bucket not in self._graphs:
                self._graphs[bucket] = self._capture(bucket)
                self.limits.copy_(torch.tensor(limits))
            self._graphs[bucket].replay()
        return self.result.cpu()

    def _bucket(self, num_tokens: int) -> int:
        """Length of the flat axis: exact on the host, a few fixed lengths for graphs."""
        if self.limits.device.type != "cuda":
            return num_tokens
        bucket = self._gamma + 1
        while bucket < num_tokens:
            bucket *= 2
        return min(bucket, self.num_rows * (self._gamma + 1))

    def _capture(self, bucket: int) -> torch.cuda.CUDAGraph:
        self.limits.fill_(-1)  # rounds without rows: state and caches stay as they are
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._step(bucket)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step(bucket)
        return graph

    def _step(self, bucket: int) -> None:
        lengths, anchors = self.lengths, self.anchors
        block = self._propose(anchors, lengths)
        drafts = block.tokens
        active = self.limits >= 0
        verified = self.limits.clamp(min=0)
        bits = drafts.new_zeros(drafts.shape, dtype=torch.int32)
        if block.confidence_logits is not None:
            temperatures = self._proposer.draft.config.confidence_temperatures
            c = confidence.conditional(block.confidence_logits, temperatures)
            bits = c.contiguous().view(torch.int32)
            if self._threshold > 0:
                verified = torch.minimum(verified, (c >= self._threshold).long().cumprod(-1).sum(-1))
        tokens, slots = self._flat(lengths, torch.where(active, verified + 1, 0), bucket)
        ids = torch.cat((anchors[:, None], drafts), dim=1)
        ids = torch.cat((ids, ids[:1]))[tokens.rows, slots]
        logits, features = self._forward(ids, tokens)

        first = tokens.row_starts[:-1, None] + torch.arange(self._gamma + 1, device=ids.device)
        chosen = logits.argmax(-1)[first.clamp(max=bucket - 1)]
        matches = (chosen[:, :-1] == drafts) & (first[:, :-1] - first[:, :1] < verified[:, None])
        accepted = matches.long().cumprod(-1).sum(-1)
        own = chosen.gather(1, accepted[:, None])[:, 0]
        committed = torch.where(active, accepted + 1, 0)
        self._commit(tokens, slots, committed, features)
        self.anchors.copy_(torch.where(active, own, anchors))
        self.lengths.add_(committed)
        columns = (drafts, own[:, None], accepted[:, None], verified[:, None])
        self.result.copy_(torch.cat([*(column.int() for column in columns), bits], dim=1))

    def _propose(self, anchors: torch.Tensor, lengths: torch.Tensor):
        rows = torch.arange(self.num_rows, device=anchors.device)
        offsets = torch.arange(self._block, device=anchors.device)
        starts = torch.arange(self.num_rows + 1, device=anchors.device, dtype=torch.int32) * self._block
        positions = (lengths[:, None] + offsets).flatten()
        self._context.blocks = FlatTokens(rows.repeat_interleave(self._block), positions, starts, self._block)
        return self._proposer.propose(
            self._context, anchors[:, None], lengths, lambda _, logits: (logits, logits.argmax(dim=-1))
        )

    def _flat(self, lengths: torch.Tensor, counts: torch.Tensor, bucket: int) -> tuple[FlatTokens, torch.Tensor]:
        """The next `counts[r]` tokens of each row on an axis of `bucket`; the rest is padding of row R."""
        starts = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
        index = torch.arange(bucket, device=counts.device)
        rows = torch.searchsorted(starts[1:], index, right=True)
        slots = torch.where(rows < self.num_rows, index - starts[rows], 0)
        positions = torch.cat((lengths, lengths.new_zeros(1)))[rows] + slots
        return FlatTokens(rows, positions, starts.int(), self._gamma + 1), slots

    def _commit(self, tokens: FlatTokens, slots: torch.Tensor, committed: torch.Tensor, features: torch.Tensor) -> None:
        """Draft context of the committed tokens; what was rejected goes to the spare row."""
        kept = slots < torch.cat((committed, committed.new_zeros(1)))[tokens.rows]
        rows = torch.where(kept, tokens.rows, self.num_rows)
        positions = torch.where(kept, tokens.positions, 0)
        self._context.committed = FlatTokens(rows, positions, tokens.row_starts, tokens.most)
        self._proposer.draft.append_context(self._context, features, tokens.positions[None])
