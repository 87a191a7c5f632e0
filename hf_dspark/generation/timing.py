"""`EngineTimer`: times of the pieces of a round on an engine, for the cost model of the scheduler."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from transformers import GenerationConfig

from .graphs import TURN, finish
from .layout import bucket
from .record import unrecorded
from .rounds import RoundOptions, Running

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..modeling_dspark import DSparkForCausalLM
    from .engine import Engine


SMALLEST = 1e-3  # milliseconds; differences of two measurements may be 0
HOST_TOKENS = 48
TOGETHER = 4  # recorded runs of one measurement


class EngineTimer:
    """The engine with `num_rows` rows of `context_length` tokens in its caches; what they hold is lost.

    Greedy rounds with whole blocks; each size runs once before it is timed.
    """

    def __init__(self, engine: "Engine", num_rows: int, context_length: int):
        self._num_rows, self._length = num_rows, context_length
        self._rounds = engine.rounds(bucket(num_rows))
        gamma, width = self._rounds.gamma, self._rounds.num_rows
        self._options = RoundOptions(gamma, truncates=False, samples=False, one_hot=False)
        # Recorded runs follow each other at once, so that the host's part of them hides behind the device's.
        self._together = 1 if engine.uncaptured else TOGETHER
        longest = context_length + self._together * (gamma + 1)
        engine.reserve(width, longest + self._rounds.block_size + 2, keep=False)
        engine.prefill([[0]] * width, width)
        self._graphs = engine.graphs(self._rounds)
        self._seen: set[tuple[str, int]] = set()

    def draft(self, num_rows: int) -> float:
        """Milliseconds of backbone, walk and confidence for `num_rows` rows."""
        width = self._start(num_rows)
        return self._time(("draft", num_rows), lambda: self._rounds.propose(self._graphs, width, self._options))

    def verify(self, num_tokens: int) -> float:
        """Milliseconds of the rest of a round: target forward over `num_tokens` tokens, acceptance, new draft context.

        The round runs as a whole, in the recordings that a lagged scheduler uses.
        """
        rows = min(num_tokens, self._num_rows)
        width, start = self._start(rows), self._rounds.start
        whole = self._time(("verify", num_tokens), lambda: start(self._graphs, width, self._options, num_tokens))
        return max(whole - self.draft(rows), SMALLEST)

    def _start(self, num_rows: int) -> int:
        """All of `num_rows` rows behind their context; returns the number of lanes."""
        rounds = self._rounds
        for buffer, value in ((rounds.ends, 2**40), (rounds.lengths, self._length)):
            buffer.zero_()
            buffer[:num_rows] = value
        return self._graphs.width(num_rows)

    def _time(self, key: tuple[str, int], start: Callable[[], Running | None]) -> float:
        device = self._rounds.lengths.device
        with TURN:
            if key not in self._seen:
                start()
                self._seen.add(key)
                self._rounds.lengths.clamp_(max=self._length)
            finish(device)
            started = time.perf_counter()
            for _ in range(self._together):
                start()
            finish(device)
            return 1000 * (time.perf_counter() - started) / self._together


def time_host(engine: "Engine", target: "PreTrainedModel", draft: "DSparkForCausalLM", num_rows: int) -> float | None:
    """Milliseconds between the rounds of a short greedy generate() of `num_rows` rows; `None` if it had too few."""
    ids = torch.ones(num_rows, 1, dtype=torch.long, device=target.device)
    scheduler, own = draft.scheduler, target.generation_config
    engine.host_ms.pop(bucket(num_rows), None)
    draft.scheduler, target.generation_config = None, GenerationConfig(pad_token_id=0)
    options = {"max_new_tokens": HOST_TOKENS, "cache_implementation": "static"}
    try:
        with unrecorded():
            target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=draft, **options)
    finally:
        draft.scheduler, target.generation_config = scheduler, own
    return engine.host_ms.get(bucket(num_rows))
