"""Which assistant options the caller really set, and the calls that cannot be honoured."""

from numbers import Integral, Real
from typing import Any, NamedTuple

from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ALL_STATIC_CACHE_IMPLEMENTATIONS as ALL_STATIC
from transformers.generation.configuration_utils import GenerationMode

from ..context import ContextWindow
from ..modeling_dspark import DSparkForCausalLM

# What generate() writes into a config when nobody said anything.
FILLED_BY_GENERATE = {"num_assistant_tokens": 20, "assistant_confidence_threshold": 0.4}
# Set by the hook on the config of a call: options that the caller gave with the very value generate() fills in.
GIVEN_BY_CALLER = "_dspark_given_options"
# Argument of a session's calls, and the mark it leaves on the config: rows may begin with what the last call has left.
KEEPS_ROWS = "_dspark_keeps_rows"


def given_as_filled(generation_config: GenerationConfig | None, kwargs: dict[str, Any]) -> list[str]:
    """Options whose value in a generate() call, or in the config passed to it, looks as if nobody had given it."""
    noted = list(getattr(generation_config, GIVEN_BY_CALLER, ()))
    # Pipelines pass a config that generate() has filled in before; then only its note tells.
    if getattr(generation_config, "num_assistant_tokens_schedule", None) is None:
        noted += [n for n, filled in FILLED_BY_GENERATE.items() if getattr(generation_config, n, None) == filled]
    return [n for n, filled in FILLED_BY_GENERATE.items() if kwargs.get(n) == filled or n in noted]


class DraftOptions(NamedTuple):
    """`num_assistant_tokens`: most drafts verified in a round, 1..γ. `threshold`: on c_k, 0 for the whole block.
    `note`: what could not be used, for `SpeculationStats.reason`."""

    num_assistant_tokens: int
    threshold: float
    note: str


def draft_options(draft: DSparkForCausalLM, generation_config: GenerationConfig) -> DraftOptions:
    """Resolve the options of a call: the call and its generation config, then `draft.generation_config`, then γ and 0.

    Raises:
        ValueError: for values out of range, with the range.
    """
    gamma, window = draft.config.num_draft_tokens, draft.context_window
    if window is not None and not isinstance(window, ContextWindow):
        raise ValueError(f"`draft.context_window` must be a `ContextWindow` or None, got {window!r}.")
    count = _given("num_assistant_tokens", draft, generation_config)
    if count is None:
        count = gamma
    elif isinstance(count, bool) or not isinstance(count, Integral) or not 1 <= int(count) <= gamma:
        raise ValueError(
            f"`num_assistant_tokens` must be an integer in 1..{gamma} for this draft (γ = {gamma}), got {count!r}."
        )
    threshold = _given("assistant_confidence_threshold", draft, generation_config)
    if threshold is None:
        threshold = 0.0
    elif isinstance(threshold, bool) or not isinstance(threshold, Real) or not 0 <= float(threshold) <= 1:
        raise ValueError(f"`assistant_confidence_threshold` must be a number in [0, 1], got {threshold!r}.")
    if threshold > 0 and draft.confidence_head is None:
        note = f"assistant_confidence_threshold={threshold} has no effect, the draft has no confidence head"
        return DraftOptions(int(count), 0.0, note)
    return DraftOptions(int(count), float(threshold), "")


def _given(name: str, draft: DSparkForCausalLM, generation_config: GenerationConfig) -> Any:
    value = getattr(generation_config, name, None)
    given = value != FILLED_BY_GENERATE[name] or name in getattr(generation_config, GIVEN_BY_CALLER, ())
    return value if given and value is not None else getattr(draft.generation_config, name, None)


def refuse(target: PreTrainedModel, mode: GenerationMode, config: GenerationConfig, kwargs: dict[str, Any]) -> None:
    """Raise for calls that DSpark cannot honour exactly and that have no exact substitute.

    Raises:
        ValueError: one sentence with the option, its value and the fix.
    """
    if mode != GenerationMode.ASSISTED_GENERATION:
        raise ValueError(
            f"A DSpark draft works with greedy decoding and sampling, but this call asks for {mode.value} "
            f"(num_beams={config.num_beams}). Set `num_beams=1`, or drop `assistant_model`."
        )
    if (config.num_return_sequences or 1) > 1:
        raise ValueError(
            f"`num_return_sequences={config.num_return_sequences}` is not supported with a DSpark draft. "
            "Call generate() once for each sequence."
        )
    if kwargs.get("assistant_tokenizer") is not None:
        raise ValueError("A DSpark draft shares the target's tokenizer. Drop `assistant_tokenizer`.")
    conflicts = {
        "prompt_lookup_num_tokens": "a second way to draft",
        "assistant_early_exit": "a second way to draft",
        "assistant_ensemble_weight": "lossy by design",
        "speculation_type": "another kind of draft",
        "use_mtp": "another kind of draft",
        "dola_layers": "another way to decode",
    }
    for name, why in conflicts.items():
        if (value := getattr(config, name, None)) not in (None, False):
            raise ValueError(f"`{name}={value!r}` is {why} and cannot be combined with a DSpark draft. Unset it.")
    if config.num_assistant_tokens_schedule not in (None, "constant"):
        raise ValueError(
            f"`num_assistant_tokens_schedule={config.num_assistant_tokens_schedule!r}` is not supported with a DSpark "
            "draft. Use `assistant_confidence_threshold` to adapt the verified length."
        )
    if config.cache_implementation in ALL_STATIC and config.cache_implementation != "static":
        raise ValueError(
            f"`cache_implementation={config.cache_implementation!r}` is not supported with a DSpark draft. Use "
            '"static" for the fast path, or drop it for a dynamic cache.'
        )
