"""Rounds of a call that the device decides: what a round brings, and how rounds follow each other.

What the host does between two rounds keeps the device waiting. So it does what it can while the next round runs:
always the statistics and what a lagged scheduler is told, and where rounds run *ahead*, everything. Then a round starts
before the last one is read, and a row that ends with an end-of-text id runs one round more for nothing.
"""

import math
import statistics
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from .graphs import TURN
from .record import CallRecord
from .rounds import RoundOptions, Running

if TYPE_CHECKING:
    from .ragged_loop import RaggedLoop, Row

FEWEST_TIMES = 4  # between rounds, for their median


@dataclass
class DeviceRound:
    """A round of the rows whose texts hold its tokens already.

    Attributes:
        drafted: whether the drafts are real.
        milliseconds: duration of the round.
        c: c_k [R, γ], or `None` without confidence head or drafts.
        rows: in the order of their lanes.
        lines: of `rows`: drafts, the target's own token, accepted, verified.
        committed: tokens that each of `rows` took.
    """

    drafted: bool
    milliseconds: float
    c: np.ndarray | None = None
    rows: "list[Row]" = field(default_factory=list)
    lines: list[list[int]] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)

    @property
    def room(self) -> list[int | None]:
        """Drafts that the length limit of each row left room for, `None` without; asked before the next commit."""
        rooms = [row.room for row in self.rows]
        return [None if room is None else room + n for room, n in zip(rooms, self.committed, strict=True)]

    def note(self, record: CallRecord, first: int = 0) -> None:
        """Add the rounds of the rows from the `first` on to the statistics; their texts end with these tokens."""
        for i in range(len(self.rows))[first:]:
            row, (*drafts, _, accepted, verified), committed = self.rows[i], self.lines[i], self.committed[i]
            record.add_round(
                row.transcript,
                row=row.index,
                position=row.length - committed,
                draft_tokens=drafts if self.drafted else [],
                c=None if self.c is None else self.c[i].tolist(),
                verified=verified,
                committed=committed,
                accepted=min(committed, accepted),
                milliseconds=self.milliseconds,
            )


class Started(NamedTuple):
    """A `Running` round, whether its drafts are real, and when it was started, in seconds."""

    running: Running
    drafted: bool
    at: float


class DeviceRounds:
    """The rounds of one `RaggedLoop` behind its prompts.

    Attributes:
        one_by_one: why none starts before the last one is read, or "".
    """

    def __init__(self, loop: "RaggedLoop"):
        self._loop, self._policy, self._rounds = loop, loop.policy, loop.rounds
        options = loop.policy.options
        self._kind = RoundOptions(
            count=options.num_assistant_tokens,
            truncates=options.threshold > 0,
            samples=loop.policy.do_sample,
            one_hot=loop.policy.sample_method == "greedy",
        )
        # Where somebody looks on, a round is noted at once.
        self._watched = loop.streamer is not None or not all(row.transcript.decided_by_ids for row in loop.rows)
        self._decides_between = loop.policy.scheduler is not None and not loop.policy.decides_before
        self.one_by_one = self._why_one_by_one()
        self._unnoted: DeviceRound | None = None
        self._untold: DeviceRound | None = None  # of which the scheduler does not know yet
        self._lanes: list[Row] = []  # the rows that the device has in the round that is read next, in order
        self._answered: float | None = None  # when the last round was there
        self._shortest = math.inf  # seconds of a round
        self._waited = 0.0  # seconds that the device waited for the host
        self._host_seconds: list[float] = []  # before each round in which all rows ran

    def run(self, active: "list[Row]") -> None:
        """A round of the `active` rows, and those that may follow before it is read."""
        answered, self._answered, self._lanes = self._answered, None, active
        drafted = self._policy.should_draft()
        started = time.perf_counter()
        if answered is not None:
            self._note_wait(active, started - answered)
        if drafted and self._decides_between:
            lines = self._loop.recorded(lambda: self._in_two_parts(active))
            self._commit(lines, True, started)
            return
        current: Started | None = self._start(active, drafted, pending=self._untold is not None)
        while current is not None:
            self._catch_up()
            following = self._follow(current)
            self._commit(current.running.wait(), current.drafted, current.at)
            current = following

    def _why_one_by_one(self) -> str:
        if self._decides_between:
            return "the scheduler decides between draft and verify"
        if self._loop.draft.context_window is not None:
            return "what a context window has let go does not come back for a row that has gone too far"
        return ""

    def _note_wait(self, active: "list[Row]", seconds: float) -> None:
        self._waited += seconds
        if len(active) == len(self._loop.rows):
            self._host_seconds.append(seconds)

    def end(self) -> None:
        """Note what is left, and for cost models how long the device waits for the host."""
        self._note()
        if not self._watched and len(self._host_seconds) >= FEWEST_TIMES:
            self._loop.engine.host_ms[self._rounds.num_rows] = 1000 * statistics.median(self._host_seconds)

    def _start(self, active: "list[Row]", drafted: bool, pending: bool) -> Started:
        """Start a round of `active` rows. pending: whether the scheduler has still to be told of the last one."""
        kind, num_tokens = self._kind, None
        if not drafted:
            kind = replace(kind, count=0)
        elif self._policy.decides_before:  # one recording, as without a scheduler
            budget = self._policy.budget(len(active), pending)
            num_tokens = None if budget is None else len(active) + budget
        at, engine = time.perf_counter(), self._loop.engine

        def start() -> Running:
            graphs = engine.graphs(self._rounds)
            return self._rounds.start(graphs, graphs.width(len(active)), kind, num_tokens)

        return Started(self._loop.recorded(start), drafted, at)

    def _follow(self, current: Started) -> Started | None:
        """Start the round behind `current`, which is at work; `None` where that has to be read first."""
        if self.one_by_one or not self._loop.engine.runs_ahead or not TURN.is_ours:
            return None
        running = [row for row in self._lanes if not row.transcript.stopped]
        rooms = [row.transcript.room for row in running]
        # One of them must go on for sure, as far as lengths decide.
        if not any(room is None or room > self._kind.count + 1 for room in rooms):
            return None
        # A lone row may lose a round for nothing, so the device has waited as long for the host before.
        if len(running) == 1 and self._waited < self._shortest:
            return None
        # `current` makes rows longer than is known here, and rows that have ended go on for one more.
        if not self._loop.has_room(max(row.length for row in self._lanes) + 2 * (self._rounds.gamma + 1)):
            return None
        self._note_wait(running, 0.0)
        return self._start(running, self._policy.should_draft(), pending=current.drafted)

    def _in_two_parts(self, active: "list[Row]") -> torch.Tensor:
        """A round whose lengths the scheduler chooses between draft and verify."""
        rounds, n = self._rounds, len(active)
        graphs = self._loop.engine.graphs(rounds)
        width = graphs.width(n)
        proposed = rounds.propose(graphs, width, self._kind)
        self._catch_up()
        c = None if proposed is None else proposed.wait()[:n]
        lengths = self._policy.lengths(c, [row.room for row in active])
        return rounds.conclude(graphs, width, lengths, self._kind)

    def _commit(self, lines: torch.Tensor, drafted: bool, started: float) -> None:
        """Add to the texts what a round has brought; `lines` as of `Rounds.run`."""
        answered = time.perf_counter()
        milliseconds = 1000 * (answered - max(started, self._answered or 0.0))
        self._answered, self._shortest = answered, min(self._shortest, milliseconds / 1000)
        gamma, lanes = self._rounds.gamma, self._lanes
        places = [i for i, row in enumerate(lanes) if not row.transcript.stopped]
        listed = lines[: len(lanes), : gamma + 3].tolist()
        done = DeviceRound(drafted, milliseconds)
        if drafted and self._loop.draft.confidence_head is not None:
            done.c = lines.numpy()[:, gamma + 3 :].view(np.float32)[places]
        self._lanes = []
        for i in places:
            row, (*drafts, own, accepted, _) = lanes[i], listed[i]
            room = row.transcript.room
            committed = row.transcript.commit([*drafts[:accepted], own])
            row.length += committed
            if room is None or room > accepted + 1:  # the device does not know end-of-text ids
                self._lanes.append(row)
            done.rows.append(row)
            done.lines.append(listed[i])
            done.committed.append(committed)
            if self._watched:
                done.note(self._loop.record, first=-1)
        self._unnoted = None if self._watched else done
        self._untold = done if done.c is not None and self._policy.decides_before else None
        if ended := [row.index for row in done.rows if row.transcript.stopped]:
            self._rounds.end(ended)

    def _catch_up(self) -> None:
        """What can wait until the device is busy again."""
        self._note()
        last, self._untold = self._untold, None
        if last is not None and last.c is not None:
            self._policy.tell_scheduler(last.c, last.room)

    def _note(self) -> None:
        last, self._unnoted = self._unnoted, None
        if last is not None:
            last.note(self._loop.record)
