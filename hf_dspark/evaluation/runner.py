"""Playing prompts with every method, one after the other on the same input, so that changes of the machine's load meet
all of them. What happened is kept as plain records; `report.py` turns them into numbers."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel, set_seed

from ..generation.record import record
from .chat import ChatFormat
from .methods import PLAIN, Method
from .prompts import Prompt
from .records import Records


@dataclass(frozen=True)
class Settings:
    """What every method gets.

    Attributes:
        max_new_tokens: longest answer; in throughput runs the length of every answer.
        sampling: keyword arguments of generate(): `do_sample`, `temperature`, `top_k`, `top_p`.
        seed: each prompt begins with its own seed, the same for all methods.
    """

    max_new_tokens: int = 256
    sampling: dict[str, Any] = field(default_factory=lambda: {"do_sample": False})
    seed: int = 0

    @property
    def greedy(self) -> bool:
        return not self.sampling.get("do_sample")


@dataclass(frozen=True)
class Unit:
    """What is measured and recorded in one piece: a prompt with all its turns, or a batch of first turns."""

    name: str
    prompts: tuple[Prompt, ...]
    fixed_length: bool = False

    @property
    def num_turns(self) -> int:
        return 1 if self.fixed_length else len(self.prompts[0].turns)


def plan_prompts(prompts: Sequence[Prompt]) -> list[Unit]:
    """A unit a prompt, for acceptance and speed of single texts.

    Raises:
        ValueError: no prompts.
    """
    if not prompts:
        raise ValueError("No prompts: there is nothing to measure.")
    return [Unit(prompt.name, (prompt,)) for prompt in prompts]


def plan_batches(prompts: Sequence[Prompt], batch_sizes: Sequence[int]) -> list[Unit]:
    """Full batches for throughput, each size over the same prompts; a rest that fills no batch is left out.

    Raises:
        ValueError: a batch size below 1, or larger than the number of prompts.
    """
    units = []
    for size in batch_sizes:
        if not 1 <= size <= len(prompts):
            raise ValueError(f"`batch_sizes` must be from 1 to the number of prompts, {len(prompts)}, got {size}.")
        starts = range(0, len(prompts) - size + 1, size)
        units += [Unit(f"batch {size}/{i}", tuple(prompts[s : s + size]), True) for i, s in enumerate(starts)]
    return units


class Runner:
    """Plays units.

    Args:
        target: the target model.
        chat: how conversations are written.
        methods: what is compared; answers of the first go into the history of a conversation, so every method
            continues the same text.
        settings: shared by the methods.

    Attributes:
        warm_up_seconds: of the first call, for each number of rows and each method.

    Raises:
        ValueError: no methods, or two with one name.
    """

    def __init__(self, target: PreTrainedModel, chat: ChatFormat, methods: Sequence[Method], settings: Settings):
        names = [method.name for method in methods]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"Methods need different names, at least one, got {names}.")
        if settings.max_new_tokens < 1:
            raise ValueError(f"`max_new_tokens` must be at least 1, got {settings.max_new_tokens}.")
        self.target, self.chat, self.methods, self.settings = target, chat, methods, settings
        self.warm_up_seconds: dict[int, dict[str, float]] = {}

    def check_lengths(self, units: Iterable[Unit]) -> None:
        """Refuse, before the work, a conversation that could outgrow the target.

        Raises:
            ValueError: names the prompt, its length and the limit.
        """
        limit = getattr(self.target.config.get_text_config(), "max_position_embeddings", None)
        if limit is None:
            return
        for unit in units:
            for prompt in unit.prompts:
                # Answers are unknown: each is taken to be as long as allowed.
                messages = [text for turn in prompt.turns[: unit.num_turns] for text in (turn, "")][:-1]
                tokens, answers = len(self.chat.encode(messages)), unit.num_turns * self.settings.max_new_tokens
                if tokens + answers > limit:
                    raise ValueError(
                        f"Prompt {prompt.name} is too long: {tokens} tokens and up to {answers} of answers, the target "
                        f"takes {limit}. Remove it, or lower `max_new_tokens`."
                    )

    def run(self, units: Sequence[Unit], records: Records) -> Iterator[dict[str, Any]]:
        """Measure what `records` lacks, add it there, and yield the record of every unit in order."""
        for number, unit in enumerate(units):
            if unit.name not in records.by_name:
                size = len(unit.prompts)
                if size not in self.warm_up_seconds:
                    like = [other for other in units if len(other.prompts) == size]
                    self.warm_up_seconds[size] = self._warm_up(like)
                records.add(self._play(unit, self.settings.seed + number))
            yield records.by_name[unit.name]

    def _warm_up(self, units: list[Unit]) -> dict[str, float]:
        """The longest input once with every method: allocations, and on a GPU compilation and graphs of its shapes."""
        inputs = [self._first_turn(unit) for unit in units]
        longest = max(range(len(units)), key=lambda i: max(map(len, inputs[i])))
        length = self.settings.max_new_tokens
        length = min(length, 8) if self.target.device.type == "cpu" else length
        call = inputs[longest], self.settings.seed, length, units[longest].fixed_length
        return {method.name: self._call(method, *call)["seconds"] for method in self.methods}

    def _first_turn(self, unit: Unit) -> list[list[int]]:
        return [self.chat.encode([prompt.turns[0]]) for prompt in unit.prompts]

    def _play(self, unit: Unit, seed: int) -> dict[str, Any]:
        """All turns of a unit with every method."""
        history: list[str] = []
        turns = []
        for turn in range(unit.num_turns):
            if unit.fixed_length:
                rows = self._first_turn(unit)
            else:
                history.append(unit.prompts[0].turns[turn])
                rows = [self.chat.encode(history)]
            calls = {
                method.name: self._call(method, rows, seed, self.settings.max_new_tokens, unit.fixed_length)
                for method in self.methods
            }
            self._compare(rows, calls)
            turns.append({"prompt_tokens": [len(row) for row in rows], "calls": calls})
            history.append(self.chat.decode(calls[self.methods[0].name]["ids"][0]))
        return {"name": unit.name, "prompts": [prompt.name for prompt in unit.prompts], "turns": turns}

    def _call(
        self, method: Method, rows: list[list[int]], seed: int, max_new_tokens: int, fixed_length: bool
    ) -> dict[str, Any]:
        """One generate() call of a method on prompts of token ids."""
        options = {**self.settings.sampling, "max_new_tokens": max_new_tokens, **method.options}
        inputs = self._pad(rows)
        if fixed_length:
            options["eos_token_id"] = None
        set_seed(seed)
        counted = self.target if method.counts_forwards else None
        with method.installed(), _counted_forwards(counted) as forwards, record() as stats:
            seconds, output = self._timed(lambda: self.target.generate(**inputs, **options))
        new = output[:, inputs["input_ids"].shape[1] :].tolist()
        if fixed_length and any(len(ids) != max_new_tokens for ids in new):
            raise ValueError("Texts ended before the fixed length: remove what ends them from `generation_config`.")
        result: dict[str, Any] = {"ids": new, "seconds": seconds}
        if method.counts_forwards:
            result["target_forwards"] = len(forwards)
        if method.draft is not None:
            result |= {"path": stats.path, "captured": stats.captured, "reason": stats.reason, "gamma": stats.gamma}
            result["rounds"] = [asdict(r) for r in stats.rounds]
        return result

    def _pad(self, rows: list[list[int]]) -> dict[str, Any]:
        """Left-padded inputs of generate()."""
        config, tokenizer = self.target.generation_config, self.chat.tokenizer
        eos = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
        pad = next((i for i in (config.pad_token_id, tokenizer.pad_token_id, eos) if i is not None), 0)
        width = max(map(len, rows))
        ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows], device=self.target.device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=self.target.device)
        return {"input_ids": ids, "attention_mask": mask, "pad_token_id": pad}

    def _timed(self, call: Callable[[], Any]) -> tuple[float, Any]:
        on_accelerator = self.target.device.type != "cpu"
        if on_accelerator:
            torch.accelerator.synchronize(self.target.device)
        started = time.perf_counter()
        output = call()
        if on_accelerator:
            torch.accelerator.synchronize(self.target.device)
        return time.perf_counter() - started, output

    def _compare(self, rows: list[list[int]], calls: dict[str, dict[str, Any]]) -> None:
        """Note, for greedy texts that are not plain decoding's, where and by how little they differ."""
        if not self.settings.greedy or PLAIN not in calls:
            return
        for name, call in calls.items():
            call["differences"] = []
            for row, (plain, other) in enumerate(zip(calls[PLAIN]["ids"], call["ids"], strict=True)):
                if name != PLAIN and plain != other:
                    at = next((i for i, pair in enumerate(zip(plain, other, strict=False)) if pair[0] != pair[1]), None)
                    gap = None if at is None else self._logit_gap(rows[row] + plain[:at], plain[at], other[at])
                    call["differences"].append({"row": row, "at": at, "logit_gap": gap})

    def _logit_gap(self, prefix: list[int], first: int, second: int) -> float:
        """How far the target's logit of the worse of two tokens is below its best; small means a near tie."""
        # generate() asks for the logits of the last position only, a forward call would make those of all.
        output = self.target.generate(
            **self._pad([prefix]), max_new_tokens=1, do_sample=False, return_dict_in_generate=True, output_logits=True
        )
        logits = output.logits[0][0].float()
        return float(logits.max() - torch.minimum(logits[first], logits[second]))


@contextmanager
def _counted_forwards(model: PreTrainedModel | None) -> Iterator[list[None]]:
    """A list that grows by an entry with each forward call of the model; of none without a model."""
    calls: list[None] = []
    if model is None:
        yield calls
        return
    handle = model.register_forward_pre_hook(lambda *_: calls.append(None))
    try:
        yield calls
    finally:
        handle.remove()
