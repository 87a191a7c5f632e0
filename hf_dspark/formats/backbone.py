"""Qwen3-style blocks, which most families share: sizes, attention, rotary embeddings, embeddings and head."""

import copy
from collections.abc import Callable
from typing import Any

from .._hub_files import listing
from ..configuration_dspark import LAYER_TYPES, DSparkConfig
from . import parts
from .keys import Keys
from .rope import interleaved, read_rope


def qwen3_config(keys: Keys, tensors: parts.Tensors, *, family: str, why: str, anchor_first: bool, **known: Any):
    """A `DSparkConfig` of Qwen3-style blocks from keys that bear DeepSpec's names.

    Args:
        family: `source_format`.
        why, anchor_first: the family's own layout and its reason, for files that do not state one.
        known: fields that the family spells in its own way.

    Raises:
        ValueError: a key is missing, malformed, unsupported, or says something else than the tensors.
    """
    activation = keys.get("hidden_act", "text", "silu")
    fields = block_shape(keys, "qwen3", activation) | keys.sizes("num_key_value_heads", "head_dim")
    fields |= attention(keys, fields["num_hidden_layers"])
    return draft_config(keys, tensors, fields, family=family, why=why, anchor_first=anchor_first, **known)


def draft_config(
    keys: Keys,
    tensors: parts.Tensors,
    fields: dict[str, Any],
    *,
    family: str,
    why: str,
    anchor_first: bool,
    **known: Any,
) -> DSparkConfig:
    """The config of a draft whose blocks are described by `fields`; the rest of the arguments as in `qwen3_config`."""
    hidden_size = fields["hidden_size"]
    fields |= parts.taps(keys, tensors, hidden_size, known.pop("target_layer_ids", None))
    fields |= vocabulary(keys, tensors, fields["vocab_size"])
    fields |= parts.block(keys, anchor_first, why, assumed=known.pop("layout_assumed", False))
    fields |= parts.markov_head(keys, tensors)
    fields |= parts.confidence_head(keys, tensors, hidden_size, fields["markov_rank"])
    fields |= {
        "num_target_layers": keys.get("num_target_layers", "count", None, nested=True),
        "confidence_temperatures": keys.get("confidence_temperatures", "numbers", None),
        "bos_token_id": keys.raw.get("bos_token_id"),
        "eos_token_id": keys.raw.get("eos_token_id"),
        "pad_token_id": keys.raw.get("pad_token_id"),
        "source_format": family,
        "resolution": keys.resolution,
        "foreign": copy.deepcopy(keys.raw),
    }
    return parts.make_config(fields | parts.dtype(keys) | known)


def block_shape(keys: Keys, style: str, activation: str, **known: int) -> dict[str, Any]:
    """Sizes, norms and rotary parameters that blocks of both styles have; `known` are sizes that no key states."""
    parts.check_activation(activation)
    epsilon = keys.get("rms_norm_eps", "number", 1e-6)
    if epsilon < 0:
        raise ValueError(f"`rms_norm_eps` must be >= 0, got {epsilon}.")
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return {name: known[name] if name in known else keys.get(name, "size") for name in names} | {
        "hidden_act": activation,
        "rms_norm_eps": float(epsilon),
        "max_position_embeddings": keys.get("max_position_embeddings", "size", 32768 if style == "qwen3" else 131072),
        "attention_bias": keys.get("attention_bias", "flag", False),
        "initializer_range": float(keys.get("initializer_range", "number", 0.02)),
        "rope_parameters": read_rope(keys, style),
        "rope_interleaved": interleaved(keys),
    }


def attention(keys: Keys, num_layers: int) -> dict[str, Any]:
    """Windows and in-block causality of each layer.

    `is_causal`, or `causal` in a nest, counts for all layers; without it sliding layers are causal and full ones not,
    as in z-lab's code and vLLM.
    """
    types = keys.get("layer_types", "texts", None)
    unknown = sorted(set(types or ()) - set(LAYER_TYPES))
    if unknown:
        raise ValueError(f"`layer_types` holds {listing(unknown)}; a draft has {' and '.join(LAYER_TYPES)} layers.")
    if types is None and keys.get("use_sliding_window", "flag", False) and keys.find("sliding_window")[0] is not None:
        raise ValueError("`use_sliding_window: true` without `layer_types` does not say which layers slide. Add it.")
    slides = [kind == "sliding_attention" for kind in types or ()]
    stated = keys.get("is_causal", "flag", None, nested=True, alias="causal")
    fields: dict[str, Any] = {}
    if any(slides):
        window = keys.get("swa_window_size", "size", None, nested=True, alias="sliding_window")
        if window is None:
            raise ValueError("`layer_types` holds sliding_attention, but config.json lacks `sliding_window`. Add it.")
        fields |= {"layer_types": types, "sliding_window": window}
        if keys.get("window_from_anchor", "flag", False):
            fields["window_from_anchor"] = True
    if stated:
        fields["causal_layers"] = [True] * num_layers
    elif any(slides) and stated is None:
        fields["causal_layers"] = slides
    if fields:
        note_attention(keys, fields, "no key" if stated is None else f"`is_causal: {str(stated).lower()}`")
    return fields


def note_attention(keys: Keys, fields: dict[str, Any], why: str) -> None:
    """Record windows and causality."""
    sliding = (fields.get("layer_types") or []).count("sliding_attention")
    causal = (fields.get("causal_layers") or []).count(True)
    window = f"{sliding} layers with a window of {fields['sliding_window']}" if sliding else "no windows"
    keys.note("attention", f"{window}, {causal} layers causal inside a block: {why}")


def vocabulary(keys: Keys, tensors: parts.Tensors, vocab_size: int) -> dict[str, Any]:
    """The mask id, and which of embeddings and head the file holds."""
    has_embeddings, has_head = "embed_tokens.weight" in tensors, "lm_head.weight" in tensors
    rows = parts.shape_of(tensors, "embed_tokens.weight")[0] if has_embeddings else vocab_size
    mask = keys.get("mask_token_id", "count", nested=True)
    if rows and mask >= rows:
        raise ValueError(f"`mask_token_id` {mask} is not a row of the embeddings, which have {rows} rows.")
    if keys.get("tie_word_embeddings", "flag", False) and has_embeddings and not has_head:
        raise ValueError("`tie_word_embeddings: true` without lm_head.weight is not supported. Store lm_head.weight.")
    shared = [name for name, has in (("embed_tokens", has_embeddings), ("lm_head", has_head)) if not has]
    keys.note("vocabulary", f"the target's {listing(shared)}: not in the file" if shared else "the file's own")
    return {"mask_token_id": mask, "has_embed_tokens": has_embeddings, "has_lm_head": has_head}


def renamed(tensors: parts.Tensors, rename: Callable[[str], str | None]) -> dict[str, str]:
    """File tensor name -> parameter name of everything that is to be loaded; `rename` gives None for what is left out.

    Raises:
        ValueError: two tensors of the file are the same parameter.
    """
    names: dict[str, str] = {}
    for name in sorted(tensors):
        new = rename(name)
        if new is None or new.endswith(parts.IGNORED_TENSORS):
            continue
        if new in names.values():
            old = next(old for old, taken in names.items() if taken == new)
            raise ValueError(f"The tensors {old} and {name} are both {new}. Remove one of them.")
        names[name] = new
    return names
