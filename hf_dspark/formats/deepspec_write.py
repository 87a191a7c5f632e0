"""`DSparkConfig` back into DeepSpec's config.json."""

import copy
import math
from collections.abc import Callable
from typing import Any

from .._hub_files import TensorInfo
from ..configuration_dspark import DSparkConfig
from . import parts
from .keys import OVERRIDES, Keys

ARCHITECTURES = {"qwen3": "Qwen3DSparkModel", "gemma4": "Gemma4DSparkModel"}
# Other spellings of a key, which must go when it gets a new value.
ALIASES = {
    "dtype": ("torch_dtype",),
    "enable_confidence_head": ("use_confidence_head",),
    "rope_parameters": ("rope_theta", "rope_scaling", "partial_rotary_factor"),
    "sample_from_anchor": ("query_zero_predicts_next", "shift_label"),
    "global_head_dim": ("per_layer_config",),
}


def as_read(
    config: DSparkConfig, read: Callable[[Keys, parts.Tensors], DSparkConfig], *, anchor_first: bool
) -> dict[str, Any]:
    """The file's own keys, with new values in DeepSpec's words where the config has changed since it was read.

    Args:
        read: translates the keys, given tensors by parameter name.
        anchor_first: the layout of the family for files that do not state one.
    """
    foreign = config.foreign or {}
    tensors = {name: TensorInfo(shape, "F32", "") for name, shape in parts.principal_shapes(config).items()}
    after = all_keys(config, anchor_first)
    lacking = {name: getattr(config, name) for name in OVERRIDES if Keys(foreign).find(name, nested=True)[0] is None}
    before = {name: after[name] for name in ("architectures", "model_type")}
    for given in ({}, lacking):  # a caller may have given what the file lacks
        try:
            before = all_keys(read(Keys(foreign, given, quiet=True), tensors), anchor_first)
            before = {name: value for name, value in before.items() if name not in given}
            break
        except ValueError:  # the sizes themselves have changed, so every key is written
            continue
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
    }
    if found == {"value_norm": True, "sandwich_norms": True, "attention_scale": 1.0}:
        return "gemma4"
    if found == {"value_norm": False, "sandwich_norms": False, "attention_scale": None} and not config.value_from_key:
        return "qwen3"
    raise ValueError(f"Published forms have Qwen3-style or Gemma4-style blocks; this draft has neither: {found}.")


def all_keys(config: DSparkConfig, anchor_first: bool = True) -> dict[str, Any]:
    """Every key DeepSpec writes for a draft, and the layout if it is not what the reader takes for granted."""
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
    if config.sample_from_anchor != anchor_first:  # DeepSpec has no such key
        keys["sample_from_anchor"] = config.sample_from_anchor
    if config.rope_interleaved:
        keys["rope_is_neox_style"] = False
    if config.logit_scale != 1:
        keys["output_multiplier"] = config.logit_scale
    style_keys = _gemma4_keys(config) if style == "gemma4" else _qwen3_keys(config)
    return keys | style_keys | _attention_keys(config)


def refuse_foreign(config: DSparkConfig) -> None:
    """Raise ValueError for what no reader of DeepSpec's form would understand."""
    gemma4 = style_of(config) == "gemma4"
    factor = math.sqrt(config.hidden_size) if gemma4 else 1.0
    faults = {
        "a reduced vocabulary": config.draft_vocab_size is not None,
        "a vocabulary of unknown size": not config.vocab_size,
        "interleaved rotary pairs": config.rope_interleaved,
        "windows": config.sliding_window is not None,
        "causal layers": any(config.causal_layers or ()),
        "this factor on embeddings": round(config.embedding_scale, 6) != round(factor, 6),
        "a factor on logits": config.logit_scale != 1,
        "capped logits of Qwen3-style drafts": config.final_logit_softcapping is not None and not gemma4,
    }
    found = [fault for fault, there in faults.items() if there]
    if found:
        raise ValueError(f"DeepSpec's form has no word for {', '.join(found)}. Save this draft with `format=None`.")


def _attention_keys(config: DSparkConfig) -> dict[str, Any]:
    """Windows and causality in the words of z-lab's form."""
    if config.layer_types is None and config.causal_layers is None:
        return {}
    slides = [kind == "sliding_attention" for kind in config.layer_types or ()] or [False] * config.num_hidden_layers
    causal = list(config.causal_layers or [False] * config.num_hidden_layers)
    if causal != slides and len(set(causal)) > 1:
        raise ValueError(f"`causal_layers` {causal} can be written only if all are alike, or just the sliding ones.")
    keys: dict[str, Any] = {"layer_types": list(config.layer_types or ["full_attention"] * config.num_hidden_layers)}
    if any(slides):
        keys |= {"sliding_window": config.sliding_window, "use_sliding_window": True}
    return keys if causal == slides else keys | {"is_causal": causal[0]}


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
