"""The one seam into transformers: generate() calls with a DSpark draft come here, all others pass through untouched.

Three methods of `GenerationMixin` are wrapped, once: `_prepare_generation_config` notes which assistant options the
caller gave (generate() fills in others by itself), `_validate_generation_mode` gives our reasons instead of messages
about other kinds of assistants, and `_assisted_decoding` hands over to our loop. transformers' own assisted loop is not
used: it misses stop conditions inside a block, feeds a prefilled cache again and drops chunked prefill.
"""

import functools
from collections.abc import Callable
from typing import Any

from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import StaticCache
from transformers.generation.configuration_utils import GenerationMode
from transformers.utils import logging

from .._compat import CACHE_KEY
from .loop import PlainLoop
from .options import GIVEN_BY_CALLER, given_as_filled, refuse, static_cache_error
from .record import CallRecord

logger = logging.get_logger(__name__)

# These keep state about the text beside the ids, or run the target themselves.
STATEFUL_PROCESSORS = ("UnbatchedClassifierFreeGuidanceLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor")
PLAIN_REASON = "one sequence over transformers' own cache"


def is_dspark(draft: Any) -> bool:
    # On the object, not its class: wrappers (compiled modules, adapters) hand attributes on.
    return getattr(draft, "_dspark_draft", False) is True


def install() -> None:
    """Wrap the three methods; a second call changes nothing."""
    for name, wrapper in (
        ("_prepare_generation_config", _remember_options),
        ("_validate_generation_mode", _validate),
        ("_assisted_decoding", _decode),
    ):
        original = getattr(GenerationMixin, name)
        if not getattr(original, "_dspark_hook", False):
            wrapped: Any = wrapper(original)
            wrapped._dspark_hook = True
            setattr(GenerationMixin, name, wrapped)


def _remember_options(original: Callable) -> Callable:
    @functools.wraps(original)
    def _prepare_generation_config(self, generation_config, *args, **kwargs):
        prepared, model_kwargs = original(self, generation_config, *args, **kwargs)
        if given := given_as_filled(generation_config, kwargs):
            setattr(prepared, GIVEN_BY_CALLER, given)
        return prepared, model_kwargs

    return _prepare_generation_config


def _validate(original: Callable) -> Callable:
    @functools.wraps(original)
    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        if not is_dspark(generation_mode_kwargs.get("assistant_model")):
            return original(self, generation_mode, generation_config, generation_mode_kwargs)
        refuse(self, generation_mode, generation_config, generation_mode_kwargs)
        # The text is that of the plain mode, so the plain mode is what the target has to support.
        plain = GenerationMode.SAMPLE if generation_config.do_sample else GenerationMode.GREEDY_SEARCH
        return original(self, plain, generation_config, {**generation_mode_kwargs, "assistant_model": None})

    return _validate_generation_mode


def _decode(original: Callable) -> Callable:
    @functools.wraps(original)
    def _assisted_decoding(self, input_ids, *args, **kwargs):
        if not is_dspark(kwargs.get("assistant_model")):
            return original(self, input_ids, *args, **kwargs)
        return decode(self, input_ids, *args, **kwargs)

    return _assisted_decoding


def decode(
    target: PreTrainedModel,
    input_ids,
    logits_processor,
    stopping_criteria,
    generation_config,
    synced_gpus: bool = False,
    streamer=None,
    inputs_tensor=None,
    assistant_model=None,
    assistant_tokenizer=None,
    tokenizer=None,
    **model_kwargs,
):
    """One generate() call with a DSpark draft; arguments are those of `GenerationMixin._assisted_decoding`."""
    if input_ids.shape[0] > 1:
        raise ValueError(
            f"A batch of {input_ids.shape[0]} is not supported with a DSpark draft yet. Call generate() for each row."
        )
    if isinstance(model_kwargs.get(CACHE_KEY), StaticCache):
        raise static_cache_error(f"{CACHE_KEY}=StaticCache(...)")
    assistant_model.attach_target(target)
    arguments = input_ids, logits_processor, stopping_criteria, generation_config, streamer, model_kwargs
    gamma = assistant_model.config.num_draft_tokens
    reason = _target_only_reason(target, logits_processor, synced_gpus, model_kwargs)
    if reason is None:
        record = CallRecord("plain", PLAIN_REASON, gamma)
        output = PlainLoop(target, assistant_model, *arguments, record).run()
    else:
        record = CallRecord("target_only", reason, gamma)
        output = _without_drafts(target, *arguments, synced_gpus, record)
    if generation_config.return_dict_in_generate:
        output.speculation = record.stats
    return output


def _without_drafts(
    target,
    input_ids,
    logits_processor,
    stopping_criteria,
    generation_config,
    streamer,
    model_kwargs,
    synced_gpus,
    record,
):
    """transformers' own one-token loop, for calls in which drafts would not be exact."""
    logger.warning_once(f"hf_dspark: plain decoding without drafts: {record.stats.reason}.")
    output = target._sample(
        input_ids,
        logits_processor=logits_processor,
        stopping_criteria=stopping_criteria,
        generation_config=generation_config,
        synced_gpus=synced_gpus,
        streamer=streamer,
        **model_kwargs,
    )
    sequences = output.sequences if generation_config.return_dict_in_generate else output
    record.add_tokens(sequences.shape[1] - input_ids.shape[1])
    return output


def _target_only_reason(target, logits_processor, synced_gpus: bool, model_kwargs: dict[str, Any]) -> str | None:
    """Why drafts cannot be used in this call without changing its text; `None` when they can."""
    stateful = [type(p).__name__ for p in logits_processor if type(p).__name__ in STATEFUL_PROCESSORS]
    if stateful:
        return f"{', '.join(stateful)} keeps state of its own and cannot be applied to drafts"
    if synced_gpus:
        return "synced_gpus needs the same number of target forwards on every rank"
    cache = model_kwargs.get(CACHE_KEY)
    if cache is None:
        return "rounds need a cache (use_cache=False, or the target makes its own kind)"
    if not hasattr(cache, "is_croppable") or (cache.layers and all(cache.is_linear)):
        return f"{type(cache).__name__} of {type(target).__name__} cannot be rolled back"
    return None
