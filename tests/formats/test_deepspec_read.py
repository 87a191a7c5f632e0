"""Reading DeepSpec folders: what is decided, why, and what is refused."""

import json
import logging

import pytest
import torch

from deepspec_files import draft, read, without
from hf_dspark import DSparkForCausalLM
from hf_dspark._hub_files import TensorInfo
from hf_dspark.formats import Checkpoint, check_tensors, open_checkpoint
from tiny import draft_config, draft_tensors, write_draft

VOCAB = 64


# ---- golden drafts of the reference


@pytest.mark.parametrize("name", ["vanilla", "gated", "rnn", "dflash", "conf_hidden", "conf_only", "gemma4"])
def test_reference_drafts_open_and_every_tensor_is_accounted_for(shared_folder, name):
    folder = shared_folder / "reference" / "drafts" / name
    raw = json.loads((folder / "config.json").read_text())
    config = open_checkpoint(folder).config
    assert config.source_format == "deepspec" and config.sample_from_anchor and config.num_draft_tokens == 7
    assert config.target_layer_ids == raw["target_layer_ids"] and config.mask_token_id == raw["mask_token_id"]
    assert config.markov_rank == raw["markov_rank"]
    assert config.markov_head_type == raw.get("markov_head_type", "vanilla")
    assert config.enable_confidence_head == raw["enable_confidence_head"]
    assert config.has_embed_tokens and config.has_lm_head
    assert config.target_hidden_size == raw["hidden_size"]  # these pairs share one width
    model = DSparkForCausalLM.from_pretrained(folder)
    assert all(torch.isfinite(tensor).all() for tensor in model.state_dict().values())


def test_gemma4_keys_become_the_fields_of_its_full_attention_layers(shared_folder):
    config = open_checkpoint(shared_folder / "reference" / "drafts" / "gemma4").config
    assert (config.head_dim, config.num_key_value_heads) == (16, 1)  # global_head_dim, num_global_key_value_heads
    assert config.value_from_key and config.value_norm and config.sandwich_norms
    assert config.embedding_scale == pytest.approx(48**0.5)
    assert config.attention_scale == 1.0 and config.final_logit_softcapping == 30.0
    assert config.hidden_act == "gelu_pytorch_tanh"
    assert config.rope_parameters == {
        "rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0
    }  # fmt: skip


# ---- family and layout


@pytest.mark.parametrize("label", [["DSparkDraftModel"], ["DSparkSpeculator"], ["Anything"], None])
def test_the_name_does_not_matter_when_keys_and_tensors_are_deepspecs(tmp_path, label):
    config, tensors = draft()
    config = without(config, "architectures") if label is None else config | {"architectures": label}
    model = DSparkForCausalLM.from_pretrained(write_draft(tmp_path, config, tensors))
    assert model.config.source_format == "deepspec" and model.config.sample_from_anchor


def test_dflash_of_deepspec_is_anchor_first_too():
    config = read(*draft(rank=0, confidence=None, gamma=5))
    assert config.sample_from_anchor and config.num_draft_tokens == 5
    assert "anchor-first" in config.resolution["layout"]


@pytest.mark.parametrize(
    ("keys", "override", "drafts", "reason"),
    [
        ({}, None, 4, "DeepSpec"),
        ({"sample_from_anchor": False}, None, 3, "sample_from_anchor: false"),
        ({"sample_from_anchor": False}, True, 4, "caller"),
        ({"query_zero_predicts_next": True}, None, 4, "query_zero_predicts_next"),
        ({"shift_label": False}, None, 3, "shift_label"),
        ({"shift_label": False, "sample_from_anchor": True}, None, 4, "sample_from_anchor: true"),
        ({}, False, 3, "caller"),
    ],
)
def test_layout_caller_then_key_then_family(keys, override, drafts, reason):
    config, tensors = draft(gamma=4, **keys)
    config = read(config, tensors, sample_from_anchor=override)
    assert config.num_draft_tokens == drafts and config.block_size == 4
    assert reason in config.resolution["layout"]


def test_overriding_the_layout_is_logged(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("hf_dspark.formats.keys"), "disabled", False)
    read(*draft(), sample_from_anchor=False)
    assert "set by the caller, against anchor-first" in caplog.text
    with pytest.raises(ValueError, match="must be True, False or None"):
        read(*draft(), sample_from_anchor="yes")


# ---- places and spellings of keys

DRAFT_KEYS = ("mask_token_id", "target_layer_ids", "block_size", "markov_rank", "markov_head_type")


@pytest.mark.parametrize("nest", ["dflash_config", "text_config"])
@pytest.mark.parametrize("moved", [(name,) for name in DRAFT_KEYS] + [DRAFT_KEYS])
def test_draft_keys_mean_the_same_wherever_they_stand(moved, nest):
    config, tensors = draft()
    nested = without(config, *moved) | {nest: {name: config[name] for name in moved}}
    flat, found = read(config, tensors), read(nested, tensors)
    for name in DRAFT_KEYS:
        assert getattr(found, name) == getattr(flat, name)


@pytest.mark.parametrize("name", ["mask_token_id", "target_layer_ids", "block_size"])
def test_a_missing_key_is_reported_with_the_places_searched(name):
    config, tensors = draft()
    with pytest.raises(ValueError, match=f"`{name}`.*{name}, dflash_config.{name}, text_config.{name}"):
        read(without(config, name), tensors)


@pytest.mark.parametrize("name", ["hidden_size", "head_dim", "num_attention_heads", "vocab_size", "intermediate_size"])
def test_sizes_are_never_derived(name):
    config, tensors = draft()
    with pytest.raises(ValueError, match=f"`{name}`"):
        read(without(config, name), tensors)


def test_two_places_that_disagree_are_an_error():
    config, tensors = draft(gamma=4)
    with pytest.raises(ValueError, match="`block_size` is 4 but `dflash_config.block_size` is 8"):
        read(config | {"dflash_config": {"block_size": 8}}, tensors)


def test_spellings_of_other_tools_are_understood():
    config, tensors = draft()
    config = without(config, "enable_confidence_head") | {
        "use_confidence_head": True, "markov_head_type": "classical", "runtime_block_size": 2, "torch_dtype": "bfloat16"
    }  # fmt: skip
    found = read(without(config, "dtype"), tensors)
    assert found.enable_confidence_head and found.markov_head_type == "vanilla" and found.dtype == torch.bfloat16
    assert "classical" in found.resolution["markov_head_type"] and "2" in found.resolution["runtime_block_size"]


# ---- tensors decide


def test_target_width_is_what_fc_leaves_for_each_tap():
    config = draft_config(taps=(0, 2), hidden=64)
    assert read(config, draft_tensors(config, target_hidden=48)).target_hidden_size == 48
    with pytest.raises(ValueError, match=r"\[64, 96\].*5 taps"):
        read(config | {"target_layer_ids": [0, 1, 2, 3, 4]}, draft_tensors(config, target_hidden=48))
    with pytest.raises(ValueError, match="64, but fc.weight has 96 columns for 2 taps, 48 each"):
        read(config | {"target_hidden_size": 64}, draft_tensors(config, target_hidden=48))


def test_markov_rank_zero_with_markov_tensors_names_them():
    config, tensors = draft(rank=8, confidence=None)
    with pytest.raises(ValueError, match="markov_head.markov_w1.weight, markov_head.markov_w2.weight"):
        read(config | {"markov_rank": 0}, tensors)


def test_markov_rank_without_tensors_names_them():
    config, tensors = draft(rank=8, confidence=None)
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("markov_head")}
    with pytest.raises(ValueError, match="markov_head.markov_w1.weight and markov_head.markov_w2.weight"):
        read(config, tensors)
    assert read(without(config, "markov_rank"), tensors).markov_rank == 0


def test_absent_markov_keys_come_from_the_tensors():
    config, tensors = draft(rank=8, head="gated")
    found = read(without(config, "markov_rank", "markov_head_type"), tensors)
    assert (found.markov_rank, found.markov_head_type) == (8, "gated")
    assert {"markov_rank", "markov_head_type"} <= found.resolution.keys()


@pytest.mark.parametrize(("kind", "message"), [("attention", "unknown"), ("rnn", "'vanilla' head")])
def test_a_markov_kind_that_is_unknown_or_not_in_the_tensors(kind, message):
    config, tensors = draft()
    with pytest.raises(ValueError, match=f"{kind}.*{message}"):
        read(config | {"markov_head_type": kind}, tensors)


@pytest.mark.parametrize("with_markov", [True, False])
def test_shape_of_the_confidence_head_decides(with_markov):
    config, tensors = draft(confidence="markov" if with_markov else "hidden")
    assert read(without(config, "confidence_head_with_markov"), tensors).confidence_head_with_markov is with_markov
    with pytest.raises(ValueError, match="confidence_head_with_markov.*64 .*Markov rank 8"):
        read(config | {"confidence_head_with_markov": not with_markov}, tensors)


def test_confidence_head_presence_width_and_bias():
    config, tensors = draft()
    bare = {name: tensor for name, tensor in tensors.items() if name != "confidence_head.proj.bias"}
    assert read(config, bare).confidence_head_bias is False
    with pytest.raises(ValueError, match="enable_confidence_head.*confidence_head.proj.bias"):
        read(config | {"enable_confidence_head": False}, tensors)
    none = {name: tensor for name, tensor in tensors.items() if not name.startswith("confidence_head")}
    with pytest.raises(ValueError, match="enable_confidence_head.*confidence_head.proj.weight"):
        read(config, none)
    with pytest.raises(ValueError, match=r"\[1, 65\].*\[1, 64\].*\[1, 72\]"):
        read(config, tensors | {"confidence_head.proj.weight": torch.zeros(1, 65)})


def test_a_confidence_head_without_bias_computes_the_same_as_a_zero_bias(tmp_path):
    config, tensors = draft()
    tensors["confidence_head.proj.bias"].zero_()
    bare = {name: tensor for name, tensor in tensors.items() if name != "confidence_head.proj.bias"}
    anchors, taps = torch.tensor([5]), torch.randn(1, 3, 3 * 64)
    logits = [
        DSparkForCausalLM.from_pretrained(write_draft(tmp_path / str(i), config, stored)).propose(anchors, taps)
        for i, stored in enumerate((tensors, bare))
    ]
    assert torch.equal(logits[0].confidence_logits, logits[1].confidence_logits)


def test_mask_id_must_be_a_row_of_the_embeddings():
    config, tensors = draft()
    assert read(config | {"mask_token_id": VOCAB - 1}, tensors).mask_token_id == VOCAB - 1
    with pytest.raises(ValueError, match="`mask_token_id` 64 .* 64 rows"):
        read(config | {"mask_token_id": VOCAB}, tensors)
    with pytest.raises(ValueError, match="`mask_token_id`.*-1"):
        read(config | {"mask_token_id": -1}, tensors)
    slim = {name: tensor for name, tensor in tensors.items() if name not in ("embed_tokens.weight", "lm_head.weight")}
    found = read(config, slim)
    assert not found.has_embed_tokens and not found.has_lm_head
    assert "embed_tokens, lm_head" in found.resolution["vocabulary"]


def test_sizes_that_the_tensors_contradict_name_both(tmp_path):
    config, tensors = draft()
    for key, wrong, message in [
        ("head_dim", 32, r"q_proj.weight is \[64, 64\].*\[128, 64\]"),
        ("num_hidden_layers", 3, "`num_hidden_layers` is 3, but the file holds 1"),
        ("intermediate_size", 40, r"gate_proj.weight is \[48, 64\].*\[40, 64\]"),
        ("vocab_size", 100, r"embed_tokens.weight is \[64, 64\].*\[100, 64\]"),
        ("hidden_size", 60, r"fc.weight is \[64, 192\].*60"),
        ("num_key_value_heads", 4, r"k_proj.weight is \[32, 64\].*\[64, 64\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            open_checkpoint(write_draft(tmp_path, config | {key: wrong}, tensors))


# ---- accounting


def test_missing_unknown_and_misshapen_tensors_are_named(tmp_path):
    config, tensors = draft()
    for name, change, message in [
        ("layers.0.mlp.up_proj.weight", None, "missing: layers.0.mlp.up_proj.weight"),
        ("aux_norm.weight", torch.ones(64), "unknown.*aux_norm.weight"),
        ("fc_norm.0.weight", torch.ones(64), "unknown.*fc_norm.0.weight"),
        ("fc.bias", torch.ones(64), "unknown.*fc.bias"),
        ("norm.weight", torch.ones(63), r"norm.weight is \[63\] instead of \[64\]"),
    ]:
        changed = dict(tensors)
        changed.pop(name, None)
        if change is not None:
            changed[name] = change
        with pytest.raises(ValueError, match=message):
            DSparkForCausalLM.from_pretrained(write_draft(tmp_path, config, changed))


def test_rotary_frequencies_of_old_exports_are_left_out(tmp_path):
    config, tensors = draft()
    tensors |= {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), "rotary_emb.inv_freq": torch.ones(8)}
    checkpoint = open_checkpoint(write_draft(tmp_path, config, tensors))
    assert not any("inv_freq" in name for name in checkpoint.renames)
    frequencies = DSparkForCausalLM.from_pretrained(tmp_path).rotary_emb.inv_freq
    assert frequencies[0] == 1 and frequencies[1] < 1  # computed, not the stored ones


def test_renamed_tensors_are_accounted_for_under_their_new_name(tmp_path):
    config = read(*draft())
    stored = {"old.weight": TensorInfo((2, 3), "F32", "")}
    checkpoint = Checkpoint(tmp_path, config, {"old.weight": "new.weight"}, stored)
    check_tensors(checkpoint, {"new.weight": (2, 3)})
    with pytest.raises(ValueError, match=r"new.weight is \[2, 3\] instead of \[3, 2\]"):
        check_tensors(checkpoint, {"new.weight": (3, 2)})


# ---- what this version does not compute


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"layer_types": ["sliding_attention"]}, "layer_types.*sliding_attention"),
        ({"is_causal": 1}, "is_causal"),
        ({"dflash_config": {"causal": "no"}}, "causal"),
        ({"use_swa": True}, "use_swa"),
        ({"enable_moe_block": True}, "enable_moe_block"),
        ({"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input"),
        ({"hidden_act": "swish2"}, "swish2"),
        ({"model_type": "llama"}, "llama"),
        ({"model_type": "gemma4_text"}, "gemma4_text.*qwen3-style"),
        ({"architectures": ["Gemma4DSparkModel"]}, "Gemma4DSparkModel.*qwen3-style"),
        ({"dtype": "float8"}, "float8"),
        ({"confidence_temperatures": [1.0, 2.0]}, "confidence_temperatures.*4"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"target_layer_ids": [0, 0, 2]}, "target_layer_ids"),
        ({"block_size": True}, "block_size.*integer >= 1, got True"),
        ({"block_size": 7.0}, "block_size.*7.0"),
        ({"head_dim": "16"}, "head_dim.*'16'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ],
)
def test_unsupported_and_malformed_keys_are_named(keys, message):
    config, tensors = draft()
    with pytest.raises(ValueError, match=message):
        read(config | keys, tensors)


def test_sliding_window_without_layer_types_is_refused():
    config, tensors = draft()
    config = without(config, "layer_types") | {"use_sliding_window": True, "sliding_window": 16}
    with pytest.raises(ValueError, match="use_sliding_window"):
        read(config, tensors)


def test_tied_head_without_its_tensor_is_refused():
    config, tensors = draft()
    del tensors["lm_head.weight"]
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        read(config | {"tie_word_embeddings": True}, tensors)
