"""DeepSpec checkpoints: DSpark and DFlash (`markov_rank` 0) drafts with Qwen3-style or Gemma4-style blocks.

config.json is a copy of the target's with the draft's keys on top, all of them flat. Tensor names are the package's
own. Both methods are anchor-first. Published as deepseek-ai/dspark_*_block7 and deepseek-ai/dflash_*_block7.
"""

import copy
import math
from typing import Any

from .._hub_files import TensorInfo, listing
from ..configuration_dspark import DSparkConfig
from . import deepspec_write, parts
from .deepspec_write import ARCHITECTURES
from .keys import Keys, labels
from .rope import read_rope

NAME = "deepspec"
MODEL_TYPES = {"qwen3": "qwen3", "gemma4_text": "gemma4", "gemma4_unified_text": "gemma4"}
GEMMA4_TENSOR = "layers.0.pre_feedforward_layernorm.weight"
# Recomputed, never learned: old exports carry it along.
IGNORED_TENSORS = "rotary_emb.inv_freq"


def matches(raw: dict[str, Any], tensors: parts.Tensors) -> bool:
    """Whether the tensors are those of a draft of this family and the taps stand under DeepSpec's name."""
    has_taps = Keys(raw).find("target_layer_ids", nested=True)[0] is not None
    labelled = any(label in ARCHITECTURES.values() for label in labels(raw))
    return (has_taps or labelled) and {"fc.weight", "hidden_norm.weight"} <= tensors.keys()


def read(
    raw: dict[str, Any], tensors: parts.Tensors, *, sample_from_anchor: bool | None = None
) -> tuple[DSparkConfig, dict[str, str]]:
    """Translate a config.json.

    Args:
        raw: its content.
        tensors: the file's tensors by name.
        sample_from_anchor: overrules the layout.

    Returns:
        the config, and file tensor name -> parameter name of everything that is to be loaded.

    Raises:
        ValueError: a key is missing, malformed, unsupported, or says something else than the tensors.
    """
    return _read(Keys(raw), tensors, sample_from_anchor), {n: n for n in tensors if not n.endswith(IGNORED_TENSORS)}


def _read(keys: Keys, tensors: parts.Tensors, sample_from_anchor: bool | None) -> DSparkConfig:
    style = _style(keys, tensors)
    keys.note("family", f"DeepSpec, {style}-style: its keys and tensor names")
    parts.refuse_unsupported(keys)
    fields = _backbone(keys, style) | (_gemma4(keys, tensors) if style == "gemma4" else _qwen3(keys))
    fields |= parts.taps(keys, tensors, fields["hidden_size"]) | _vocabulary(keys, tensors, fields["vocab_size"])
    fields |= parts.block(keys, sample_from_anchor, True, "DeepSpec trains every slot, with and without Markov head")
    fields |= parts.markov_head(keys, tensors)
    fields |= parts.confidence_head(keys, tensors, fields["hidden_size"], fields["markov_rank"])
    fields |= {
        "num_target_layers": keys.get("num_target_layers", "count", None, nested=True),
        "confidence_temperatures": keys.get("confidence_temperatures", "numbers", None),
        "bos_token_id": keys.raw.get("bos_token_id"),
        "eos_token_id": keys.raw.get("eos_token_id"),
        "pad_token_id": keys.raw.get("pad_token_id"),
        "source_format": NAME,
        "resolution": keys.resolution,
        "foreign": copy.deepcopy(keys.raw),
    }
    return parts.make_config(fields | parts.dtype(keys))


def _style(keys: Keys, tensors: parts.Tensors) -> str:
    model_type = keys.get("model_type", "text", "qwen3")
    if model_type not in MODEL_TYPES:
        known = ", ".join(MODEL_TYPES)
        raise ValueError(f"`model_type` {model_type!r} is not one that DeepSpec drafts have ({known}).")
    shown = "gemma4" if GEMMA4_TENSOR in tensors else "qwen3"
    names = keys.get("architectures", "texts", [])
    stated = {MODEL_TYPES[model_type]} if keys.find("model_type")[0] else set()
    stated |= {style for style, label in ARCHITECTURES.items() if label in names}
    if stated - {shown}:
        raise ValueError(
            f"`model_type` {model_type!r} and `architectures` {names} disagree with the tensors, which make "
            f"{shown}-style blocks ({GEMMA4_TENSOR} is {'there' if shown == 'gemma4' else 'absent'})."
        )
    return shown


def _backbone(keys: Keys, style: str) -> dict[str, Any]:
    activation = {
        "qwen3": lambda: keys.get("hidden_act", "text", "silu"),
        "gemma4": lambda: keys.get("hidden_activation", "text", "gelu_pytorch_tanh", alias="hidden_act"),
    }[style]()
    parts.check_activation(activation)
    epsilon = keys.get("rms_norm_eps", "number", 1e-6)
    if epsilon < 0:
        raise ValueError(f"`rms_norm_eps` must be >= 0, got {epsilon}.")
    return keys.sizes("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads") | {
        "hidden_act": activation,
        "rms_norm_eps": float(epsilon),
        "max_position_embeddings": keys.get("max_position_embeddings", "size", 32768 if style == "qwen3" else 131072),
        "attention_bias": keys.get("attention_bias", "flag", False),
        "initializer_range": float(keys.get("initializer_range", "number", 0.02)),
        "rope_parameters": read_rope(keys, style),
    }


def _qwen3(keys: Keys) -> dict[str, Any]:
    return keys.sizes("num_key_value_heads", "head_dim")


def _gemma4(keys: Keys, tensors: parts.Tensors) -> dict[str, Any]:
    """Fields of a Gemma4-style draft: all its layers are shaped like the target's full-attention layers."""
    head_dim, stated_heads = _global_heads(keys)
    rows = parts.shape_of(tensors, "layers.0.self_attn.k_proj.weight")[0]
    if stated_heads is not None and rows != stated_heads * head_dim:
        # Without key-as-value attention Gemma4 keeps the ordinary number of heads.
        stated_heads = keys.get("num_key_value_heads", "size", stated_heads)
    heads = keys.get("num_key_value_heads", "size") if stated_heads is None else stated_heads
    from_key = "layers.0.self_attn.v_proj.weight" not in tensors
    stated = keys.get("attention_k_eq_v", "flag", from_key)
    if stated != from_key:
        raise ValueError(
            f"`attention_k_eq_v` is {str(stated).lower()}, but layers.0.self_attn.v_proj.weight is "
            f"{'absent' if from_key else 'in the file'}."
        )
    cap = keys.get("final_logit_softcapping", "number", None)
    if cap is not None and cap <= 0:
        raise ValueError(f"`final_logit_softcapping` must be a positive number or null, got {cap}.")
    return {
        "num_key_value_heads": heads,
        "head_dim": head_dim,
        "value_from_key": from_key,
        "value_norm": True,
        "sandwich_norms": True,
        "embedding_scale": math.sqrt(keys.get("hidden_size", "size")),
        "attention_scale": 1.0,
        "final_logit_softcapping": None if cap is None else float(cap),
    }


def _global_heads(keys: Keys) -> tuple[int, int | None]:
    """Head size and number of key-value heads of full-attention layers; transformers 5.24 saves them per layer."""
    head_dim = keys.get("global_head_dim", "size", None)
    heads = keys.get("num_global_key_value_heads", "size", None)
    layers = list(keys.get("per_layer_config", "table", {}).values())
    if head_dim is not None or not layers:
        return head_dim or keys.get("global_head_dim", "size"), heads
    if not isinstance(layers[0], dict) or any(layer != layers[0] for layer in layers):
        raise ValueError(f"`per_layer_config` must give all draft layers the same shape, got {layers}.")
    layer = Keys(layers[0])
    return layer.get("head_dim", "size"), layer.get("num_key_value_heads", "size", None)


def _vocabulary(keys: Keys, tensors: parts.Tensors, vocab_size: int) -> dict[str, Any]:
    has_embeddings, has_head = "embed_tokens.weight" in tensors, "lm_head.weight" in tensors
    rows = parts.shape_of(tensors, "embed_tokens.weight")[0] if has_embeddings else vocab_size
    mask = keys.get("mask_token_id", "count", nested=True)
    if mask >= rows:
        raise ValueError(f"`mask_token_id` {mask} is not a row of the embeddings, which have {rows} rows.")
    if keys.get("tie_word_embeddings", "flag", False) and has_embeddings and not has_head:
        raise ValueError("`tie_word_embeddings: true` without lm_head.weight is not supported. Store lm_head.weight.")
    shared = [name for name, has in (("embed_tokens", has_embeddings), ("lm_head", has_head)) if not has]
    keys.note("vocabulary", f"the target's {listing(shared)}: not in the file" if shared else "the file's own")
    return {"mask_token_id": mask, "has_embed_tokens": has_embeddings, "has_lm_head": has_head}


def write(config: DSparkConfig) -> dict[str, Any]:
    """config.json of a draft in DeepSpec's form.

    A draft that was read from this form gives its own keys back; only what has changed since is new.

    Raises:
        ValueError: the draft's blocks are neither Qwen3-style nor Gemma4-style.
    """
    foreign = config.foreign
    if config.source_format != NAME or not foreign:
        return deepspec_write.all_keys(config)
    tensors = {name: TensorInfo(shape, "F32", "") for name, shape in parts.principal_shapes(config).items()}
    return deepspec_write.changed_keys(config, foreign, lambda: _read(Keys(foreign, quiet=True), tensors, None))
