"""`DeviceRound`: what a round that the device decided has brought; noted while the next one runs."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .record import CallRecord

if TYPE_CHECKING:
    from .ragged_loop import Row


@dataclass
class DeviceRound:
    """A round of the rows whose texts hold its tokens already.

    Attributes:
        lines: [R, γ + 3] of `Rounds.run` as lists: drafts, the target's own token, accepted, verified.
        c: c_k [R, γ], or `None` without confidence head or drafts.
        drafted: whether the drafts are real.
        milliseconds: duration of the round.
        rows: in the order of their lanes.
        committed: tokens that each of `rows` took.
    """

    lines: list[list[int]]
    c: np.ndarray | None
    drafted: bool
    milliseconds: float
    rows: "list[Row]" = field(default_factory=list)
    committed: list[int] = field(default_factory=list)

    @property
    def room(self) -> list[int | None]:
        """Drafts that the length limit of each row left room for, `None` without limit; asked before the next round."""
        rooms = [row.transcript.room for row in self.rows]
        return [None if room is None else room + n - 1 for room, n in zip(rooms, self.committed, strict=True)]

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
