"""Other families and ordinary models are refused in one sentence that names them; nothing is guessed."""

import json

import pytest
import torch

from deepspec_files import draft, without
from hf_dspark import DSparkForCausalLM
from hf_dspark.formats import open_checkpoint
from tiny import write_draft


def refused(folder, message):
    with pytest.raises(ValueError, match=message) as caught:
        DSparkForCausalLM.from_pretrained(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"architectures": ["K3DSparkModel"]}, "Kimi K3"),
        ({"model_type": "k3_dspark"}, "Kimi K3"),
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash 2"),
        ({"model_arch": "dfly"}, "DFly"),
        ({"enable_hidden_correction": True, "markov_rank": 0}, "DFly"),
        ({"dflash_config": {"projector_type": "domino"}}, "Domino"),
        ({"text_config": {"dspark_block_size": 7}}, "DeepSeek-V4 DSpark, or MiniMax's"),
        ({"dspark_target_layer_ids": [40, 41, 42]}, "DeepSeek-V4 DSpark, or MiniMax's"),
        ({"speculators_model_type": "eagle3"}, "EAGLE-3"),
        ({"speculators_model_type": "mlp"}, "speculators 'mlp'"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "EAGLE-3"),
    ],
    ids=str,
)
def test_families_known_by_their_keys(tmp_path, keys, message):
    config, tensors = draft()
    refused(write_draft(tmp_path, config | keys, tensors), f"{message}.*which is not read: .*(run it with|take)")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("layers.0.self_attn.q_a_proj.weight", "Kimi K3"),
        ("candidate_selector.proj.weight", "DFlash 2"),
        ("prefix_gru.weight", "Domino"),
        ("midlayer.hidden_norm.weight", "EAGLE-3"),
        ("layers.0.decoder_layer.mlp.gate_proj.weight", "MiniMax"),
        ("mtp.0.main_proj.weight", "DeepSeek-V4"),
        ("language_model.model.dspark.norm.weight", "MiniMax"),
        ("layers.0.self_attn.q_proj.scales", "quantised"),
        ("layers.0.self_attn.q_proj.weight_packed", "quantised"),
        ("layers.0.self_attn.q_proj.weight_scale", "quantised"),
    ],
)
def test_families_known_by_their_tensors(tmp_path, name, message):
    config, tensors = draft()
    refused(write_draft(tmp_path, config, tensors | {name: torch.ones(2)}), f"{message}.*{name}")


@pytest.mark.parametrize("names", [{}, {"architectures": ["Qwen3DSparkModel"]}, {"architectures": ["SomethingElse"]}])
def test_eagle_3_is_known_whatever_it_calls_itself(tmp_path, names):
    """One `midlayer` and no list of taps."""
    config, tensors = draft()
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "draft_vocab_size": 24} | names
    layer = {"midlayer." + name.removeprefix("layers.0."): tensors[name] for name in tensors if "layers.0." in name}
    folder = write_draft(tmp_path, config, layer | {"fc.weight": torch.ones(64, 192), "norm.weight": torch.ones(64)})
    refused(folder, "EAGLE-3.*midlayer.*no list of taps.*run it with vLLM")


def test_gguf_is_named(tmp_path):
    (tmp_path / "draft.gguf").write_bytes(b"GGUF")
    refused(tmp_path, "no config.json.*GGUF.*safetensors")
    refused(tmp_path / "draft.gguf", "is a file.*GGUF.*safetensors")
    (tmp_path / "config.json").write_text(json.dumps(draft()[0]))
    refused(tmp_path, "GGUF.*safetensors")


def test_mlx_repacks_are_named(tmp_path):
    config, tensors = draft()
    stored = tensors | {
        "layers.0.mlp.up_proj.scales": torch.ones(48, 2),
        "layers.0.mlp.up_proj.biases": torch.ones(48, 2),
    }
    refused(write_draft(tmp_path, config | {"quantization": {"bits": 4}}, stored), "MLX repack.*unquantised")


def test_converted_specforge_files_under_deepspecs_name_are_read(tmp_path):
    config, tensors = draft()
    moved = {"mask_token_id": config["mask_token_id"], "projector_type": "dspark"}
    folder = write_draft(tmp_path, without(config, "mask_token_id") | {"dflash_config": moved}, tensors)
    assert open_checkpoint(folder).config.mask_token_id == 63


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_tensors_that_are_no_plain_floats_are_refused(tmp_path, dtype):
    config, tensors = draft()
    tensors["fc.weight"] = tensors["fc.weight"].to(dtype)
    refused(write_draft(tmp_path, config, tensors), "fc.weight has dtype")


def test_an_ordinary_model_is_no_draft(tmp_path):
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64}
    tensors = {"model.embed_tokens.weight": torch.ones(4, 4)}
    refused(write_draft(tmp_path, config, tensors), "not a DSpark draft.*Qwen3ForCausalLM.*AutoModelForCausalLM")
    refused(write_draft(tmp_path, {}, tensors), "not a DSpark draft")
    refused(write_draft(tmp_path, config | {"block_size": 7}, tensors), "not a DSpark draft")


def test_a_label_without_the_tensors_is_no_draft(tmp_path):
    config, _ = draft()
    refused(write_draft(tmp_path, config, {"model.embed_tokens.weight": torch.ones(4, 4)}), "not a DSpark draft")


def test_code_beside_the_weights_is_never_run_and_is_mentioned(tmp_path, monkeypatch):
    marker = tmp_path / "ran"
    config, tensors = draft()
    config["auto_map"] = {"AutoModel": "evil.Evil", "AutoConfig": "evil.EvilConfig"}
    folder = write_draft(tmp_path / "draft", config, tensors)
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: pass\nclass EvilConfig: pass\n")
    for trust in (None, True):
        model = DSparkForCausalLM.from_pretrained(folder, trust_remote_code=trust)
        assert "evil.py" in model.config.resolution["code"]
    assert not marker.exists()
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["K3DSparkModel"]}))
    refused(folder, "Kimi K3")
