"""Answers in the background: one pair, one answer at a time, readable while it grows and stopped within a round."""

import threading
import time
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import hf_dspark
from hf_dspark.evaluation import ChatFormat

from .messages import conversation
from .settings import Limits, Settings
from .trace import Answer, Pieces, tokens_of

CHOICES: dict[str, Any] = {"off": None, "auto": "auto"}  # of `draft.scheduler`
POLL = 0.1  # seconds between two looks of a waiting thread


class StopWhen(StoppingCriteria):
    """Ends the text at the next token once an event is set: plain generate() within a step, DSpark within a round."""

    def __init__(self, event: threading.Event):
        self.event = event

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self.event.is_set(), device=input_ids.device)


class Collector(BaseStreamer):
    """Keeps the new token ids, and when the last one came."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.latest = 0.0
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        if self._is_prompt:
            self._is_prompt = False
            return
        self.ids += value.tolist()
        self.latest = time.perf_counter()

    def end(self) -> None:
        pass


class Generation:
    """One answer in a thread of its own; one other thread may read it with `answer()` at any time.

    Args:
        models: the pair.
        ids: of the prompt.
        prompt: what is shown as the question.
        settings: of the visitor.
        drafted: `False` decodes plainly.
    """

    def __init__(self, models: "Models", ids: list[int], prompt: str, settings: Settings, *, drafted: bool = True):
        self.done = threading.Event()
        self._stop = threading.Event()
        self._models, self._ids, self._settings, self._drafted = models, ids, settings, drafted
        self._collector = Collector()
        self._pieces = Pieces(models.tokenizer)
        self._answer = Answer(prompt, asdict(settings) | {"drafted": drafted})
        self._started: float | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the text at its next token; also ends waiting for another visitor's answer."""
        self._stop.set()

    def answer(self) -> Answer:
        """The answer so far."""
        answer, ids = self._answer, list(self._collector.ids)
        rounds = [] if answer.stats is None else list(answer.stats.rounds)
        answer.drafts += [self._pieces.drafts(r) for r in rounds[len(answer.drafts) :]]
        drafted = answer.stats is not None and answer.stats.path != "target_only"
        answer.tokens = tokens_of(ids, self._pieces, rounds, len(self._ids), drafted)
        if self._started is not None and self._collector.latest:
            answer.seconds = self._collector.latest - self._started
        return answer

    def _run(self) -> None:
        try:
            with self._models.turn(self._stop) as is_mine:
                if is_mine:
                    self._generate()
            self._answer.state = "stopped" if self._stop.is_set() else "finished"
        except Exception as error:  # whatever it is, the visitor is to see it
            self._answer.error = f"{type(error).__name__}: {error}"
            self._answer.state = "failed"
        finally:
            self.done.set()

    def _generate(self) -> None:
        settings, models = self._settings, self._models
        options = settings.target_options()
        if self._drafted:
            options |= settings.draft_options() | {"assistant_model": models.draft}
        ids = torch.tensor([self._ids], device=models.target.device)
        torch.manual_seed(int(settings.seed))
        with models.scheduler(settings.scheduler), hf_dspark.record(probabilities=settings.probabilities) as stats:
            self._answer.stats = stats if self._drafted else None
            self._answer.state, self._started = "running", time.perf_counter()
            models.target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                streamer=self._collector,
                stopping_criteria=StoppingCriteriaList([StopWhen(self._stop)]),
                **options,
            )


class Models:
    """A pair that all visitors share. Answers take turns: seeds and `draft.scheduler` are the pair's, not a call's.

    Args:
        target, draft, tokenizer: the pair.
        cost_model: costs for the scheduler `"measured"`.
        limits: of prompts and answers.

    Raises:
        ValueError: target and draft swapped.
    """

    def __init__(
        self,
        target: Any,
        draft: hf_dspark.DSparkForCausalLM,
        tokenizer: PreTrainedTokenizerBase,
        *,
        cost_model: hf_dspark.CostModel | None = None,
        limits: Limits | None = None,
    ):
        if not isinstance(draft, hf_dspark.DSparkForCausalLM) or isinstance(target, hf_dspark.DSparkForCausalLM):
            found = f"{type(target).__name__} and {type(draft).__name__}"
            raise ValueError(f"`target` must be a language model and `draft` a DSpark draft, got {found}.")
        self.target, self.draft, self.tokenizer = target, draft.attach_target(target), tokenizer
        self.cost_model = cost_model
        self.limits = limits or Limits()
        self.gamma = draft.config.num_draft_tokens
        self.can_think = "enable_thinking" in str(tokenizer.chat_template)
        self._turn = threading.Lock()

    def ask(self, message: Any, history: Any, settings: Settings, *, drafted: bool = True) -> Generation:
        """Begin an answer.

        Raises:
            ValueError: an empty or too long message, or settings out of range.
        """
        settings.check(self.limits)
        if settings.scheduler == "measured" and self.cost_model is None:
            raise ValueError('`scheduler="measured"` needs a cost model: start the page with `--cost-model`.')
        texts = conversation(message, history)
        ids = ChatFormat(self.tokenizer, thinking=settings.thinking if self.can_think else None).encode(texts)
        self.limits.check_prompt(len(ids))
        return Generation(self, ids, texts[-1], settings, drafted=drafted)

    @contextmanager
    def turn(self, stop: threading.Event):
        """Wait for the pair; gives `False` if `stop` was set first."""
        while not (acquired := self._turn.acquire(timeout=POLL)) and not stop.is_set():
            pass
        try:
            yield acquired and not stop.is_set()
        finally:
            if acquired:
                self._turn.release()

    @contextmanager
    def scheduler(self, choice: str):
        """`draft.scheduler` for one answer."""
        before = self.draft.scheduler
        chosen: Any = hf_dspark.PrefixScheduler(self.cost_model) if choice == "measured" else CHOICES[choice]
        self.draft.scheduler = chosen
        try:
            yield
        finally:
            self.draft.scheduler = before
