"""Saving in DeepSpec's form: round trips keep every key, changes reach the file, nothing is lost."""

import json

import pytest
import torch
from safetensors.torch import load_file

from deepspec_files import draft, gemma4_files, read, without
from hf_dspark import DSparkConfig, DSparkForCausalLM
from hf_dspark.formats import foreign_config
from tiny import write_draft

DRAFTS = {
    "vanilla": {},
    "gated": {"head": "gated"},
    "rnn": {"head": "rnn"},
    "hidden": {"confidence": "hidden"},
    "dflash": {"rank": 0, "confidence": None},
}


@pytest.mark.parametrize("name", ["vanilla", "gated", "rnn", "dflash", "conf_hidden", "conf_only", "gemma4"])
def test_reference_drafts_come_back_byte_for_byte(shared_folder, tmp_path, name):
    folder = shared_folder / "reference" / "drafts" / name
    DSparkForCausalLM.from_pretrained(folder).save_pretrained(tmp_path)
    assert (tmp_path / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path))
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"unknown_key": {"a": [1, None]}, "transformers_version": "4.57.1"},
        {"architectures": ["DSparkDraftModel"]},
        {"markov_head_type": "classical", "tie_word_embeddings": True},
        {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": None, "partial_rotary_factor": 0.5},
        {"sample_from_anchor": False},
        {"query_zero_predicts_next": True},
        {"confidence_temperatures": [1.0, 1.5, 2.0, 1.0]},
        {"confidence_head_with_markov": None, "markov_rank": None, "num_target_layers": None},
        {"dtype": None, "torch_dtype": "float32"},
        {"dtype": None},
        {"max_position_embeddings": None, "rms_norm_eps": None, "attention_bias": None, "hidden_act": None},
    ],
    ids=lambda keys: next(iter(keys), "plain"),
)
def test_the_files_own_keys_come_back(tmp_path, keys):
    """A null stands for a key that the file lacks."""
    config, tensors = draft()
    config = {key: value for key, value in (config | keys).items() if value is not None}
    first, second = tmp_path / "first", tmp_path / "second"
    DSparkForCausalLM.from_pretrained(write_draft(tmp_path / "original", config, tensors)).save_pretrained(first)
    assert json.loads((first / "config.json").read_text()) == config
    DSparkForCausalLM.from_pretrained(first).save_pretrained(second)
    assert (second / "config.json").read_bytes() == (first / "config.json").read_bytes()


def test_nested_keys_come_back_and_are_updated_where_they_stood():
    config, tensors = draft(confidence=None)
    nested = without(config, "block_size") | {"dflash_config": {"block_size": 4, "other": 1}}
    loaded = read(nested, tensors)
    assert foreign_config(loaded) == nested
    loaded.block_size = 3
    written = foreign_config(loaded)
    assert read(written, tensors).block_size == 3 and written["dflash_config"] == {"other": 1}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("confidence_temperatures", [1.0, 2.0, 3.0, 4.0]),
        ("mask_token_id", 3),
        ("sample_from_anchor", False),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 77.0}),
        ("target_layer_ids", [1, 3, 5]),
        ("rms_norm_eps", 1e-5),
        ("num_target_layers", 9),
    ],
)
@pytest.mark.parametrize(
    "keys", [{}, {"rope_parameters": None, "rope_theta": 5e5}, {"query_zero_predicts_next": True}], ids=str
)
def test_a_change_reaches_the_file_and_nothing_else_moves(field, value, keys):
    config, tensors = draft()
    config = {key: kept for key, kept in (config | keys).items() if kept is not None}
    loaded = read(config, tensors)
    setattr(loaded, field, value)
    written = foreign_config(loaded)
    again = read(written, tensors)
    assert getattr(again, field) == value
    changed = {key for key in written.keys() | config.keys() if written.get(key) != config.get(key)}
    assert field in changed and changed <= {field, "rope_theta", "query_zero_predicts_next"}


def test_temperatures_can_be_taken_away_again():
    config, tensors = draft(confidence_temperatures=[1.0, 2.0, 3.0, 4.0])
    loaded = read(config, tensors)
    loaded.confidence_temperatures = None
    assert foreign_config(loaded) == without(config, "confidence_temperatures")


def test_changed_sizes_and_heads_are_written():
    loaded = read(*draft(gamma=4))
    loaded.num_hidden_layers, loaded.markov_rank = 2, 16
    written = foreign_config(loaded)
    again = read(written)  # tensors made after the written config
    assert (again.num_hidden_layers, again.markov_rank) == (2, 16) and written["num_anchors"] == 4
    loaded.enable_confidence_head = loaded.confidence_head_with_markov = False
    assert not read(foreign_config(loaded)).enable_confidence_head


def test_the_callers_layout_survives_saving(tmp_path):
    folder = write_draft(tmp_path / "a", *draft(gamma=4))
    DSparkForCausalLM.from_pretrained(folder, sample_from_anchor=False).save_pretrained(tmp_path / "b")
    assert json.loads((tmp_path / "b" / "config.json").read_text())["sample_from_anchor"] is False
    assert DSparkForCausalLM.from_pretrained(tmp_path / "b").config.num_draft_tokens == 3


def test_a_draft_loaded_in_another_dtype_says_so(tmp_path):
    folder = write_draft(tmp_path / "a", *draft())
    DSparkForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(tmp_path / "b")
    assert json.loads((tmp_path / "b" / "config.json").read_text())["dtype"] == "bfloat16"
    assert DSparkForCausalLM.from_pretrained(tmp_path / "b").dtype == torch.bfloat16


# ---- drafts made from scratch


def scratch(**fields):
    sizes = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64,
        "num_key_value_heads": 1, "head_dim": 16, "target_hidden_size": 24, "target_layer_ids": [0, 2],
        "mask_token_id": 63, "markov_rank": 8, "has_embed_tokens": True, "has_lm_head": True,
    }  # fmt: skip
    return DSparkConfig(**(sizes | fields))


GEMMA4 = {
    "value_from_key": True, "value_norm": True, "sandwich_norms": True, "embedding_scale": 32**0.5,
    "attention_scale": 1.0, "final_logit_softcapping": 30.0, "hidden_act": "gelu_pytorch_tanh",
    "rope_parameters": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"markov_head_type": "gated", "confidence_head_bias": False},
        {"markov_head_type": "rnn", "enable_confidence_head": False, "confidence_head_with_markov": False},
        {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False},
        {"sample_from_anchor": False, "confidence_temperatures": [1.0, 1.0, 1.0, 1.0, 1.0, 2.0]},
        {"has_embed_tokens": False, "has_lm_head": False, "attention_bias": True, "eos_token_id": [1, 2]},
        GEMMA4,
        GEMMA4 | {"value_from_key": False, "num_key_value_heads": 2, "final_logit_softcapping": None},
    ],
    ids=["plain", "gated", "rnn", "dflash", "1+N", "shared", "gemma4", "gemma4-values"],
)
def test_a_draft_from_scratch_is_written_completely(tmp_path, fields):
    config = scratch(**fields)
    model = DSparkForCausalLM(config)
    model.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    gemma4 = "sandwich_norms" in fields
    assert raw["architectures"] == ["Gemma4DSparkModel" if gemma4 else "Qwen3DSparkModel"]
    assert raw["model_type"] == ("gemma4_text" if gemma4 else "qwen3")
    assert raw["tie_word_embeddings"] is False and raw["layer_types"] == ["full_attention"] * 2
    assert raw.get("sample_from_anchor", True) is config.sample_from_anchor
    again = DSparkForCausalLM.from_pretrained(tmp_path)
    unrelated = ("resolution", "foreign", "source_format", "dtype", "architectures", "_name_or_path")
    before, after = (without(x.to_dict(), *unrelated) for x in (config, again.config))
    assert before == after
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))
    again.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "config.json").read_bytes() == (tmp_path / "config.json").read_bytes()


@pytest.mark.parametrize(
    "fields",
    [{"value_norm": True}, {"attention_scale": 0.5}, {"final_logit_softcapping": 30.0}, {"embedding_scale": 2.0}],
)
def test_blocks_that_deepspec_cannot_spell_are_refused(fields):
    with pytest.raises(ValueError, match="neither|no word for"):
        foreign_config(scratch(**fields))


def test_forms_that_cannot_be_written():
    with pytest.raises(ValueError, match="gguf.*deepspec.*speculators"):
        foreign_config(scratch(), "gguf")


def test_explicit_deepspec_is_the_default_for_deepspec_and_scratch():
    for config in (read(*draft()), scratch(), read(*gemma4_files())):
        assert foreign_config(config, "deepspec") == foreign_config(config)


@pytest.mark.parametrize("kind", DRAFTS)
def test_written_configs_do_not_share_state_with_the_draft(kind):
    config = read(*draft(**DRAFTS[kind]))
    written = foreign_config(config)
    written["target_layer_ids"].append(99)
    written["rope_parameters"]["rope_theta"] = 1.0
    assert 99 not in config.target_layer_ids and 99 not in foreign_config(config)["target_layer_ids"]
    assert config.rope_parameters["rope_theta"] == 10000.0


# ---- the package's own config.json


def test_the_packages_own_config_is_read_too(tmp_path):
    model = DSparkForCausalLM(scratch())
    model.save_pretrained(tmp_path)
    model.config.save_pretrained(tmp_path)  # a user who saves the config alone
    again = DSparkForCausalLM.from_pretrained(tmp_path)
    assert again.config.markov_rank == 8
    assert DSparkForCausalLM.from_pretrained(tmp_path, sample_from_anchor=False).config.num_draft_tokens == 6
    raw = json.loads((tmp_path / "config.json").read_text())
    wrong = {
        "markov_rank": 4, "num_hidden_layers": 3, "num_key_value_heads": 0, "hidden_size": "x", "dtype": "float99",
        "rope_parameters": {"rope_type": "yarn"}, "hidden_act": "none",
    }  # fmt: skip
    for key, value in wrong.items():
        (tmp_path / "config.json").write_text(json.dumps(raw | {key: value}))
        with pytest.raises(ValueError):
            DSparkForCausalLM.from_pretrained(tmp_path)
