"""Tiny DeepSpec files as (config, tensors), and reading them without a folder."""

import torch

from hf_dspark._hub_files import TensorInfo
from hf_dspark.formats import detect
from tiny import draft_config, draft_tensors


def info(tensors):
    return {name: TensorInfo(tuple(tensor.shape), "F32", "model.safetensors") for name, tensor in tensors.items()}


def read(config, tensors=None, **kwargs):
    """`DSparkConfig` of a config.json and its tensors, through the family detection."""
    tensors = info(draft_tensors(config) if tensors is None else tensors)
    return detect(config, tensors).read(config, tensors, **kwargs)[0]


def draft(**settings):
    config = draft_config(**settings)
    return config, draft_tensors(config)


def without(config, *names):
    return {key: value for key, value in config.items() if key not in names}


def gemma4_files(*, from_key: bool = True, heads: int = 1):
    config = draft_config(rank=8)
    tensors = draft_tensors(config)
    del config["hidden_act"]
    config |= {
        "architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text", "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 8, "global_head_dim": 16, "num_key_value_heads": 2, "num_global_key_value_heads": heads,
        "attention_k_eq_v": from_key, "enable_moe_block": False, "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 30.0, "layer_types": ["full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }  # fmt: skip
    attention = "layers.0.self_attn."
    tensors[attention + "k_proj.weight"] = torch.randn(heads * 16, 64) / 8
    tensors[attention + "v_proj.weight"] = torch.randn(heads * 16, 64) / 8
    if from_key:
        del tensors[attention + "v_proj.weight"]
    for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
        tensors[f"layers.0.{name}.weight"] = torch.ones(64)
    tensors["layers.0.layer_scalar"] = torch.full((1,), 0.5)
    return config, tensors
