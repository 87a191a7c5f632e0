"""`LogitRows`: logits over a whole vocabulary that exist only a few rows at a time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LogitRows:
    """Logits of N slots as a function of small tensors; `shape` is theirs, [..., V], N the product of the dots.

    Attributes:
        compute: (slices of `per_row`, `shared`) -> logits [n, V], float32.
        per_row: tensors [N, ...].
        shared: tensors that all rows use, such as W2 of a Markov head.
    """

    compute: Callable[..., torch.Tensor]
    per_row: tuple[torch.Tensor, ...]
    shared: tuple[torch.Tensor, ...]
    shape: torch.Size

    @classmethod
    def of(cls, logits: "torch.Tensor | LogitRows") -> "LogitRows":
        """Logits that are there already, as rows."""
        if isinstance(logits, LogitRows):
            return logits
        return cls(lambda rows: rows.float(), (logits.flatten(0, -2),), (), logits.shape)

    def __getitem__(self, rows: slice) -> torch.Tensor:
        """Logits [n, V] of some rows."""
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
