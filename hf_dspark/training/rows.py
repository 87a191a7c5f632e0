"""`LogitRows`: logits over a whole vocabulary that exist only a few rows at a time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch


def total(addends: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Their sum in float32."""
    first, *others = (addend.float() for addend in addends)
    for other in others:
        first = first + other
    return first


@dataclass(frozen=True)
class LogitRows:
    """Logits of N slots as a function of small tensors; `shape` is theirs, [..., V], N the product of the dots.

    Attributes:
        compute: (slices of `per_row`, `shared`) -> addends [n, V] of the logits, in whatever precision they come: they
            are summed in float32, on CUDA within the kernel that needs them.
        per_row: tensors [N, ...].
        shared: tensors that all rows use, such as W2 of a Markov head.
    """

    compute: Callable[..., tuple[torch.Tensor, ...]]
    per_row: tuple[torch.Tensor, ...]
    shared: tuple[torch.Tensor, ...]
    shape: torch.Size

    @classmethod
    def of(cls, logits: "torch.Tensor | LogitRows") -> "LogitRows":
        """Logits that are there already, as rows."""
        if isinstance(logits, LogitRows):
            return logits
        return cls(lambda rows: (rows,), (logits.flatten(0, -2),), (), logits.shape)

    def __getitem__(self, rows: slice) -> torch.Tensor:
        """Logits [n, V] of some rows, float32."""
        return total(self.addends(rows))

    def addends(self, rows: slice) -> tuple[torch.Tensor, ...]:
        return self.compute(*(tensor[rows] for tensor in self.per_row), *self.shared)

    def tensor(self) -> torch.Tensor:
        """All of them at once, [..., V]."""
        return self[:].reshape(self.shape)

    def chunks(self, elements: int) -> Iterator[slice]:
        """Row ranges of at most `elements` logits each, and of at least one row."""
        step = max(1, elements // self.shape[-1])
        count = self.per_row[0].shape[0]
        for start in range(0, count, step):
            yield slice(start, min(start + step, count))
