"""DeepSpec checkpoints: DSpark and DFlash (`markov_rank` 0) drafts with Qwen3-style or Gemma4-style blocks.

config.json is a copy of the target's with the draft's keys on top, all of them flat. Tensor names are the package's
own. Both methods are anchor-first. Published as deepseek-ai/dspark_*_block7 and deepseek-ai/dflash_*_block7; files of
other trainers that were converted to these names are read too.
"""

import math
from typing import Any

from ..configuration_dspark import DSparkConfig
from . import deepspec_write, parts
from .backbone import attention, block_shape, draft_config, qwen3_config, renamed
from .deepspec_write import ARCHITECTURES
from .keys import Keys, is_labelled

NAME = "deepspec"
MODEL_TYPES = {"qwen3": "qwen3", "gemma4_text": "gemma4", "gemma4_unified_text": "gemma4"}
GEMMA4_TENSOR = "layers.0.pre_feedforward_layernorm.weight"
WHY = "DeepSpec trains every slot, with and without Markov head"


def matches(raw: dict[str, Any], tensors: parts.Tensors) -> bool:
    """Whether the tensors are those of a draft of this family and the taps stand under DeepSpec's name."""
    has_taps = Keys(raw).find("target_layer_ids", nested=True)[0] is not None
    labelled = is_labelled(raw, ARCHITECTURES.values())
    return (has_taps or labelled) and {"fc.weight", "hidden_norm.weight"} <= tensors.keys()


def read(raw: dict[str, Any], tensors: parts.Tensors, **overrides: Any) -> tuple[DSparkConfig, dict[str, str]]:
    """Translate a config.json.

    Args:
        raw: its content.
        tensors: the file's tensors by name.
        overrides: what the caller sets, see `keys.OVERRIDES`; None for what the file says.

    Returns:
        the config, and file tensor name -> parameter name of everything that is to be loaded.

    Raises:
        ValueError: a key is missing, malformed, unsupported, or says something else than the tensors.
    """
    return _read(Keys(raw, overrides), tensors), renamed(tensors, lambda name: name)


def _read(keys: Keys, tensors: parts.Tensors) -> DSparkConfig:
    style = _style(keys, tensors)
    keys.note("family", f"DeepSpec, {style}-style: its keys and tensor names")
    parts.refuse_unsupported(keys)
    if style == "qwen3":
        return qwen3_config(keys, tensors, family=NAME, anchor_first=True, why=WHY)
    fields = block_shape(keys, style, keys.get("hidden_activation", "text", "gelu_pytorch_tanh", alias="hidden_act"))
    if attention(keys, fields["num_hidden_layers"]):
        raise ValueError(
            "Gemma4-style drafts have full attention, both ways, in all layers; config.json says otherwise."
        )
    known = _gemma4(keys, tensors)
    return draft_config(keys, tensors, fields, family=NAME, anchor_first=True, why=WHY, **known)


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


def write(config: DSparkConfig) -> dict[str, Any]:
    """config.json of a draft in DeepSpec's form.

    A draft that was read from this form gives its own keys back; only what has changed since is new.

    Raises:
        ValueError: the draft's blocks are neither Qwen3-style nor Gemma4-style.
    """
    if config.source_format == NAME and config.foreign:
        return deepspec_write.as_read(config, _read, anchor_first=True)
    deepspec_write.refuse_foreign(config)
    return deepspec_write.all_keys(config)
