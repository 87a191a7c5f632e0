"""Texts to train on, written by the target itself: a draft learns what it will be asked to predict."""

import dataclasses
import hashlib
import json
import os
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from transformers.utils import logging

from ..default_pair import setup_demo
from .conversation import ChatText, Conversation
from .prompts import Prompt, read_lines, read_prompts, read_topics
from .writer import Writer

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class SynthesisConfig:
    """Arguments of `synthesize`.

    Args:
        output (`str`): JSONL that receives a conversation a line.
        target (`str`, *optional*): folder or hub id of the target; `None` for the embedded one.
        prompts (`list[str]`): files with the user's turns: JSONL with `messages`, `turns` or `prompt`, or *.txt.
        samples_per_prompt (`int`): conversations for each of them.
        num_own (`int`): conversations whose user turns the target writes too.
        topics (`list[str]`): files with one topic a line, for the user turns it writes; without any it begins freely.
        turns (`int`): user turns of its own conversations, at most; each has a random number of them.
        temperatures (`list[float]`): of the answers, in turn for each `batch_size` conversations; 0 is greedy.
        user_temperature (`float`): of the user turns.
        max_length (`int`): tokens of a conversation. max_user_tokens, max_answer_tokens (`int`): of a turn. A batch
            takes as long as its longest answer; one that is cut ends its conversation.
        batch_size (`int`), seed (`int`), dtype (`str`), device (`str`, *optional*): how it runs; by default on CUDA.
        resume (`bool`): go on where an interrupted run of the same arguments stopped.

    Raises:
        ValueError: for values that cannot work.
    """

    output: str
    target: str | None = None
    prompts: list[str] = field(default_factory=list)
    samples_per_prompt: int = 1
    num_own: int = 0
    topics: list[str] = field(default_factory=list)
    turns: int = 1
    temperatures: list[float] = field(default_factory=lambda: [0.0, 0.7, 0.0, 1.0])
    user_temperature: float = 0.8
    max_length: int = 1024
    max_user_tokens: int = 128
    max_answer_tokens: int = 512
    batch_size: int = 64
    seed: int = 0
    dtype: str = "bfloat16"
    device: str | None = None
    resume: bool = False

    def __post_init__(self):
        if not self.prompts and self.num_own < 1:
            raise ValueError("There is nothing to write: give `prompts`, or a number as `num_own`.")
        if self.topics and not self.num_own:
            raise ValueError("`topics` are for conversations of the target's own: set `num_own`.")
        if self.dtype not in ("bfloat16", "float32", "float16"):
            raise ValueError(f"`dtype` must be bfloat16, float32 or float16, got {self.dtype!r}.")
        for name in ("samples_per_prompt", "turns", "max_length", "max_user_tokens", "max_answer_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")
        if not self.temperatures or any(t < 0 for t in (*self.temperatures, self.user_temperature)):
            raise ValueError(f"`temperatures` must be numbers >= 0, got {self.temperatures}.")

    def fingerprint(self) -> dict[str, Any]:
        free = ("resume", "device")
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in free}


@dataclass(frozen=True)
class SynthesisResult:
    """Conversations written, tokens in them and those supervised, conversations dropped (empty or told before), and
    tokens that the target wrote each second of this call."""

    output: Path
    num_conversations: int
    num_tokens: int
    num_supervised_tokens: int
    num_dropped: int
    tokens_per_second: float


def synthesize(config: SynthesisConfig) -> SynthesisResult:
    """Let the target write conversations, batch by batch.

    Each line of `output` has `input_ids`, `loss_mask` (1 on the target's answers, the token that ends them included),
    `messages`, `temperature`, `source` ("prompt", "topic" or "self") and `key`, equal for conversations that say the
    same, of which the first is kept. An interrupted run goes on with `resume=True` and gives the file that an
    uninterrupted one would have given on the same machine.

    Raises:
        ValueError: for arguments, files or a target that cannot be used; the message says why.
    """
    return _Synthesis(config).run()


class _Synthesis:
    def __init__(self, config: SynthesisConfig):
        self.config = config
        self.output = Path(config.output)
        self.progress_file = self.output.with_name(self.output.name + ".progress")
        self.jobs = _jobs(config)
        name = config.target or str(setup_demo())
        device = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
        target = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, config.dtype)).to(device).eval()
        tokenizer = AutoTokenizer.from_pretrained(name)
        self.tokenizer, self.chat = tokenizer, ChatText(tokenizer)
        if not self.chat.has_template and (config.num_own or any(len(job.pending) > 1 for job in self.jobs)):
            raise ValueError(f"{name} has no chat template: give prompts of one turn.")
        self.writer = Writer(target, tokenizer, config.batch_size, config.max_length)
        self.written = 0
        self.done, self.counts, self.seen = self._restore()

    def run(self) -> SynthesisResult:
        size, started = self.writer.wave, time.perf_counter()
        self._append([], self.done)
        starts = range(0, len(self.jobs), size)
        bar = logging.tqdm(total=len(self.jobs), initial=min(self.done * size, len(self.jobs)), unit="conversation")
        for number, start in enumerate(starts):
            if number < self.done:
                continue
            # The random numbers of a batch do not depend on those before it, so that a run can go on anywhere.
            set_seed(random.Random(f"{self.config.seed} {number}").getrandbits(31))
            batch = self.jobs[start : start + size]
            self._converse(batch)
            self._keep(batch, number + 1)
            bar.update(len(batch))
            bar.set_postfix_str(f"{self.written / (time.perf_counter() - started):,.0f} tokens/s")
        bar.close()
        speed = self.written / (time.perf_counter() - started)
        return SynthesisResult(self.output, **self.counts, tokens_per_second=speed)

    # ---- writing

    def _converse(self, batch: list[Conversation]) -> None:
        """All turns of a batch of conversations."""
        while active := [c for c in batch if not c.ended]:
            self._write_user_turns([c for c in active if not c.pending])
            for conversation in active:
                if conversation.pending and not conversation.ended:
                    self.chat.add_user(conversation, conversation.pending.pop(0))
                if len(conversation.ids) >= self.config.max_length - 1:
                    conversation.ended = True
            self._write_answers([c for c in active if not c.ended])

    def _write_user_turns(self, conversations: list[Conversation]) -> None:
        """One user turn for each: an answer to a request for one, or the template's opening of it continued."""
        asked, texts, ends = [], [], set()
        for conversation in conversations:
            first = not any(m["role"] == "user" for m in conversation.messages)
            if sum(m["role"] == "user" for m in conversation.messages) >= conversation.own_turns:
                conversation.ended = True
                continue
            if conversation.topic and first:
                text = self.chat.request(conversation.topic)
            else:
                opening, closing = self.chat.user_opening(conversation.messages)
                text = self.chat.encode(opening)
                ends.update(self.chat.encode(closing)[:1])
            if len(text) >= self.config.max_length - 1:
                conversation.ended = True
                continue
            asked.append(conversation)
            texts.append(text)
        if not texts:
            return
        temperatures = [self.config.user_temperature] * len(texts)
        turns = self.writer.write(texts, temperatures, ends=sorted(ends), at_most=self.config.max_user_tokens)
        stops = {*self.writer.ends, *ends}
        for conversation, ids in zip(asked, turns, strict=True):
            content = self.tokenizer.decode([i for i in ids if i not in stops], skip_special_tokens=True).strip()
            self.written += len(ids)
            if content:
                conversation.pending.append(content)
            else:
                conversation.ended = True

    def _write_answers(self, conversations: list[Conversation]) -> None:
        if not conversations:
            return
        texts, temperatures = [c.ids for c in conversations], [c.temperature for c in conversations]
        answers = self.writer.write(texts, temperatures, at_most=self.config.max_answer_tokens)
        for conversation, ids in zip(conversations, answers, strict=True):
            self.written += len(ids)
            complete = bool(ids) and ids[-1] in self.writer.ends
            content = self.tokenizer.decode(ids[:-1] if complete else ids)
            conversation.add_answer(ids, content, self.tokenizer.decode(ids), complete)
            if not conversation.pending and conversation.source == "prompt":
                conversation.ended = True

    # ---- the file

    def _keep(self, batch: list[Conversation], done: int) -> None:
        """Append the conversations that are worth it, then note how far the file is valid."""
        lines = []
        for conversation in batch:
            key = _key(conversation)
            if sum(conversation.loss_mask) < 2 or key in self.seen:
                self.counts["num_dropped"] += 1
                continue
            self.seen.add(key)
            record = {
                "input_ids": conversation.ids,
                "loss_mask": conversation.loss_mask,
                "messages": conversation.messages,
                "temperature": conversation.temperature,
                "source": conversation.source,
                "key": key,
            }
            lines.append(json.dumps(record, ensure_ascii=False) + "\n")
            self.counts["num_conversations"] += 1
            self.counts["num_tokens"] += len(conversation.ids)
            self.counts["num_supervised_tokens"] += sum(conversation.loss_mask)
        self._append(lines, done)

    def _append(self, lines: list[str], done: int) -> None:
        with self.output.open("ab") as file:
            file.write("".join(lines).encode())
            file.flush()
            os.fsync(file.fileno())
        progress = {"done": done, "bytes": self.output.stat().st_size, "counts": self.counts, "wave": self.writer.wave}
        partial = self.progress_file.with_name(self.progress_file.name + ".partial")
        partial.write_text(json.dumps(progress | {"config": self.config.fingerprint()}))
        partial.replace(self.progress_file)

    def _restore(self) -> tuple[int, dict[str, int], set[str]]:
        """Batches done, counts and keys of a run that was interrupted; a batch that it did not finish is cut off."""
        counts = {"num_conversations": 0, "num_tokens": 0, "num_supervised_tokens": 0, "num_dropped": 0}
        if not self.output.exists():
            self.progress_file.unlink(missing_ok=True)
            return 0, counts, set()
        if not self.config.resume:
            raise ValueError(f"{self.output} exists. Set `resume=True` to go on with it, or give another file.")
        if not self.progress_file.exists():
            if self.output.stat().st_size:
                raise ValueError(f"{self.output} was not written by `synthesize` ({self.progress_file} is missing).")
            return 0, counts, set()
        progress = json.loads(self.progress_file.read_text())
        now = json.loads(json.dumps(self.config.fingerprint()))
        changed = [name for name, value in now.items() if progress["config"].get(name) != value]
        if progress["wave"] != self.writer.wave:
            changed.append("kind of device")  # how many conversations a batch has depends on it
        if changed:
            raise ValueError(
                f"{self.output} was begun with other {', '.join(changed)}. Give the same, or another file."
            )
        with self.output.open("r+b") as file:
            file.truncate(progress["bytes"])
        seen = {json.loads(line)["key"] for _, line in read_lines(self.output)}
        return progress["done"], progress["counts"], seen


def _jobs(config: SynthesisConfig) -> list[Conversation]:
    """The conversations to be had, in an order that is the same whenever the arguments are."""
    prompts = read_prompts(config.prompts)
    jobs = [_from_prompt(prompt) for _ in range(config.samples_per_prompt) for prompt in prompts]
    stream = random.Random(f"jobs {config.seed}")
    topics = read_topics(config.topics)
    for i in range(config.num_own):
        topic = topics[i % len(topics)] if topics else None
        jobs.append(Conversation(own_turns=stream.randint(1, config.turns), topic=topic))
    for i, job in enumerate(jobs):
        job.temperature = config.temperatures[i // config.batch_size % len(config.temperatures)]
    return jobs


def _from_prompt(prompt: Prompt) -> Conversation:
    messages = [] if prompt.system is None else [{"role": "system", "content": prompt.system}]
    return Conversation(pending=list(prompt.turns), messages=messages)


def _key(conversation: Conversation) -> str:
    """Conversations of one key say the same: the same user turns, where the target wrote them, or the same ids."""
    words = " ".join(m["content"] for m in conversation.messages if m["role"] == "user").lower().split()
    what = words if conversation.own_turns else conversation.ids
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
