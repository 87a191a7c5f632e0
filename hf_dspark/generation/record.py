"""What happened: `Round`, `SpeculationStats` and `record()`."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
from transformers.utils import logging

from .stopping import Transcript

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class Round:
    """One draft-verify-commit step of one row, in plain Python numbers.

    Attributes:
        call: which call of the record the round belongs to, from 0.
        row: row of the batch.
        position: index of the anchor among the row's real tokens; the prompt counts, padding does not.
        anchor: x_0.
        draft_tokens: the γ drafts x_1..x_γ; none in a round that the scheduler left to the target alone.
        confidence: c_1..c_γ, or `None` without confidence head.
        survival: a_1..a_γ, or `None` without confidence head.
        verified: ℓ, drafts that the target scored.
        accepted: drafts that were committed and returned.
        next_token: the target's own token (correction or bonus); `None` when a draft token ended the row.
        milliseconds: duration of the whole step, shared by the rows of a batch; where rounds run ahead of the host, the
            time since it read the last one.
        q, p: with `record(probabilities=True)`, else `None`. `q` has q_k(x_k) of all γ drafts, the draft's probability;
            `p` has p_k(x_k), the target's, for the drafts it decided on (the accepted ones and the first rejected) and
            then that of `next_token`, if there is one. Both after temperature and logits processors, as in the
            acceptance rule. Greedy decoding takes the likeliest token instead; there they are softmaxes of the scores.
    """

    call: int
    row: int
    position: int
    anchor: int
    draft_tokens: list[int]
    confidence: list[float] | None
    survival: list[float] | None
    verified: int
    accepted: int
    next_token: int | None
    milliseconds: float
    q: list[float] | None = None
    p: list[float] | None = None

    @property
    def num_committed(self) -> int:
        """Tokens this round added to the row."""
        return self.accepted + (self.next_token is not None)


@dataclass
class SpeculationStats:
    """Statistics of the DSpark calls it saw; `rounds` fills while they run.

    The fast path notes a round while the next one runs, unless a streamer or a criterion of the caller looks on.

    Attributes:
        rounds: every round in order.
        num_tokens: new tokens returned, the first of each row included.
        num_reused: prompt tokens that a cache held already, so that they were not computed again.
        calls: generate() calls.
        path: of the last call: `"plain"` (our loop over transformers' caches), `"ragged"` (the static engine) or
            `"target_only"` (no drafts were used).
        captured: whether CUDA graphs ran.
        reason: why this path, and what was not used.
        gamma: γ of the drafts that were used, the largest of them.
        probabilities: whether rounds are to hold `q` and `p`.
    """

    rounds: list[Round] = field(default_factory=list)
    num_tokens: int = 0
    num_reused: int = 0
    calls: int = 0
    path: str = "plain"
    captured: bool = False
    reason: str = ""
    gamma: int = 0
    probabilities: bool = field(default=False, repr=False)

    @property
    def num_rounds(self) -> int:
        """Rounds of all rows: a step over a batch counts once for each row that took part."""
        return len(self.rounds)

    @property
    def num_drafted(self) -> int:
        """Drafts proposed: γ in each round."""
        return sum(len(r.draft_tokens) for r in self.rounds)

    @property
    def num_verified(self) -> int:
        """Drafts scored by the target, Σℓ."""
        return sum(r.verified for r in self.rounds)

    @property
    def num_accepted(self) -> int:
        """Drafts committed and returned."""
        return sum(r.accepted for r in self.rounds)

    @property
    def mean_acceptance_length(self) -> float:
        """τ: tokens committed by rounds / rounds, the target's own token included; 0.0 without rounds."""
        return sum(r.num_committed for r in self.rounds) / len(self.rounds) if self.rounds else 0.0

    @property
    def expected_acceptance_length(self) -> float | None:
        """What the confidence head expected τ to be: the mean of 1 + Σ a_j over verified slots; `None` without head."""
        expected = [1 + sum(r.survival[: r.verified]) for r in self.rounds if r.survival is not None]
        return sum(expected) / len(expected) if expected else None

    @property
    def acceptance_rate(self) -> float:
        """Accepted / verified drafts; 0.0 if none was verified."""
        verified = self.num_verified
        return self.num_accepted / verified if verified else 0.0

    @property
    def acceptance_by_position(self) -> list[float | None]:
        """For each slot k: share of x_k accepted where x_1..x_{k-1} were and x_k was tried; `None` if never."""
        slots = max((len(r.draft_tokens) for r in self.rounds), default=self.gamma)
        tried, passed = [0] * slots, [0] * slots
        for r in self.rounds:
            rejected = r.next_token is not None and r.accepted < r.verified
            for k in range(r.accepted + rejected):
                tried[k] += 1
                passed[k] += k < r.accepted
        return [p / t if t else None for p, t in zip(passed, tried, strict=True)]

    def to_dict(self) -> dict[str, Any]:
        """Everything above as plain Python values, for JSON."""
        names = (
            "num_rounds num_drafted num_verified num_accepted num_tokens num_reused mean_acceptance_length "
            "expected_acceptance_length acceptance_rate acceptance_by_position path captured reason calls gamma"
        )
        return {name: getattr(self, name) for name in names.split()} | {"rounds": [asdict(r) for r in self.rounds]}


_ACTIVE: ContextVar[tuple[SpeculationStats, ...]] = ContextVar("hf_dspark_records", default=())


@contextmanager
def record(*, probabilities: bool = False) -> Iterator[SpeculationStats]:
    """Collect the statistics of every DSpark call made inside the block, in this thread or async task only.

    Records nest: an inner call counts in both.

    Args:
        probabilities: also note q and p of the drafts in each `Round`. The host has to see all scores for that, so the
            fast path lets it decide between the recorded parts of a round, which is slower.

    ```python
    with hf_dspark.record() as stats:
        target.generate(**inputs, assistant_model=draft)
    print(stats.mean_acceptance_length)
    ```
    """
    stats = SpeculationStats(probabilities=probabilities)
    token = _ACTIVE.set((*_ACTIVE.get(), stats))
    try:
        yield stats
    finally:
        try:
            _ACTIVE.reset(token)
        except ValueError:  # a generator that is continued in another context
            _ACTIVE.set(tuple(other for other in _ACTIVE.get() if other is not stats))


@contextmanager
def unrecorded() -> Iterator[None]:
    """Calls inside are nobody's: no record that is open outside sees them."""
    token = _ACTIVE.set(())
    try:
        yield
    finally:
        _ACTIVE.reset(token)


class CallRecord:
    """One generate() call, written at once to its own statistics and to every active record."""

    def __init__(self, path: str, reason: str, gamma: int):
        self.stats = SpeculationStats()
        self._all = (self.stats, *_ACTIVE.get())
        self._index = {id(stats): stats.calls for stats in self._all}
        self.probabilities = any(stats.probabilities for stats in self._all)
        for stats in self._all:
            stats.calls += 1
            stats.gamma = max(stats.gamma, gamma)
        self.explain(path, reason)

    def explain(self, path: str, reason: str) -> None:
        for stats in self._all:
            stats.path, stats.reason = path, reason

    def note(self, note: str, log: bool = True) -> None:
        """Add to the reason what could not be used, and log it once."""
        if note:
            if log:
                logger.warning_once(f"hf_dspark: {note}.")
            self.explain(self.stats.path, f"{self.stats.reason}; {note}")

    def set_captured(self, captured: bool) -> None:
        for stats in self._all:
            stats.captured = captured

    def add_tokens(self, count: int) -> None:
        for stats in self._all:
            stats.num_tokens += count

    def add_reused(self, count: int) -> None:
        for stats in self._all:
            stats.num_reused += count

    def add_round(
        self,
        transcript: Transcript,
        *,
        row: int,
        position: int,
        draft_tokens: list[int],
        c: list[float] | None,
        verified: int,
        committed: int,
        accepted: int,
        milliseconds: float,
        q: list[float] | None = None,
        p: list[float] | None = None,
    ) -> None:
        """Note a round whose tokens, the last `committed` ones, `transcript` holds already."""
        self.add_tokens(committed)
        done = partial(
            Round,
            row=row,
            position=position,
            anchor=transcript.tokens[-committed - 1],
            draft_tokens=draft_tokens,
            confidence=c,
            survival=None if c is None else _survival(c),
            verified=verified,
            accepted=accepted,
            next_token=transcript.tokens[-1] if committed > accepted else None,
            milliseconds=milliseconds,
            q=q,
            p=p,
        )
        of_call: dict[int, Round] = {}
        for stats in self._all:
            call = self._index[id(stats)]
            if call not in of_call:
                of_call[call] = done(call=call)
            stats.rounds.append(of_call[call])


def _survival(c: list[float]) -> list[float]:
    """`confidence.survival` of one row, to the bit; NumPy, because rounds wait for this: torch takes twice as long."""
    return np.asarray(c, np.float32).cumprod(dtype=np.float64).astype(np.float32).tolist()
