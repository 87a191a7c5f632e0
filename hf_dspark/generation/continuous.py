"""Plain decoding of many texts over a ragged cache: a row whose text has ended takes the next one at once.

For text in bulk. In a batch of transformers' generate() every row waits for the longest; here the rows stay full, and a
step (one token for every row) is one recording on CUDA. Prompts are read token by token by the same step, which is slow
for long ones and keeps everything in one shape.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from .. import kernels
from ..compiling import many_shapes
from .graphs import Graphs, RecordingFailed, current
from .pair import why_not_target
from .ragged_cache import FlatTokens, RaggedCache
from .twin import Twin

logger = logging.get_logger(__name__)

STEPS = 16  # between two looks at which rows have ended


class ContinuousDecoder:
    """Writes continuations of texts with `num_rows` rows of `max_length` tokens.

    Args:
        captured: record the step in a CUDA graph and compile the layers; by default on CUDA.

    Raises:
        NotImplementedError: for a target that cannot run over a ragged cache; the message says why.
    """

    def __init__(self, target: PreTrainedModel, num_rows: int, max_length: int, *, captured: bool | None = None):
        if why_not := why_not_target(target):
            raise NotImplementedError(why_not)
        text = target.config.get_text_config(decoder=True)
        self.num_rows, self.max_length = num_rows, max_length
        cache = RaggedCache(text.num_hidden_layers, 1, 16)
        self._twin = Twin(target, cache, [0])
        cache.resize(num_rows, max_length, keep=False)
        device = target.device
        self._rows = torch.arange(num_rows, device=device)
        self._starts = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        self._ids = torch.zeros(num_rows, max_length, dtype=torch.long, device=device)
        # The place of the token that is read next; tokens given; and the length at which a text is full.
        self._at, self._given, self._full = (torch.zeros(num_rows, dtype=torch.long, device=device) for _ in range(3))
        self._running = torch.zeros(num_rows, dtype=torch.bool, device=device)
        self._is_end = torch.zeros(text.vocab_size, dtype=torch.bool, device=device)
        self._temperature = torch.ones(num_rows, device=device)
        self._seed = torch.zeros(1, dtype=torch.long, device=device)
        self._graphs = Graphs(self._idle, self._compiled)
        with torch.no_grad(), current(device):
            self._step(False)  # makes the stores, which a recording must find
        self._graphs.enabled = device.type == "cuda" if captured is None else captured
        self._plain_forwards = [layer.forward for layer in self._twin.layers]
        self._compiled_forwards = [torch.compile(forward) for forward in self._plain_forwards]

    @torch.no_grad()
    def write(
        self,
        texts: list[list[int]],
        *,
        temperature: float | list[float],
        ends: list[int],
        at_most: int | None = None,
        seed: int = 0,
    ) -> list[list[int]]:
        """Continuations of `texts` up to and with a token of `ends`, `at_most` tokens or `max_length` of the whole.

        Args:
            texts: lists of ids, each shorter than `max_length`, as many as wanted.
            temperature: of all texts or of each; 0 for the likeliest tokens.
            seed: of the random numbers.

        Raises:
            ValueError: for an empty text or one that leaves no room, an end that is no token, or `at_most` below 1.
        """
        if any(not 0 <= end < len(self._is_end) for end in ends):
            raise ValueError(f"`ends` {ends} must be token ids below {len(self._is_end)}.")
        if at_most is not None and at_most < 1:
            raise ValueError(f"`at_most` must be at least 1, got {at_most}. Use None for as many as there is room for.")
        for text in texts:
            if not 0 < len(text) < self.max_length:
                raise ValueError(f"A text of {len(text)} tokens: it must have from 1 to {self.max_length - 1}.")
        temperatures = temperature if isinstance(temperature, list) else [temperature] * len(texts)
        samples = any(t > 0 for t in temperatures)
        self._seed.fill_(seed)
        self._is_end.zero_()
        self._is_end[torch.tensor(ends, dtype=torch.long)] = True
        self._running.zero_()
        found: list[list[int]] = [[] for _ in texts]
        waiting = iter(range(len(texts)))
        at_work: dict[int, int] = {}  # row -> text
        while True:
            free = (row for row in range(self.num_rows) if row not in at_work)
            new = dict(zip(free, waiting, strict=False))
            self._fill({row: texts[i] for row, i in new.items()}, at_most)
            self._temperature[list(new)] = self._temperature.new_tensor([temperatures[i] for i in new.values()])
            at_work |= new
            if not at_work:
                return found
            with current(self._ids.device):
                for _ in range(STEPS):
                    self._run(samples)
            for row, ids in self._ended(list(at_work)):
                i = at_work.pop(row)
                found[i] = ids[len(texts[i]) :]

    def _fill(self, texts: dict[int, list[int]], at_most: int | None) -> None:
        """Put new texts into rows that are free."""
        if not texts:
            return
        device, lengths = self._ids.device, [len(text) for text in texts.values()]
        rows, given = torch.tensor([list(texts), lengths], device=device)
        ids = torch.zeros(len(texts), max(lengths), dtype=torch.long)
        for place, text in zip(ids, texts.values(), strict=True):
            place[: len(text)] = torch.tensor(text)
        self._ids[rows, : ids.shape[1]] = ids.to(device)
        self._at[rows] = 0
        self._given[rows] = given
        self._full[rows] = (given + (self.max_length if at_most is None else at_most)).clamp(max=self.max_length)
        self._running[rows] = True

    def _ended(self, rows: list[int]) -> list[tuple[int, list[int]]]:
        """Those of `rows` that do not run any more, with all their ids."""
        running = self._running.tolist()
        ended = [row for row in rows if not running[row]]
        if not ended:
            return []
        index = torch.tensor(ended, device=self._ids.device)
        lengths = (self._at[index] + 1).tolist()
        return [(row, ids[:n]) for row, ids, n in zip(ended, self._ids[index].tolist(), lengths, strict=True)]

    def _run(self, samples: bool) -> None:
        try:
            self._graphs.run(samples, lambda: self._step(samples))
        except RecordingFailed as error:
            logger.warning_once(f"Decoding steps run one kernel at a time, which is slow: {error}")
            self._graphs.enabled = False
            self._run(samples)

    def _step(self, samples: bool) -> None:
        """One token further in every row that runs; the others repeat themselves."""
        ids, at, running = self._ids, self._at, self._running
        tokens = FlatTokens(self._rows, at, at.int(), self._starts, 1)
        logits, _ = self._twin.forward(ids[self._rows, at], tokens)
        chosen = logits.argmax(-1)
        if samples:
            self._seed.add_(1)
            drawn = self._temperature > 0
            q = (logits.float() / torch.where(drawn, self._temperature, 1.0)[:, None]).softmax(-1)
            chosen = torch.where(drawn, kernels.draw(q, (self._seed, 0)), chosen)
        after = (at + 1).clamp(max=self.max_length - 1)
        given = after < self._given
        before = ids[self._rows, after]
        ids[self._rows, after] = torch.where(running & ~given, chosen, before)
        at.copy_(torch.where(running, after, at))
        running.logical_and_(given | ~(self._is_end[chosen] | (after + 1 >= self._full)))

    @contextmanager
    def _idle(self) -> Iterator[None]:
        """Steps inside change nothing: no row runs, and what is written to the cache is there already."""
        running, seed = self._running.clone(), self._seed.clone()
        self._running.zero_()
        try:
            yield
        finally:
            self._running.copy_(running)
            self._seed.copy_(seed)

    @contextmanager
    def _compiled(self, static: bool | None) -> Iterator[None]:
        layers: list[nn.Module] = self._twin.layers
        for layer, forward in zip(layers, self._compiled_forwards, strict=True):
            layer.forward = forward
        try:
            with many_shapes():
                yield
        finally:
            for layer, forward in zip(layers, self._plain_forwards, strict=True):
                layer.forward = forward
