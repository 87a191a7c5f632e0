"""The target as a writer: continuations of many texts at once."""

import random
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria
from transformers.utils import logging

from ..generation.continuous import ContinuousDecoder

logger = logging.get_logger(__name__)

PADDED_TO = 64
WAVE = 8  # texts for each row, so that rows stay full but for the end


class Writer:
    """Continues many texts at once, from the target's own distribution at a temperature, nothing else changed.

    On CUDA rows that end are refilled at once (`ContinuousDecoder`). For targets that cannot do that, transformers'
    generate() has a static cache of one shape, so that it compiles the target's forward once; there, missing rows are
    filled up.
    """

    def __init__(self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_size: int, max_length: int):
        self.target, self.batch_size, self.max_length = target, batch_size, max_length
        self._decoder: ContinuousDecoder | None = None
        ends = target.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        self.ends = sorted({end for end in (*ends, tokenizer.eos_token_id) if end is not None})
        if not self.ends:
            raise ValueError("The target has no end-of-text token: set `eos_token_id` in its generation config.")
        self.padding = self.ends[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self.static = target.device.type == "cuda"
        if self.static:
            try:
                self._decoder = ContinuousDecoder(target, batch_size, max_length)
            except NotImplementedError as error:
                logger.warning(f"Rows wait for the longest of their batch, which is slower: {error}.")

    @property
    def wave(self) -> int:
        """Texts that are best given to `write` at once: enough to refill rows with, or one batch."""
        return self.batch_size * (WAVE if self._decoder else 1)

    @torch.no_grad()
    def write(
        self,
        texts: list[list[int]],
        temperatures: list[float],
        *,
        ends: list[int] | None = None,
        at_most: int | None = None,
    ) -> list[list[int]]:
        """Continuations of `texts`, with the token that ended each, if one did.

        Args:
            texts: at most `wave` lists of ids, each shorter than `max_length`.
            temperatures: of each text, 0 for the likeliest tokens; those of one batch are the same.
            ends: further tokens that end a continuation.
            at_most: tokens of the longest; in any case up to `max_length` with its text.
        """
        stops = sorted({*self.ends, *(ends or [])})
        if self._decoder is not None:
            seed = random.getrandbits(31)
            return self._decoder.write(texts, temperature=temperatures, ends=stops, at_most=at_most, seed=seed)
        (temperature,) = set(temperatures)
        rooms = [min(self.max_length - len(text), at_most or self.max_length) for text in texts]
        rows = texts + texts[:1] * (self.batch_size - len(texts) if self.static else 0)
        width = -(-max(map(len, rows)) // PADDED_TO) * PADDED_TO
        width = min(width, self.max_length - 1)
        ids = torch.full((len(rows), width), self.padding)
        mask = torch.zeros_like(ids)
        for row, text in enumerate(rows):
            ids[row, width - len(text) :] = torch.tensor(text)
            mask[row, width - len(text) :] = 1
        device = self.target.device
        output = self.target.generate(
            ids.to(device),
            attention_mask=mask.to(device),
            generation_config=self._config(temperature, stops),
            stopping_criteria=[AtLength(width + max(rooms))],
        )
        new = output[: len(texts), width:].tolist()
        return [_until_end(row[:room], set(stops)) for row, room in zip(new, rooms, strict=True)]

    def _config(self, temperature: float, stops: list[int]) -> GenerationConfig:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        config = GenerationConfig(
            **(sampling if temperature > 0 else {"do_sample": False}),
            max_length=2 * self.max_length,  # the shortest text stands behind the padding of the longest
            eos_token_id=stops,
            pad_token_id=self.padding,
            cache_implementation="static" if self.static else None,
        )
        # generate() fills what a config leaves open from the target's own, where penalties may stand.
        self.target.generation_config = config
        return config


class AtLength(StoppingCriteria):
    """Stops all rows at a length below `max_length`, which stays what it is: the size of the cache depends on it."""

    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length, device=input_ids.device)


def _until_end(ids: list[int], ends: set[int]) -> list[int]:
    for i, token in enumerate(ids):
        if token in ends:
            return ids[: i + 1]
    return ids
