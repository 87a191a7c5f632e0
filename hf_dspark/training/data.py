"""Texts to train on: JSONL lines with `input_ids` and `loss_mask`, and the order in which they come."""

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers.utils import logging

from .anchors import possible_anchors
from .prompts import read_lines

logger = logging.get_logger(__name__)

# Texts of one batch are of similar length, so that little is padding; they are sorted within this many batches.
SORTED_BATCHES = 32
PADDED_TO = 64


@dataclass(frozen=True)
class Batch:
    """`input_ids` [B, S] int64 and `loss_mask` [B, S] bool, padded on the right to a multiple of 64."""

    input_ids: torch.Tensor
    loss_mask: torch.Tensor


class Texts:
    """Token ids and loss masks of many texts, in memory (5 bytes a token)."""

    def __init__(self, ids: list[torch.Tensor], masks: list[torch.Tensor]):
        self._ids, self._masks = ids, masks

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def num_tokens(self) -> int:
        return sum(len(ids) for ids in self._ids)

    @classmethod
    def read(cls, paths: Iterable[str | Path], max_length: int, vocab_size: int) -> "Texts":
        """Read JSONL files; texts are cut to `max_length`, and those without a possible anchor are left out.

        Raises:
            ValueError: a line that is no text of token ids, or nothing to train on.
        """
        ids, masks, skipped = [], [], 0
        for path in paths:
            for number, line in read_lines(path):
                text, mask = _parse(line, f"{path}:{number}", vocab_size)
                text, mask = text[:max_length], mask[:max_length]
                if possible_anchors(mask[None]).any():
                    ids.append(text)
                    masks.append(mask)
                else:
                    skipped += 1
        if not ids:
            raise ValueError(f"{', '.join(map(str, paths))}: no text with two supervised tokens in a row.")
        if skipped:
            logger.warning(f"{skipped} texts without two supervised tokens in their first {max_length} are left out.")
        return cls(ids, masks)

    def split(self, count: int) -> tuple["Texts", "Texts"]:
        """All but every n-th text, and `count` texts for validation.

        Raises:
            ValueError: not enough texts to leave any.
        """
        if not 0 < count < len(self):
            raise ValueError(
                f"Cannot hold {count} of {len(self)} texts back for validation. Set `num_validation_texts` lower."
            )
        held = {i * len(self) // count for i in range(count)}
        parts = [[i for i in range(len(self)) if (i in held) == wanted] for wanted in (False, True)]
        train, validation = (Texts([self._ids[i] for i in p], [self._masks[i] for i in p]) for p in parts)
        return train, validation

    def longest(self, count: int) -> list[int]:
        """Indices of the longest texts."""
        return sorted(range(len(self)), key=lambda i: len(self._ids[i]))[-count:]

    def used_tokens(self) -> set[int]:
        return set(torch.cat(self._ids).unique().tolist())

    def batch(self, indices: list[int]) -> Batch:
        length = max(len(self._ids[i]) for i in indices)
        length = -(-length // PADDED_TO) * PADDED_TO
        ids = torch.zeros(len(indices), length, dtype=torch.long)
        mask = torch.zeros(len(indices), length, dtype=torch.bool)
        for row, i in enumerate(indices):
            ids[row, : len(self._ids[i])] = self._ids[i]
            mask[row, : len(self._ids[i])] = self._masks[i]
        return Batch(ids, mask)

    def order(self, batch_size: int, seed: int, epoch: int) -> list[list[int]]:
        """The batches of an epoch, a function of `seed` and `epoch`; what does not fill a batch waits for another.

        Fewer texts than one batch make one smaller batch.
        """
        stream = random.Random(f"order {seed} {epoch}")
        indices = list(range(len(self)))
        stream.shuffle(indices)
        window = batch_size * SORTED_BATCHES
        windows = [indices[i : i + window] for i in range(0, len(indices), window)]
        ordered = [i for part in windows for i in sorted(part, key=lambda i: len(self._ids[i]))]
        batches = [ordered[i : i + batch_size] for i in range(0, len(ordered) - batch_size + 1, batch_size)] or [
            ordered
        ]
        stream.shuffle(batches)
        return batches


def _parse(line: str, place: str, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    try:
        record = json.loads(line)
        ids, mask = record["input_ids"], record["loss_mask"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{place} holds no `input_ids` and `loss_mask`. `hf-dspark synthesize` makes such files, from chats too."
        ) from error
    text = torch.tensor(ids, dtype=torch.int32)
    if text.dim() != 1 or len(ids) != len(mask):
        raise ValueError(f"{place}: {len(ids)} `input_ids` but {len(mask)} entries in `loss_mask`.")
    if len(ids) and not (0 <= text.min() and text.max() < vocab_size):
        raise ValueError(f"{place}: token ids reach {int(text.max())}, the target's vocabulary ends at {vocab_size}.")
    return text, torch.tensor(mask, dtype=torch.bool)
