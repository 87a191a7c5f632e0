"""`DSparkConfig` back into DeepSpec's config.json."""

import copy
import math
from collections.abc import Callable
from typing import Any

from ..configuration_dspark import DSparkConfig
from .keys import Keys

ARCHITECTURES = {"qwen3": "Qwen3DSparkModel", "gemma4": "Gemma4DSparkModel"}
# Other spellings of a key, which must go when it gets a new value.
ALIASES = {
    "dtype": ("torch_dtype",),
    "enable_confidence_head": ("use_confidence_head",),
    "rope_parameters": ("rope_theta", "rope_scaling", "partial_rotary_factor"),
    "sample_from_anchor": ("query_zero_predicts_next", "shift_label"),
    "global_head_dim": ("per_layer_config",),
}


def changed_keys(config: DSparkConfig, foreign: dict[str, Any], reread: Callable[[], DSparkConfig]) -> dict[str, Any]:
    """The file's own keys, with new values where the config has changed since it was read.

    Args:
        foreign: the keys as the file had them.
        reread: translates them once more, given the tensors that the config stands for now.
    """
    after = all_keys(config)
    try:
        before = all_keys(reread())
    except ValueError:  # the sizes themselves have changed, so every key is written
        before = {}
    if not {"dtype", "torch_dtype"} & foreign.keys():  # then the tensors' own dtype counts
        after.pop("dtype", None)
    result = copy.deepcopy(foreign)
    for key in sorted(after.keys() | before.keys()):
        if key in after and key in before and after[key] == before[key]:
            continue
        for name in (key, *ALIASES.get(key, ())):
            place = Keys(result).find(name, nested=True)[1] or name
            table = result[place.split(".")[0]] if "." in place else result
            table.pop(name, None)
        if key in after:
            result[key] = after[key]
    return result


def style_of(config: DSparkConfig) -> str:
    """ "qwen3" or "gemma4".

    Raises:
        ValueError: the blocks are of neither style.
    """
    found = {
        "value_norm": config.value_norm,
        "sandwich_norms": config.sandwich_norms,
        "attention_scale": config.attention_scale,
        "embedding_scale": round(config.embedding_scale, 6),
    }
    gemma4 = {
        "value_norm": True,
        "sandwich_norms": True,
        "attention_scale": 1.0,
        "embedding_scale": round(math.sqrt(config.hidden_size), 6),
    }
    qwen3 = {"value_norm": False, "sandwich_norms": False, "attention_scale": None, "embedding_scale": 1.0}
    if found == gemma4:
        return "gemma4"
    if found == qwen3 and not config.value_from_key and config.final_logit_softcapping is None:
        return "qwen3"
    raise ValueError(f"DeepSpec's form knows Qwen3-style and Gemma4-style blocks; this draft is neither: {found}.")


def all_keys(config: DSparkConfig) -> dict[str, Any]:
    """Every key DeepSpec writes for a draft."""
    style = style_of(config)
    same = (
        "attention_bias", "block_size", "enable_confidence_head", "hidden_size", "initializer_range",
        "intermediate_size", "markov_rank", "mask_token_id", "max_position_embeddings", "num_attention_heads",
        "num_hidden_layers", "rms_norm_eps", "vocab_size", "bos_token_id", "eos_token_id", "pad_token_id",
    )  # fmt: skip
    keys = {name: getattr(config, name) for name in same} | {
        "architectures": [ARCHITECTURES[style]],
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "target_layer_ids": list(config.target_layer_ids),
        "tie_word_embeddings": False,
        "use_cache": True,
    }
    if config.dtype is not None:
        keys["dtype"] = str(config.dtype).removeprefix("torch.")
    if config.num_target_layers is not None:
        keys["num_target_layers"] = config.num_target_layers
    if config.markov_rank:
        keys["markov_head_type"] = config.markov_head_type
    if config.enable_confidence_head:
        keys["confidence_head_with_markov"] = config.confidence_head_with_markov
    if config.confidence_temperatures is not None:
        keys["confidence_temperatures"] = list(config.confidence_temperatures)
    if not config.sample_from_anchor:  # DeepSpec has no such key; without it the layout is anchor-first
        keys["sample_from_anchor"] = False
    return keys | (_gemma4_keys(config) if style == "gemma4" else _qwen3_keys(config))


def _qwen3_keys(config: DSparkConfig) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "num_key_value_heads": config.num_key_value_heads,
        "rope_parameters": dict(config.rope_parameters or {}),
        "sliding_window": None,
        "use_sliding_window": False,
    }


def _gemma4_keys(config: DSparkConfig) -> dict[str, Any]:
    sliding = {"rope_type": "default", "rope_theta": 10000.0}
    return {
        "model_type": "gemma4_text",
        "target_model_type": "gemma4",
        "target_text_model_type": "gemma4_text",
        "attention_k_eq_v": config.value_from_key,
        "enable_moe_block": False,
        "final_logit_softcapping": config.final_logit_softcapping,
        "global_head_dim": config.head_dim,
        "head_dim": config.head_dim,
        "hidden_activation": config.hidden_act,
        "hidden_size_per_layer_input": 0,
        "num_global_key_value_heads": config.num_key_value_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "num_kv_shared_layers": 0,
        "rope_parameters": {"full_attention": dict(config.rope_parameters or {}), "sliding_attention": sliding},
        "vocab_size_per_layer_input": config.vocab_size,
    }
