"""Which path a generate() call takes, and why."""

import zlib
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import StaticCache

from .._compat import CACHE_KEY
from ..modeling_dspark import DSparkForCausalLM
from .engine import MAX_ROWS
from .recurrent import has_recurrent_layers, why_not_rewound

# Set by the hook on the config of a call.
STATIC_ASKED, CACHE_GIVEN = "_dspark_static", "_dspark_cache_given"
# Arguments of the target's forward that the ragged path makes itself.
UNDERSTOOD = {"attention_mask", "position_ids", "cache_position", "use_cache", "logits_to_keep", CACHE_KEY}
TOKEN_TYPES = {"token_type_ids", "mm_token_type_ids"}
STATEFUL_PROCESSORS = ("UnbatchedClassifierFreeGuidanceLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor")


def wants_ragged(input_ids: torch.Tensor, generation_config: GenerationConfig) -> bool:
    return input_ids.shape[0] > 1 or getattr(generation_config, STATIC_ASKED, False)


def why_not_ragged(
    input_ids: torch.Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
) -> str | None:
    """What of a call the ragged path cannot honour; `None` when it can, if the pair allows it."""
    if input_ids.shape[0] > MAX_ROWS:
        return f"the ragged path holds up to {MAX_ROWS} rows, this batch has {input_ids.shape[0]}"
    if getattr(generation_config, CACHE_GIVEN, False):
        return "the ragged path uses a cache of its own, not the caller's"
    if generation_config.cache_implementation not in (None, "dynamic"):
        return f"the ragged path has no {generation_config.cache_implementation!r} cache"
    if generation_config.return_dict_in_generate:
        for name in ("output_hidden_states", "output_attentions"):
            if getattr(generation_config, name):
                return f"the ragged path keeps no `{name}`"
    others = [name for name, value in model_kwargs.items() if name not in UNDERSTOOD and value is not None]
    if "inputs_embeds" in others or input_ids.shape[1] == 0:
        return "the ragged path reads token ids, not embeddings"
    if others := [name for name in others if not _says_nothing(name, model_kwargs[name])]:
        return f"the ragged path does not know the model argument `{others[0]}`"
    return _why_not_inputs(input_ids, model_kwargs)


def _says_nothing(name: str, value: Any) -> bool:
    """Whether a model argument is as good as not given: switched off, empty, or token types of text alone."""
    if name in TOKEN_TYPES and isinstance(value, torch.Tensor):
        return not value.any()
    return value is False or (isinstance(value, dict) and not value)


def _why_not_inputs(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> str | None:
    if torch.is_autocast_enabled(input_ids.device.type):
        return "the ragged path keeps the pair's own dtypes, autocast would change them"
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    real = torch.ones_like(input_ids) if mask is None else mask
    if real.shape != input_ids.shape or not real.bool().any(dim=-1).all():
        return "the ragged path needs a mask [B, S] with a real token in every row"
    if (real[:, 1:] < real[:, :-1]).any():
        return "the ragged path takes padding on the left only"
    if positions is None:
        return None
    expected = (real.cumsum(-1) - 1).to(positions.device)
    if positions.shape[-2:] != expected.shape or not (positions.eq(expected) | real.eq(0).to(positions.device)).all():
        return "the ragged path counts positions from 0 at the first real token"
    return None


def _length_changes_rope(target: PreTrainedModel, prompt_length: int, max_length: int) -> bool:
    """Whether the rotary tables depend on how long the text is and change on the way: then every token has tables of
    its own in plain decoding, and a block would share those of its last one."""
    text = target.config.get_text_config(decoder=True)
    parameters = getattr(text, "rope_parameters", None) or {}
    kinds = [parameters] if "rope_type" in parameters else [p for p in parameters.values() if isinstance(p, dict)]
    for kind in kinds:
        trained = kind.get("original_max_position_embeddings") or getattr(
            text, "original_max_position_embeddings", None
        )
        trained = trained or text.max_position_embeddings
        if kind.get("rope_type") == "dynamic" and max_length > trained:
            return True
        if kind.get("rope_type") == "longrope" and prompt_length <= trained < max_length:
            return True
    return False


def check_static_cache(model_kwargs: dict[str, Any]) -> None:
    """Refuse a static cache made by the caller.

    Raises:
        ValueError: names the alternative.
    """
    if isinstance(model_kwargs.get(CACHE_KEY), StaticCache):
        raise ValueError(
            f"`{CACHE_KEY}=StaticCache(...)` cannot hold a block of drafts behind every row. Pass "
            '`cache_implementation="static"` instead: the fast path makes and keeps a cache of its own.'
        )


def check_ranks(target: PreTrainedModel, draft: DSparkForCausalLM, generation_config: GenerationConfig) -> None:
    """Refuse sampling with a tensor-parallel target whose ranks would draw different tokens and wait for each other.

    Raises:
        ValueError: on every rank, with the fix.
    """
    if not (generation_config.do_sample and torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    shards = [parameter for parameter in target.parameters() if hasattr(parameter, "device_mesh")]
    if not shards:
        return
    states = [_random_state(device) for device in (target.device, draft.device)]
    mine = torch.tensor([zlib.crc32(state.numpy().tobytes()) for state in states], device=target.device)
    for group in shards[0].device_mesh.get_all_groups():
        everyone = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size(group))]
        torch.distributed.all_gather(everyone, mine, group)
        if not torch.stack(everyone).eq(mine).all():
            raise ValueError(
                "The ranks of this tensor-parallel target have different random states, so they would sample different "
                "texts. Call `torch.manual_seed` with the same value on every rank before generate()."
            )


def _random_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def why_target_only(
    target: PreTrainedModel,
    logits_processor,
    synced_gpus: bool,
    model_kwargs: dict[str, Any],
    prompt_length: int,
    max_length: int | None,
) -> str | None:
    """Why drafts cannot be used in this call without changing its text; `None` when they can."""
    stateful = [type(p).__name__ for p in logits_processor if type(p).__name__ in STATEFUL_PROCESSORS]
    if stateful:
        return f"{', '.join(stateful)} keeps state of its own and cannot be applied to drafts"
    if synced_gpus:
        return "synced_gpus needs the same number of target forwards on every rank"
    if max_length is not None and _length_changes_rope(target, prompt_length, max_length):
        return "the target's rotary tables change with the length of the text, so a block of drafts cannot share them"
    cache = model_kwargs.get(CACHE_KEY)
    if cache is None:
        return "rounds need a cache (use_cache=False, or the target makes its own kind)"
    if not hasattr(cache, "is_croppable") or (cache.layers and all(cache.is_linear)):
        return f"{type(cache).__name__} of {type(target).__name__} cannot be rolled back"
    return why_not_rewound(target) if has_recurrent_layers(cache) else None
