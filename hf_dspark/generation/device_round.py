"""`DeviceRound`: what a round that the device decided has brought; noted while the next one runs."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .record import CallRecord

if TYPE_CHECKING:
    from .ragged_loop import Row


@dataclass(frozen=True)
class DeviceRound:
    """A round of some rows, whose tokens are in their texts already.

    Attributes:
        rows: in the order of their lanes.
        lines: [R, γ + 3] of `Rounds.run` as lists: drafts, the target's own token, accepted, verified.
        c: c_k [R, γ], or `None` without confidence head or drafts.
        committed: tokens that each row took.
        drafted: whether the drafts are real.
        milliseconds: duration of the round.
    """

    rows: "list[Row]"
    lines: list[list[int]]
    c: np.ndarray | None
    committed: list[int]
    drafted: bool
    milliseconds: float

    @property
    def room(self) -> list[int | None]:
        """Drafts that the length limit of each row left room for, `None` without limit."""
        rooms = [row.transcript.room for row in self.rows]
        return [None if room is None else room + n - 1 for room, n in zip(rooms, self.committed, strict=True)]

    def note(self, record: CallRecord) -> None:
        confidences = [None] * len(self.rows) if self.c is None else self.c.tolist()
        for row, line, c, committed in zip(self.rows, self.lines, confidences, self.committed, strict=True):
            *drafts, _, accepted, verified = line
            record.add_round(
                row.transcript,
                row=row.index,
                position=row.length - committed,
                draft_tokens=drafts if self.drafted else [],
                c=c,
                verified=verified,
                committed=committed,
                accepted=min(committed, accepted),
                milliseconds=self.milliseconds,
            )
