"""The published drafts at their real sizes, on the meta device.

The sizes of the Gemma4 target are assumed; its names and ratios are DeepSpec's.
"""

import pytest
import torch

from hf_dspark import DSparkForCausalLM
from hf_dspark._hub_files import TensorInfo
from hf_dspark.formats import deepspec

QWEN3 = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "model_type": "qwen3",
         "mask_token_id": 151669, "hidden_act": "silu", "rope_theta": 1000000.0}  # fmt: skip
# (hidden, intermediate, heads, taps, target depth, gigabytes of the published bf16 file or None)
REAL = {
    "4B": (2560, 9728, 32, [1, 9, 17, 25, 33], 36, 2.79),
    "8B": (4096, 12288, 32, [1, 9, 17, 25, 33], 36, 4.74),
    "14B": (5120, 17408, 40, [1, 10, 19, 28, 37], 40, None),
}


def expected_shapes(h, mlp, q, kv, dim, v, r, taps, layers=5, gemma4=False):
    """Names and shapes as DeepSpec's trainer writes them."""
    shapes = {"embed_tokens.weight": (v, h), "lm_head.weight": (v, h), "fc.weight": (h, taps * h),
              "hidden_norm.weight": (h,), "norm.weight": (h,), "markov_head.markov_w1.weight": (v, r),
              "markov_head.markov_w2.weight": (v, r), "confidence_head.proj.weight": (1, h + r),
              "confidence_head.proj.bias": (1,)}  # fmt: skip
    for i in range(layers):
        layer = {
            "input_layernorm.weight": (h,), "post_attention_layernorm.weight": (h,), "self_attn.q_proj.weight": (q, h),
            "self_attn.k_proj.weight": (kv, h), "self_attn.o_proj.weight": (h, q), "self_attn.q_norm.weight": (dim,),
            "self_attn.k_norm.weight": (dim,), "mlp.gate_proj.weight": (mlp, h), "mlp.up_proj.weight": (mlp, h),
            "mlp.down_proj.weight": (h, mlp),
        }  # fmt: skip
        if gemma4:
            layer |= {"pre_feedforward_layernorm.weight": (h,), "post_feedforward_layernorm.weight": (h,)}
            layer |= {"layer_scalar": (1,)}
        else:
            layer |= {"self_attn.v_proj.weight": (kv, h)}
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def meta_shapes(config, shapes):
    tensors = {name: TensorInfo(shape, "BF16", "model.safetensors") for name, shape in shapes.items()}
    config, renames = deepspec.read(config, tensors)
    with torch.device("meta"):
        model = DSparkForCausalLM(config)
    assert all(name == new for name, new in renames.items())
    return config, {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("size", REAL)
def test_published_qwen3_drafts_build_with_their_own_names_and_shapes(size):
    hidden, mlp, heads, taps, depth, gigabytes = REAL[size]
    raw = QWEN3 | {
        "architectures": ["Qwen3DSparkModel"], "hidden_size": hidden, "intermediate_size": mlp, "block_size": 7,
        "num_attention_heads": heads, "num_hidden_layers": 5, "num_target_layers": depth, "target_layer_ids": taps,
        "markov_rank": 256, "markov_head_type": "vanilla", "enable_confidence_head": True, "num_anchors": 512,
        "confidence_head_with_markov": True, "tie_word_embeddings": False, "layer_types": ["full_attention"] * 5,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 40960, "dtype": "bfloat16",
    }  # fmt: skip
    shapes = expected_shapes(hidden, mlp, heads * 128, 1024, 128, 151936, 256, 5)
    config, built = meta_shapes(raw, shapes)
    assert built == shapes
    assert config.num_draft_tokens == 7 and config.target_hidden_size == hidden and config.dtype == torch.bfloat16
    if gigabytes is not None:
        stored = 2 * sum(torch.Size(shape).numel() for shape in shapes.values()) / 1e9
        assert stored == pytest.approx(gigabytes, abs=0.01)
    dflash = raw | {"markov_rank": 0, "enable_confidence_head": False}
    for key in ("markov_head_type", "confidence_head_with_markov"):
        del dflash[key]
    shapes = {name: shape for name, shape in shapes.items() if not name.startswith(("markov_head", "confidence_head"))}
    assert meta_shapes(dflash, shapes)[1] == shapes


@pytest.mark.parametrize("model_type", ["gemma4_text", "gemma4_unified_text"])
def test_published_gemma4_draft_builds_with_its_own_names_and_shapes(model_type):
    hidden, mlp, vocab = 3840, 15360, 262144
    raw = {
        "architectures": ["Gemma4DSparkModel"], "model_type": model_type, "target_model_type": "gemma4",
        "target_text_model_type": model_type, "hidden_size": hidden, "intermediate_size": mlp, "vocab_size": vocab,
        "num_hidden_layers": 5, "num_target_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 256, "global_head_dim": 512, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
        "hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": 30.0, "enable_moe_block": False,
        "hidden_size_per_layer_input": 0, "block_size": 7, "target_layer_ids": [5, 17, 29, 41, 46], "mask_token_id": 4,
        "markov_rank": 256, "markov_head_type": "vanilla", "enable_confidence_head": True, "rms_norm_eps": 1e-6,
        "confidence_head_with_markov": True, "tie_word_embeddings": False, "layer_types": ["full_attention"] * 5,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    }  # fmt: skip
    shapes = expected_shapes(hidden, mlp, 16 * 512, 512, 512, vocab, 256, 5, gemma4=True)
    config, built = meta_shapes(raw, shapes)
    assert built == shapes and config.num_draft_tokens == 7
