"""`Prompts`: short prompts in one recorded forward. Kernel by kernel, launching takes longer than the work."""

from functools import partial

import torch

from ..proposal import Proposer
from .attention import SHORT
from .graphs import Graphs
from .ragged_cache import SPARE, FlatTokens, RaggedContext
from .twin import Twin

# Tokens of a recorded forward. Few sizes, since each is recorded when it is first met; steps are small enough that a
# large target does not lose more by padding than it gains. Longer prompts keep the device busy anyway.
SIZES = tuple(SHORT * n // 8 for n in (1, 2, 3, 4, 6, 8))


def pack(lengths: list[int], chunk: int, starts: list[int] | None = None) -> list[list[tuple[int, int, int]]]:
    """Spans (row, start, count) of rows of these lengths in groups of at most `chunk` tokens, rows in order."""
    groups: list[list[tuple[int, int, int]]] = [[]]
    free = chunk
    for row, length in enumerate(lengths):
        start = starts[row] if starts else 0
        while start < length:
            if not free:
                groups.append([])
                free = chunk
            count = min(length - start, free)
            groups[-1].append((row, start, count))
            start, free = start + count, free - count
    return groups


class Prompts:
    """Prompt forwards of up to `num_rows` rows. Layers are not compiled for them: that takes longer than it saves."""

    def __init__(self, twin: Twin, proposer: Proposer, context: RaggedContext, num_rows: int):
        self._twin, self._proposer, self._context = twin, proposer, context
        self._num_rows = num_rows
        device = proposer.draft.device
        self._ids, self._rows, self._positions = torch.zeros(3, SIZES[-1], dtype=torch.long, device=device)
        self._starts = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)
        self._keep = torch.zeros(num_rows, dtype=torch.long, device=device)

    def fits(self, num_tokens: int) -> bool:
        # Where a window moves on, tokens of one prompt would race for a slot.
        return num_tokens <= SIZES[-1] and self._context.window is None

    def run(self, graphs: Graphs, ids: torch.Tensor, tokens: FlatTokens, keep: torch.Tensor) -> torch.Tensor:
        """Fill the caches with `ids` [T]; logits [K, V] of the tokens in `keep` [K].

        Raises:
            RecordingFailed: the first time that so many tokens are met.
        """
        count = len(ids)
        size = next(size for size in SIZES if size >= count)
        self._clear()
        for buffer, values in ((self._ids, ids), (self._rows, tokens.rows), (self._positions, tokens.positions)):
            buffer[:count] = values
        self._starts.copy_(tokens.row_starts)
        self._keep[: len(keep)] = keep
        return self._run(graphs, size)[: len(keep)].clone()

    def record(self, graphs: Graphs) -> None:
        """Record every size, without any token of a row.

        Raises:
            RecordingFailed: what it says.
        """
        self._clear()
        for size in SIZES:
            self._run(graphs, size)

    def _clear(self) -> None:
        self._rows.fill_(SPARE)
        for buffer in (self._positions, self._starts, self._keep):
            buffer.zero_()

    def _run(self, graphs: Graphs, size: int) -> torch.Tensor:
        # Recording runs it more than once, which writes the same states again.
        return graphs.run(("prompt", self._num_rows, size), partial(self._forward, size), static=None)

    def _forward(self, size: int) -> torch.Tensor:
        positions = self._positions[:size]
        # The same bound for all sizes: the attention kernel is compiled once.
        tokens = FlatTokens(self._rows[:size], positions, positions.int(), self._starts, SHORT)
        logits, features = self._twin.forward(self._ids[:size], tokens, self._keep)
        self._context.committed = tokens
        self._proposer.draft.append_context(self._context, features, positions[None])
        return logits
