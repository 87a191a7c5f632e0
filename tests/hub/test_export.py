"""Exported folders: the keys and names of what production engines read, the same proposals, the commands that serve."""

import json
import shlex

import pytest
import torch
from command import refused, run
from safetensors import safe_open

import tiny
from hf_dspark import DSparkForCausalLM, hub
from hf_dspark.hub.export import serving

# What a published DeepSpec folder of a Qwen3-style draft holds.
DEEPSPEC_KEYS = {
    "architectures", "model_type", "num_hidden_layers", "num_target_layers", "block_size", "target_layer_ids",
    "mask_token_id", "tie_word_embeddings", "layer_types", "markov_rank", "markov_head_type", "enable_confidence_head",
    "confidence_head_with_markov", "head_dim", "hidden_size", "vocab_size", "rope_parameters", "rms_norm_eps",
}  # fmt: skip
# And a folder of speculators, of which vLLM reads the same tensors.
SPECULATORS_KEYS = {
    "speculators_model_type", "speculators_version", "architectures", "transformer_layer_config", "draft_vocab_size",
    "block_size", "target_hidden_size", "aux_hidden_state_layer_ids", "mask_token_id", "sliding_window_non_causal",
    "sample_from_anchor", "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov",
    "speculators_config",
}  # fmt: skip
LAYER = (
    "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
    "self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
TENSORS = {
    "embed_tokens.weight", "lm_head.weight", "fc.weight", "hidden_norm.weight", "norm.weight",
    "markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "confidence_head.proj.weight",
    "confidence_head.proj.bias", *(f"layers.0.{name}.weight" for name in LAYER),
}  # fmt: skip


def slim(**settings):
    """A draft that shares embeddings and head with T-rand."""
    config = tiny.draft_config(**settings)
    tensors = tiny.draft_tensors(config)
    del tensors["embed_tokens.weight"], tensors["lm_head.weight"]
    return tiny.load_draft(config, tensors).attach_target(tiny.random_target())


def reduced_draft():
    """A random draft that can propose 24 of the 64 tokens."""
    shape = slim().config
    fields = {name: getattr(shape, name) for name in type(shape).__annotations__}
    fields |= {"draft_vocab_size": 24, "has_lm_head": True, "source_format": "dspark", "foreign": None}
    draft = DSparkForCausalLM(type(shape)(**fields)).eval()
    draft.d2t.copy_(torch.arange(5, 53, 2) - torch.arange(24))
    return draft.attach_target(tiny.random_target())


def names(folder):
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return set(file.keys())


def same_proposals(one, other):
    features = torch.randn(2, 5, 3 * 64, generator=torch.Generator().manual_seed(0))
    a, b = (draft.propose(torch.tensor([3, 40]), features) for draft in (one, other))
    assert torch.equal(a.tokens, b.tokens) and torch.equal(a.logits, b.logits)
    assert (a.survival is None) == (b.survival is None)
    assert a.survival is None or torch.equal(a.survival, b.survival)


def test_deepspec_has_the_published_keys_and_names(tmp_path):
    draft = slim()
    exported = hub.export(draft, tmp_path / "out", format="deepspec", target="org/target")
    config = json.loads((exported.folder / "config.json").read_text())
    assert config.keys() >= DEEPSPEC_KEYS and names(exported.folder) == TENSORS
    assert config["architectures"] == ["Qwen3DSparkModel"] and config["model_type"] == "qwen3"
    assert (config["block_size"], config["target_layer_ids"], config["mask_token_id"]) == (4, [0, 2, 4], 63)
    assert config["tie_word_embeddings"] is False and config["layer_types"] == ["full_attention"]
    assert not config.keys() & {"auto_map", "sample_from_anchor", "dflash_config", "speculators_model_type"}
    same_proposals(DSparkForCausalLM.from_pretrained(exported.folder), draft)


def test_speculators_has_the_published_keys_and_names(tmp_path):
    draft = slim()
    exported = hub.export(draft, tmp_path / "out", format="speculators", target="org/target")
    config = json.loads((exported.folder / "config.json").read_text())
    assert config.keys() >= SPECULATORS_KEYS and names(exported.folder) == TENSORS
    assert (config["speculators_model_type"], config["architectures"]) == ("dspark", ["DSparkDraftModel"])
    assert config["aux_hidden_state_layer_ids"] == [1, 3, 5]  # counts inputs of layers, where DeepSpec counts outputs
    assert config["sample_from_anchor"] is True and config["draft_vocab_size"] == 64
    speculators = config["speculators_config"]
    assert speculators["verifier"]["name_or_path"] == "org/target" and speculators["algorithm"] == "dspark"
    assert speculators["proposal_methods"] == [{"proposal_type": "greedy", "speculative_tokens": 4}]
    assert config["transformer_layer_config"]["hidden_size"] == 64 and not config.keys() & {"model_type", "auto_map"}
    assert exported.commands.keys() == {"vLLM"}
    same_proposals(DSparkForCausalLM.from_pretrained(exported.folder), draft)


@pytest.mark.parametrize("format", ["deepspec", "speculators"])
def test_there_and_back(format, tmp_path):
    """From one form to the other and home again: the same proposals, the same tensors, the same draft of the config."""
    draft = slim()
    there = hub.export(draft, tmp_path / "there", format=format, target="t").folder
    again = DSparkForCausalLM.from_pretrained(there)
    other = {"deepspec": "speculators", "speculators": "deepspec"}[format]
    back = DSparkForCausalLM.from_pretrained(hub.export(again, tmp_path / "back", format=other, target="t").folder)
    assert {again.config.source_format, back.config.source_format} == {"deepspec", "speculators"}
    same_proposals(back, draft)
    assert back.config.target_layer_ids == again.config.target_layer_ids == draft.config.target_layer_ids


def test_a_reduced_vocabulary_goes_to_vllm_in_speculators_form(tmp_path):
    draft = reduced_draft()
    with pytest.raises(ValueError, match="reduced vocabulary"):
        hub.export(draft, tmp_path / "no", format="deepspec", target="t")
    exported = hub.export(draft, tmp_path / "out", format="speculators", target="t")
    assert {"d2t", "t2d", "lm_head.weight", "embed_tokens.weight"} <= names(exported.folder)
    same_proposals(DSparkForCausalLM.from_pretrained(exported.folder), draft)


def test_without_shared_tensors_the_target_is_still_needed(tmp_path):
    draft = slim()
    exported = hub.export(draft, tmp_path / "out", format="deepspec", target="t", include_shared=False)
    assert names(exported.folder) == TENSORS - {"embed_tokens.weight", "lm_head.weight"}
    loaded = DSparkForCausalLM.from_pretrained(exported.folder)
    with pytest.raises(ValueError, match="attach_target"):
        loaded.vocabulary  # noqa: B018
    same_proposals(loaded.attach_target(tiny.random_target()), draft)


@pytest.mark.parametrize("settings", [{"head": "gated"}, {"head": "rnn"}, {"rank": 0, "confidence": None}])
def test_other_heads_come_back_too(settings, tmp_path):
    draft = slim(**settings)
    exported = hub.export(draft, tmp_path / "out", format="deepspec", target="t")
    same_proposals(DSparkForCausalLM.from_pretrained(exported.folder), draft)


def test_commands_name_the_pair_and_the_number_of_drafts():
    commands, refusals = serving(slim().config, "deepspec", "my folder", "org/target")
    assert not refusals
    words = shlex.split(commands["vLLM"])
    assert words[:4] == ["vllm", "serve", "org/target", "--speculative-config"]
    assert json.loads(words[4]) == {"method": "dspark", "model": "my folder", "num_speculative_tokens": 4}
    words = shlex.split(commands["SGLang"])
    options = dict(zip(words[3::2], words[4::2], strict=True))
    assert options == {
        "--model-path": "org/target", "--speculative-algorithm": "DSPARK", "--speculative-dspark-block-size": "4",
        "--speculative-draft-model-path": "my folder",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "format", "served"),
    [
        ({}, "speculators", {"vLLM"}),
        ({"head": "rnn"}, "deepspec", {"SGLang"}),
        ({"head": "gated"}, "speculators", set()),
        ({"rank": 0, "confidence": None}, "deepspec", set()),
        ({"sample_from_anchor": False}, "deepspec", {"vLLM"}),
    ],
)
def test_engines_that_would_misread_a_draft_get_no_command(settings, format, served):
    commands, refusals = serving(slim(**settings).config, format, "f", "t")
    assert commands.keys() == served and refusals.keys() == {"vLLM", "SGLang"} - served


def test_mistakes_are_named(tmp_path):
    with pytest.raises(ValueError, match="must be one of deepspec, speculators, got 'gguf'"):
        hub.export(slim(), tmp_path / "out", format="gguf", target="t")
    with pytest.raises(ValueError, match="exists: give a new folder"):
        hub.export(slim(), tmp_path, format="deepspec", target="t")


def test_the_draft_stays_as_it_is(tmp_path):
    """The target is named in the export alone, also when that fails."""
    draft = slim()
    draft.config.target_name_or_path = "org/mine"
    hub.export(draft, tmp_path / "out", format="speculators", target="org/other")
    assert draft.config.target_name_or_path == "org/mine"
    draft.config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match="capped logits"):
        hub.export(draft, tmp_path / "again", format="speculators", target="org/other")
    assert draft.config.target_name_or_path == "org/mine"


@pytest.fixture
def pair(tmp_path):
    tiny.random_target().save_pretrained(tmp_path / "target")
    slim().save_pretrained(tmp_path / "draft")
    return ["--target", str(tmp_path / "target"), "--draft", str(tmp_path / "draft")]


def test_command(pair, tmp_path, capsys):
    output, path = tmp_path / "out", tmp_path / "x.json"
    code, out, err = run(["export", *pair, "--output", str(output), "--json", str(path)], capsys)
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0] == "vLLM:" and lines[1].startswith(f"  vllm serve {pair[1]} --speculative-config '{{")
    assert lines[2] == "SGLang:" and str(output) in lines[3]
    same_proposals(DSparkForCausalLM.from_pretrained(output), slim())
    result = json.loads(path.read_text())
    assert result["commands"]["vLLM"] in out and result["folder"] == str(output) and result["refusals"] == {}
    assert "exists: give a new folder" in refused(["export", *pair, "--output", str(output)], capsys)
