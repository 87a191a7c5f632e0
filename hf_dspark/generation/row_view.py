"""Processors and criteria of a batch as one of its rows sees them, while rows have different lengths."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    StoppingCriteriaList,
)

# The texts [1, t] of all rows as they are now.
Texts = Callable[[], list[torch.Tensor]]


def batch_at(ids: torch.Tensor, row: int, texts: list[torch.Tensor]) -> torch.Tensor:
    """The batch [B, t] around one row `ids` [1, t]: every other row shows its own text, cut or left-padded to t."""
    length = ids.shape[1]
    shown = [F.pad(text[:, :length], (length - min(length, text.shape[1]), 0)) for text in texts]
    shown[row] = ids
    return torch.cat([text.to(ids.device) for text in shown])


def is_own(thing: Any) -> bool:
    """Whether a processor is transformers' own: a function of the row it is shown, whatever stands in the others."""
    return type(thing).__module__.startswith("transformers.")


class RowProcessors(LogitsProcessorList):
    """The processors for one row, which is shown in its place: a processor may hold a setting or a state for each row.

    transformers' own see copies of the row in the other places, a caller's see the other rows' texts.
    """

    def __init__(self, processors: LogitsProcessorList, row: int, texts: Texts):
        super().__init__(processors)
        self.row, self.texts = row, texts

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        for processor in self:
            scores = self._apply(processor, input_ids, scores)
        return scores

    def _apply(self, processor: LogitsProcessor, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if isinstance(processor, PrefixConstrainedLogitsProcessor):
            allowed, row = processor._prefix_allowed_tokens_fn, self.row
            return PrefixConstrainedLogitsProcessor(lambda _, text: allowed(row, text), num_beams=1)(ids, scores)
        texts = self.texts()
        if len(texts) == 1:
            return processor(ids, scores)
        batch = ids.expand(len(texts), -1) if is_own(processor) else batch_at(ids, self.row, texts)
        return processor(batch, scores.repeat(len(texts), 1))[self.row : self.row + 1]


class RowCriteria(StoppingCriteriaList):
    """The stopping criteria for one row, which is shown in its place among the others."""

    def __init__(self, criteria: StoppingCriteriaList, row: int, texts: Texts):
        super().__init__(criteria)
        self.row, self.texts = row, texts

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        done = super().__call__(batch_at(input_ids, self.row, self.texts()), scores, **kwargs)
        return done[self.row : self.row + 1]
