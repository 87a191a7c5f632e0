"""`DSparkConfig` back into the config.json of speculators."""

import copy
from collections.abc import Callable
from typing import Any

import torch

from ..configuration_dspark import DSparkConfig
from .deepspec_write import style_of

VERSION = "0.5.0"  # of the format that is written
LAYERS = "transformer_layer_config"


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
    result = copy.deepcopy(foreign)
    stated = config.dtype is not None and ({"dtype", "torch_dtype"} & foreign.keys())
    _update(result, before, after, skip=() if stated else ("dtype",))
    return result


def _update(result: dict[str, Any], before: dict[str, Any], after: dict[str, Any], skip: tuple[str, ...] = ()) -> None:
    for key in sorted(after.keys() | before.keys()):
        if key in skip or (key in after and key in before and after[key] == before[key]):
            continue
        if isinstance(after.get(key), dict) and isinstance(result.get(key), dict):
            _update(result[key], before.get(key) or {}, after[key])
        elif key in after:
            if key == "dtype":
                result.pop("torch_dtype", None)
            result[key] = after[key]
        else:
            result.pop(key, None)


def all_keys(config: DSparkConfig) -> dict[str, Any]:
    """Every key that speculators writes for a draft."""
    kind = "dspark" if config.markov_rank or config.enable_confidence_head else "dflash"
    same = (
        "block_size", "mask_token_id", "sample_from_anchor", "markov_rank", "enable_confidence_head",
        "target_hidden_size",
    )  # fmt: skip
    keys = {name: getattr(config, name) for name in same} | {
        "architectures": ["DSparkDraftModel" if kind == "dspark" else "DFlashDraftModel"],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        LAYERS: _layer_keys(config),
        "draft_vocab_size": config.head_size,
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "markov_head_type": config.markov_head_type,
        "confidence_head_with_markov": config.confidence_head_with_markov,
        "sliding_window_non_causal": config.sliding_window is not None and not any(config.causal_layers or ()),
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.num_draft_tokens}],
            "verifier": {"name_or_path": config.target_name_or_path, "architectures": []},
        },
    }
    if config.dtype is not None:
        keys["dtype"] = str(config.dtype).removeprefix("torch.")
    if config.confidence_temperatures is not None:  # not of the format; its readers ignore it
        keys["confidence_temperatures"] = list(config.confidence_temperatures)
    return keys


def _layer_keys(config: DSparkConfig) -> dict[str, Any]:
    same = (
        "attention_bias", "head_dim", "hidden_act", "hidden_size", "initializer_range", "intermediate_size",
        "max_position_embeddings", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps",
        "vocab_size",
    )  # fmt: skip
    slides = "sliding_attention" in (config.layer_types or ())
    return {name: getattr(config, name) for name in same} | {
        "model_type": "qwen3",
        "layer_types": list(config.layer_types or ["full_attention"] * config.num_hidden_layers),
        "rope_parameters": dict(config.rope_parameters or {}),
        "sliding_window": (config.sliding_window or 1) - 1 if slides else None,
        "tie_word_embeddings": False,
        "use_sliding_window": slides,
    }


def refuse_foreign(config: DSparkConfig) -> None:
    """Raise ValueError for what no reader of this form would understand."""
    slides = [kind == "sliding_attention" for kind in config.layer_types or ()]
    causal = [bool(layer) for layer in config.causal_layers or ()]
    faults = {
        "blocks of Gemma4's style": style_of(config) != "qwen3",
        "interleaved rotary pairs": config.rope_interleaved,
        "windows that count from each slot": any(slides) and not config.window_from_anchor,
        "causal layers other than all sliding ones": any(causal) and causal != slides,
        "a factor on embeddings or logits": config.embedding_scale != 1 or config.logit_scale != 1,
        "capped logits": config.final_logit_softcapping is not None,
        "embeddings or a head of unknown size": not config.vocab_size,
    }
    found = [fault for fault, there in faults.items() if there]
    if found:
        raise ValueError(
            f"The speculators form has no word for {', '.join(found)}. Save this draft with `format=None`."
        )


def with_mask(config: DSparkConfig, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if config.draft_vocab_size is None:
        return tensors
    d2t = tensors["d2t"]
    mask = torch.zeros(config.vocab_size, dtype=torch.bool, device=d2t.device)
    mask[torch.arange(len(d2t), device=d2t.device) + d2t] = True
    return tensors | {"t2d": mask}
