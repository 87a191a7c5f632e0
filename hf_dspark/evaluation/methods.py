"""What is compared: plain decoding, DSpark with its options, and other ways to speculate for the same target."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from transformers import PreTrainedModel

from ..modeling_dspark import DSparkForCausalLM

PLAIN = "plain"


@dataclass(frozen=True)
class Method:
    """One way to generate.

    Attributes:
        name: its row in tables.
        options: keyword arguments of generate().
        draft: the DSpark draft, which is also in `options`; `None` for other methods.
        scheduler: what `draft.scheduler` is while the method runs.
        counts_forwards: whether the target's forwards are counted, to know τ of methods that keep no statistics.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    draft: DSparkForCausalLM | None = None
    scheduler: Any = None
    counts_forwards: bool = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The draft as the method wants it, and as it was afterwards."""
        if self.draft is None:
            yield
            return
        before = getattr(self.draft, "scheduler", None)
        self.draft.scheduler = self.scheduler
        try:
            yield
        finally:
            self.draft.scheduler = before

    def describe(self) -> dict[str, Any]:
        """The options as plain Python values."""
        plain = {k: v for k, v in self.options.items() if k != "assistant_model"}
        return plain if self.scheduler is None else plain | {"scheduler": str(self.scheduler)}


def plain_methods(*, compiled: bool) -> list[Method]:
    """Plain decoding; `compiled` adds transformers' own compiled decoding, which needs a static cache and CUDA."""
    fast = [Method(f"{PLAIN}, compiled", {"cache_implementation": "static"})] if compiled else []
    return [Method(PLAIN), *fast]


def dspark_methods(
    drafts: Mapping[str, DSparkForCausalLM],
    *,
    num_assistant_tokens: Sequence[int] = (),
    assistant_confidence_threshold: Sequence[float] = (),
    schedulers: Sequence[Any] = (None,),
    cache_implementation: str | None = None,
) -> list[Method]:
    """A method for each draft and combination of options; an empty sequence leaves an option unset.

    Args:
        drafts: name → draft that fits the target.

    Raises:
        ValueError: an option is out of range for a draft.
    """
    methods = []
    for name, draft in drafts.items():
        gamma = draft.config.num_draft_tokens
        for tokens, threshold, scheduler in product(
            num_assistant_tokens or (None,), assistant_confidence_threshold or (None,), schedulers
        ):
            if tokens is not None and not 1 <= tokens <= gamma:
                raise ValueError(f"`num_assistant_tokens` must be in 1..{gamma} for {name}, got {tokens}.")
            if threshold is not None and not 0 <= threshold <= 1:
                raise ValueError(f"`assistant_confidence_threshold` must be in [0, 1], got {threshold}.")
            options = {
                "num_assistant_tokens": tokens,
                "assistant_confidence_threshold": threshold,
                "cache_implementation": cache_implementation,
            }
            options = {key: value for key, value in options.items() if value is not None}
            label = [name]
            label += [f"γ={tokens}"] if tokens is not None else []
            label += [f"threshold={threshold:g}"] if threshold is not None else []
            label += [f"scheduler={scheduler}"] if scheduler is not None else []
            methods.append(Method(" ".join(label), {"assistant_model": draft, **options}, draft, scheduler))
    return methods


def other_methods(
    *, prompt_lookup_num_tokens: int | None = None, assistant: PreTrainedModel | None = None
) -> list[Method]:
    """Comparison rows: prompt lookup, and transformers' assisted decoding with a small model of the same vocabulary."""
    methods = []
    if prompt_lookup_num_tokens is not None:
        options = {"prompt_lookup_num_tokens": prompt_lookup_num_tokens}
        methods.append(Method("prompt lookup", options, counts_forwards=True))
    if assistant is not None:
        methods.append(Method("assistant", {"assistant_model": assistant}, counts_forwards=True))
    return methods
