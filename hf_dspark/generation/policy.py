"""`DraftPolicy`: how the drafts of a call are chosen, and how many of them are verified."""

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessorList

from .. import confidence
from ..modeling_dspark import DSparkForCausalLM
from ..proposal import Choose, arg_max, sample
from ..sampling import draw, usable
from ..scheduling.scheduler import PrefixScheduler
from .options import draft_options
from .verify import applies_to_draft, draft_distribution

AUTO = "auto"


class DraftPolicy:
    """Options, processors and sampling of one generate() call, as far as the draft is concerned.

    Attributes:
        options: resolved assistant options.
        processors: the call's processors that may see drafts; they shape q.
        do_sample: whether the target samples.
        sample_method: `draft.draft_sample_method`.
        scheduler: of this call; `"auto"` until somebody knows the costs.
        notes: what could not be used.

    Raises:
        ValueError: for options out of range.
    """

    def __init__(
        self,
        draft: DSparkForCausalLM,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList | None,
    ):
        self.options = draft_options(draft, generation_config)
        self.processors = LogitsProcessorList(p for p in logits_processor or [] if applies_to_draft(p))
        self.do_sample = bool(generation_config.do_sample)
        self.sample_method = draft.draft_sample_method
        draft.config.check_temperatures()  # they may have been edited
        self._temperatures = draft.config.confidence_temperatures
        self.scheduler, self.notes = _scheduler(draft), [self.options.note]
        if self.scheduler is not None and draft.confidence_head is None:
            self.scheduler = None
            self.notes.append("draft.scheduler has no effect, the draft has no confidence head")
        if self.sample_method not in ("probabilistic", "greedy"):
            raise ValueError(
                f'`draft.draft_sample_method` must be "probabilistic" or "greedy", got {self.sample_method!r}.'
            )

    @property
    def choice(self) -> Choose:
        """How a token of a block is chosen: one of the plain ways if nothing else is asked for."""
        if self.processors or (self.do_sample and self.sample_method == "greedy"):
            return self.choose
        return sample if self.do_sample else arg_max

    def choose(
        self, prefix: torch.Tensor, logits: torch.Tensor, processors: LogitsProcessorList | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Processed scores [B, V] and the chosen ids [B] of one slot; `prefix` [B, t], `logits` [B, V]."""
        processors = self.processors if processors is None else processors
        scores = processors(prefix, logits.clone()) if processors else logits
        scores = usable(scores) if self.do_sample else scores
        return scores, draw(scores, do_sample=self.do_sample and self.sample_method == "probabilistic")

    def distribution(self, scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor | None:
        """q [ℓ, V] of drafts [ℓ] chosen from `scores` [ℓ, V]; `None` for greedy decoding."""
        return draft_distribution(scores, tokens, self.sample_method) if self.do_sample else None

    def draft_probabilities(self, tokens: torch.Tensor, scores: torch.Tensor) -> list[float]:
        """`Round.q`: q_k(x_k) of drafts [γ] chosen from `scores` [γ, V]."""
        q = self.distribution(scores, tokens)
        q = scores.softmax(dim=-1) if q is None else q
        return q.gather(-1, tokens[:, None])[:, 0].tolist()

    def conditional(self, confidence_logits: torch.Tensor | None) -> torch.Tensor | None:
        """c_k with the draft's temperatures."""
        return None if confidence_logits is None else confidence.conditional(confidence_logits, self._temperatures)

    def should_draft(self) -> bool:
        """Whether the coming round is worth a draft; ask once a round."""
        return not isinstance(self.scheduler, PrefixScheduler) or self.scheduler.should_draft()

    def lengths(self, c: torch.Tensor | None, room: list[int | None]) -> list[int]:
        """ℓ of every row.

        Args:
            c: [R, γ] or `None`.
            room: drafts that each row's length limit leaves room for, `None` without limit.
        """
        limits = self._limits(c, room)
        if c is None or not isinstance(self.scheduler, PrefixScheduler):
            return limits
        a = self._survival(c.detach().cpu().numpy(), limits)
        planned = self.scheduler.schedule(a)
        if self.scheduler.lagged:
            self.scheduler.update(a)
        return [min(pair) for pair in zip(limits, planned, strict=True)]

    @property
    def decides_before(self) -> bool:
        """Whether the scheduler knows the number of drafts to verify before they are drafted."""
        return isinstance(self.scheduler, PrefixScheduler) and self.scheduler.lagged

    def budget(self, num_rows: int, pending: bool) -> int | None:
        """Drafts to verify in the coming round, over all rows; `None` for all of them. See `decides_before`.

        pending: whether `tell_scheduler` has not been called for the last round yet.
        """
        assert isinstance(self.scheduler, PrefixScheduler)
        budget = self.scheduler.budget(pending=int(pending))
        return None if budget is None or budget >= num_rows * self.options.num_assistant_tokens else budget

    def tell_scheduler(self, c: np.ndarray, room: list[int | None]) -> None:
        """Tell the scheduler of a round that `budget` was for; arguments as for `lengths`.

        Its next answer but one depends on it, so there is time.
        """
        assert isinstance(self.scheduler, PrefixScheduler)
        self.scheduler.update(self._survival(c, self._limits(torch.from_numpy(c), room)))

    def _limits(self, c: torch.Tensor | None, room: list[int | None]) -> list[int]:
        """ℓ of every row without a scheduler."""
        count, threshold = self.options.num_assistant_tokens, self.options.threshold
        limits = [count if limit is None else min(count, limit) for limit in room]
        if c is not None and threshold > 0:
            kept = confidence.truncate(c, threshold).tolist()
            limits = [min(pair) for pair in zip(limits, kept, strict=True)]
        return limits

    def _survival(self, c: np.ndarray, limits: list[int]) -> np.ndarray:
        """a_j [R, count]; drafts that cannot be verified anyway are not to take part of the budget."""
        count = self.options.num_assistant_tokens
        a = c[:, :count].cumprod(axis=1, dtype=np.float64)
        return np.where(np.arange(count) < np.array(limits)[:, None], a, 0.0)

    def verified(self, c: torch.Tensor | None, limit: int | None) -> int:
        """ℓ of one row: `c` [γ] or `None`, `limit` the drafts that the length limit leaves room for."""
        return self.lengths(None if c is None else c[None], [limit])[0]


def _scheduler(draft: DSparkForCausalLM) -> PrefixScheduler | str | None:
    """`draft.scheduler` for one call: "auto", or a scheduler without history."""
    scheduler = draft.scheduler
    if scheduler is None or scheduler == AUTO:
        return scheduler
    if not isinstance(scheduler, PrefixScheduler):
        raise ValueError(f'`draft.scheduler` must be a `PrefixScheduler`, "auto" or None, got {scheduler!r}.')
    return scheduler.fresh()
