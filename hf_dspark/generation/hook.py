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
from transformers.generation.configuration_utils import GenerationMode
from transformers.utils import logging

from .engine import Engine
from .engines import engine_of
from .loop import PlainLoop
from .options import GIVEN_BY_CALLER, KEEPS_ROWS, draft_options, given_as_filled, refuse
from .path import (
    CACHE_GIVEN,
    STATIC_ASKED,
    check_ranks,
    check_static_cache,
    wants_ragged,
    why_not_ragged,
    why_target_only,
)
from .probe import hint
from .ragged_loop import RaggedLoop
from .record import CallRecord

logger = logging.get_logger(__name__)

PLAIN_REASON = "one sequence over transformers' own cache"
RAGGED_REASON = "a batch or a static cache"


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
        keeps_rows = kwargs.pop(KEEPS_ROWS, False)
        prepared, model_kwargs = original(self, generation_config, *args, **kwargs)
        if given := given_as_filled(generation_config, kwargs):
            setattr(prepared, GIVEN_BY_CALLER, given)
        if keeps_rows:
            setattr(prepared, KEEPS_ROWS, True)
        if any(kwargs.get(name) is not None for name in ("past_key_values", "cache")):
            setattr(prepared, CACHE_GIVEN, True)
        return prepared, model_kwargs

    return _prepare_generation_config


def _validate(original: Callable) -> Callable:
    @functools.wraps(original)
    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        if not is_dspark(generation_mode_kwargs.get("assistant_model")):
            return original(self, generation_mode, generation_config, generation_mode_kwargs)
        refuse(self, generation_mode, generation_config, generation_mode_kwargs)
        if generation_config.cache_implementation == "static":
            # The engine has a cache of its own; transformers' would only take memory and stay at the target.
            setattr(generation_config, STATIC_ASKED, True)
            generation_config.cache_implementation = None
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
    draft = assistant_model
    check_static_cache(model_kwargs)
    draft_options(draft, generation_config)  # wrong values are refused before anything is computed
    if streamer is not None and input_ids.shape[0] > 1:
        raise ValueError(f"`streamer` shows one text, but this batch has {input_ids.shape[0]} rows. Drop one of them.")
    draft.attach_target(target)
    check_ranks(target, draft, generation_config)
    arguments = input_ids, logits_processor, stopping_criteria, generation_config, streamer, model_kwargs
    gamma = draft.config.num_draft_tokens
    limits = input_ids.shape[1], generation_config.max_length
    reason = why_target_only(target, logits_processor, synced_gpus, model_kwargs, *limits)
    engine, why_not = None, None
    if reason is None and wants_ragged(input_ids, generation_config):
        engine, why_not = _engine(target, draft, input_ids, generation_config, model_kwargs)
        if why_not is not None and input_ids.shape[0] > 1:
            reason = why_not
    if reason is not None:
        record = CallRecord("target_only", reason, gamma)
        output = _without_drafts(target, *arguments, synced_gpus, record)
    elif engine is not None:
        record = CallRecord("ragged", RAGGED_REASON, gamma)
        output = _ragged(engine, draft, *arguments, record)
    else:
        record = CallRecord("plain", why_not or PLAIN_REASON, gamma)
        output = PlainLoop(target, draft, *arguments, record).run()
    if draft.probe:
        record.note(hint(record.stats))
    if generation_config.return_dict_in_generate:
        output.speculation = record.stats
    return output


def _engine(target, draft, *call) -> tuple[Engine | None, str | None]:
    """The engine of the pair, or why it cannot serve this call."""
    why_not = why_not_ragged(*call)
    if why_not is None:
        try:
            engine = engine_of(target, draft)
            if not engine.held_here:
                return engine, None
            why_not = "the ragged path of this pair is at work in this very thread"
        except NotImplementedError as error:
            why_not = str(error)
    logger.warning_once(f"hf_dspark: not the ragged path: {why_not}.")
    return None, why_not


def _ragged(
    engine,
    draft,
    input_ids,
    logits_processor,
    stopping_criteria,
    generation_config,
    streamer,
    model_kwargs,
    record,
):
    with engine.held():
        record.note(engine.uncaptured, log=draft.device.type == "cuda")
        mask = model_kwargs.get("attention_mask")
        call = input_ids, mask, logits_processor, stopping_criteria, generation_config, streamer
        return RaggedLoop(engine, draft, *call, record).run()


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
