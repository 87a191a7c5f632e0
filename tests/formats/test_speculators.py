"""The speculators format: what is decided, what is refused, and drafts that propose what their DeepSpec twins do."""

import json
from functools import partial

import pytest
import torch
from family_files import SHARED, some_ids, speculators_files, without
from safetensors.torch import load_file

import checks
from deepspec_files import draft, info
from hf_dspark import DSparkForCausalLM
from hf_dspark.formats import foreign_config, open_checkpoint
from tiny import load_draft, random_target, write_draft

IDS = some_ids()


def open_files(folder, files, **kwargs):
    return open_checkpoint(write_draft(folder, *files), **kwargs).config


same_proposals = partial(checks.same_proposals, num_tokens=6)


# ---- full vocabulary


@pytest.mark.parametrize("kind", [{}, {"head": "gated"}, {"head": "rnn"}, {"rank": 0, "confidence": None}], ids=str)
@pytest.mark.parametrize("anchor_first", [True, False])
def test_full_vocabulary_proposes_what_the_deepspec_form_does(kind, anchor_first):
    config, tensors = draft(layers=2, **kind)
    found = load_draft(*speculators_files(config, tensors, sample_from_anchor=anchor_first))
    assert found.config.source_format == "speculators"
    same_proposals(found, load_draft(config, tensors, sample_from_anchor=anchor_first))


def test_slim_files_share_the_targets_modules():
    config, tensors = draft(layers=2)
    target = random_target()
    found = load_draft(*speculators_files(config, without(tensors, *SHARED)))
    with pytest.raises(ValueError, match="attach_target"):
        found.propose(torch.tensor([5]), torch.randn(1, 3, 192))
    full = tensors | {
        "embed_tokens.weight": target.model.embed_tokens.weight.detach(),
        "lm_head.weight": target.lm_head.weight.detach(),
    }
    same_proposals(found.attach_target(target), load_draft(config, full))


@pytest.mark.parametrize(
    ("keys", "override", "anchor_first", "reason"),
    [
        ({"sample_from_anchor": True}, None, True, "sample_from_anchor: true"),
        ({"sample_from_anchor": False}, None, False, "sample_from_anchor: false"),
        ({"sample_from_anchor": None}, None, True, "speculative_tokens"),
        ({"sample_from_anchor": None, "speculators_config": None}, None, False, "without `sample_from_anchor`"),
        ({"sample_from_anchor": None, "shift_label": False}, None, False, "shift_label: false"),
        ({"sample_from_anchor": True, "shift_label": False}, None, True, "sample_from_anchor: true"),
        ({"sample_from_anchor": False}, True, True, "caller"),
    ],
    ids=str,
)
def test_layout_caller_then_keys_then_tokens_then_family(tmp_path, keys, override, anchor_first, reason):
    files = speculators_files(*draft(gamma=5), **keys)
    config = open_files(tmp_path, files, sample_from_anchor=override)
    assert config.sample_from_anchor is anchor_first and config.num_draft_tokens == (5 if anchor_first else 4)
    assert reason in config.resolution["layout"]


def test_fewer_tokens_than_slots_are_no_witness_against_the_family(tmp_path):
    config, tensors = speculators_files(*draft(gamma=5), sample_from_anchor=None)
    config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = 4
    assert open_files(tmp_path, (config, tensors)).num_draft_tokens == 4


def test_taps_are_inputs_of_layers(tmp_path):
    files = speculators_files(*draft(taps=(0, 2, 4)), aux_hidden_state_layer_ids=[0, 3, 6])
    config = open_files(tmp_path, files)
    assert config.target_layer_ids == [-1, 2, 5] and "[0, 3, 6]" in config.resolution["taps"]
    with pytest.raises(ValueError, match=r"`aux_hidden_state_layer_ids` \[-1, 3, 6\]"):
        open_files(tmp_path, speculators_files(*draft(), aux_hidden_state_layer_ids=[-1, 3, 6]))
    lacking = speculators_files(*draft(), aux_hidden_state_layer_ids=None)
    with pytest.raises(ValueError, match="aux_hidden_state_layer_ids.*target_layer_ids="):
        open_files(tmp_path, lacking)
    assert open_files(tmp_path, lacking, target_layer_ids=[1, 2, 3]).target_layer_ids == [1, 2, 3]


def test_keys_that_equal_transformers_defaults_may_be_left_out(tmp_path):
    config, tensors = speculators_files(*draft())
    config["transformer_layer_config"] = without(
        config["transformer_layer_config"], "hidden_act", "rms_norm_eps", "attention_bias", "layer_types", "model_type"
    )
    assert open_files(tmp_path, (config, tensors)).rms_norm_eps == 1e-6
    del config["transformer_layer_config"]["head_dim"]  # 128 by default, which the tensors deny
    with pytest.raises(ValueError, match=r"q_proj.weight is \[64, 64\].*\[512, 64\]"):
        open_files(tmp_path, (config, tensors))


def test_tensors_of_the_trainer_are_left_out(tmp_path):
    files = speculators_files(*draft())
    trainer = {"verifier_norm.weight": torch.ones(64), "verifier_lm_head.weight": torch.ones(64, 64)}
    checkpoint = open_checkpoint(write_draft(tmp_path, files[0], files[1] | trainer))
    assert not any("verifier" in name for name in checkpoint.renames)
    assert checkpoint.config.target_name_or_path == "some/target"


# ---- windows


@pytest.mark.parametrize("non_causal", [None, False, True])
def test_sliding_layers_count_from_the_anchor(tmp_path, non_causal):
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "use_sliding_window": True}
    files = speculators_files(*draft(layers=2), layers=layers, sliding_window_non_causal=non_causal)
    config = open_files(tmp_path, files)
    assert config.sliding_window == 5 and config.window_from_anchor
    assert config.causal_layers == (None if non_causal else [True, False])
    assert "1 layers with a window of 5" in config.resolution["attention"]


# ---- reduced vocabulary


@pytest.mark.parametrize("kind", [{}, {"head": "gated"}, {"head": "rnn"}, {"rank": 0, "confidence": None}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reduced_vocabulary_is_the_whole_one_with_some_tokens_left_out(kind, dtype):
    config, tensors = draft(layers=2, **kind)
    reduced = load_draft(*speculators_files(config, tensors, IDS), dtype=dtype)
    whole = load_draft(config, tensors, dtype=dtype)
    assert reduced.d2t.dtype == torch.int64 and torch.equal(reduced.proposable_ids, IDS)
    anchors, features = torch.tensor([5, 41]), torch.randn(2, 6, 192)
    block, other = reduced.propose(anchors, features), whole.propose(anchors, features)
    assert torch.equal(block.hidden_states, other.hidden_states)
    torch.testing.assert_close(block.base_logits, other.base_logits[..., IDS])
    assert block.logits.shape == (2, 4, 64) and torch.isin(block.tokens, IDS).all()
    outside = torch.ones(64, dtype=torch.bool).index_fill(0, IDS, False)
    assert (block.logits[..., outside] == float("-inf")).all() and block.logits[..., IDS].isfinite().all()
    torch.testing.assert_close(block.logits[:, 0, IDS], other.logits[:, 0, IDS])
    if block.confidence_logits is not None:
        torch.testing.assert_close(block.confidence_logits[:, 0], other.confidence_logits[:, 0])


def test_d2t_that_is_missing_absolute_or_out_of_range(tmp_path):
    config, tensors = speculators_files(*draft(), IDS)
    rows = torch.arange(24)
    for d2t, t2d, message in [
        (None, None, "lacks the tensor d2t"),
        (IDS, None, "token ids.*offsets"),
        (rows * 0, tensors["t2d"], "different tokens"),
        (IDS - rows + 30, None, r"ascend and lie in 0\.\.63"),
        (rows.flip(0) * 2, None, "ascend"),
        (IDS[:20] - rows[:20], None, "20 entries.*24 rows"),
        ((IDS - rows).float(), None, "integers"),
    ]:
        files = without(tensors, "d2t", "t2d") | {
            name: value for name, value in (("d2t", d2t), ("t2d", t2d)) if value is not None
        }
        with pytest.raises(ValueError, match=message):
            open_files(tmp_path, (config, files))


def test_absolute_ids_that_would_pass_as_offsets_are_told_by_the_mask(tmp_path):
    ids = torch.arange(24) + 6
    config, tensors = speculators_files(*draft(), ids)
    with pytest.raises(ValueError, match="token ids.*offsets"):
        open_files(tmp_path, (config, tensors | {"d2t": ids}))


def test_a_table_of_zeros_is_said_aloud(tmp_path):
    config, tensors = speculators_files(*draft(), torch.arange(24))
    assert "all zeros" in open_files(tmp_path, (config, tensors)).resolution["d2t"]


def test_a_reduced_vocabulary_needs_its_own_head(tmp_path):
    config, tensors = speculators_files(*draft(), IDS)
    with pytest.raises(ValueError, match="`draft_vocab_size` is 24 of 64 tokens.*no lm_head"):
        open_files(tmp_path, (config, without(tensors, "lm_head.weight")))
    with pytest.raises(ValueError, match="`draft_vocab_size` is 30.*24 rows"):
        open_files(tmp_path, (config | {"draft_vocab_size": 30}, tensors))


def test_whole_vocabularies_may_carry_a_table_of_zeros(tmp_path):
    config, tensors = speculators_files(*draft())
    checkpoint = open_checkpoint(write_draft(tmp_path, config, tensors | {"d2t": torch.zeros(64, dtype=torch.long)}))
    assert checkpoint.config.draft_vocab_size is None and "d2t" not in checkpoint.renames
    wrong = tensors | {"d2t": torch.ones(64, dtype=torch.long)}
    with pytest.raises(ValueError, match="d2t"):
        open_files(tmp_path, (config, wrong))


# ---- writing


WRITTEN = {
    "whole": {}, "reduced": {"ids": IDS}, "1+N": {"sample_from_anchor": False},
    "no layout": {"sample_from_anchor": None},
    "other keys": {"max_anchors": 3072, "architectures": ["DSparkSpeculator"]},
    "sliding": {"layers": {"layer_types": ["sliding_attention"], "sliding_window": 8, "use_sliding_window": True}},
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_files_come_back_byte_for_byte(tmp_path, name):
    config, tensors = speculators_files(*draft(), **WRITTEN[name])
    folders = [tmp_path / str(i) for i in range(3)]
    write_draft(folders[0], config, tensors)
    for here, there in zip(folders, folders[1:], strict=False):
        DSparkForCausalLM.from_pretrained(here).save_pretrained(there)
    assert json.loads((folders[1] / "config.json").read_text()) == config
    assert (folders[1] / "config.json").read_bytes() == (folders[2] / "config.json").read_bytes()
    before, after = (load_file(path / "model.safetensors") for path in folders[:2])
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert (folders[1] / "model.safetensors").read_bytes() == (folders[2] / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "kind", [{}, {"head": "rnn"}, {"rank": 0, "confidence": None}, {"confidence": "hidden"}], ids=str
)
def test_deepspec_drafts_there_and_back(tmp_path, kind):
    config, tensors = draft(layers=2, **kind)
    first = load_draft(config, tensors)
    first.config.target_name_or_path = "some/target"
    first.save_pretrained(tmp_path / "a", format="speculators")
    raw = json.loads((tmp_path / "a" / "config.json").read_text())
    assert raw["aux_hidden_state_layer_ids"] == [1, 3, 5] and "model_type" not in raw
    assert raw["sample_from_anchor"] is True and raw["draft_vocab_size"] == 64
    assert raw["speculators_config"]["verifier"]["name_or_path"] == "some/target"
    assert raw["speculators_model_type"] == ("dspark" if config["markov_rank"] else "dflash")
    second = DSparkForCausalLM.from_pretrained(tmp_path / "a")
    same_proposals(first, second)
    second.save_pretrained(tmp_path / "b", format="deepspec")
    third = DSparkForCausalLM.from_pretrained(tmp_path / "b")
    assert third.config.source_format == "deepspec"
    same_proposals(first, third)
    second.save_pretrained(tmp_path / "c")
    assert (tmp_path / "c" / "config.json").read_bytes() == (tmp_path / "a" / "config.json").read_bytes()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("confidence_temperatures", [1.0, 2.0, 3.0, 4.0]),
        ("sample_from_anchor", False),
        ("mask_token_id", 3),
        ("target_layer_ids", [-1, 3, 5]),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 77.0}),
        ("target_name_or_path", "other/target"),
    ],
)
def test_a_change_reaches_the_file(tmp_path, field, value):
    model = load_draft(*speculators_files(*draft()))
    setattr(model.config, field, value)
    model.save_pretrained(tmp_path)
    assert getattr(open_checkpoint(tmp_path).config, field) == value


def test_what_the_form_cannot_say_is_refused():
    reduced = load_draft(*speculators_files(*draft(), IDS))
    with pytest.raises(ValueError, match="reduced vocabulary"):
        foreign_config(reduced.config, "deepspec")
    config, tensors = draft()
    interleaved = load_draft(config | {"rope_is_neox_style": False}, tensors).config
    assert foreign_config(interleaved)["rope_is_neox_style"] is False
    for form in ("speculators", "deepspec"):
        interleaved.source_format = "another"
        with pytest.raises(ValueError, match="interleaved"):
            foreign_config(interleaved, form)


def test_a_draft_from_scratch_with_a_reduced_vocabulary_becomes_speculators(tmp_path):
    source = load_draft(*speculators_files(*draft(), IDS)).config
    fields = {name: getattr(source, name) for name in type(source).__annotations__}
    fields |= {"source_format": "dspark", "foreign": None}
    model = DSparkForCausalLM(type(source)(**fields))
    model.d2t.copy_(IDS - torch.arange(24))
    model.save_pretrained(tmp_path)
    again = DSparkForCausalLM.from_pretrained(tmp_path)
    assert again.config.source_format == "speculators" and torch.equal(again.proposable_ids, IDS)


def test_nan_in_a_file_is_an_error(tmp_path):
    config, tensors = speculators_files(*draft())
    tensors["lm_head.weight"][3, 5] = float("nan")
    with pytest.raises(ValueError, match="NaN.*lm_head.weight"):
        DSparkForCausalLM.from_pretrained(write_draft(tmp_path, config, tensors))


def test_other_methods_of_the_format_are_refused_by_name(tmp_path):
    for kind in ("eagle3", "dflash2", "mlp"):
        files = speculators_files(*draft(), speculators_model_type=kind)
        with pytest.raises(ValueError, match=kind):
            open_files(tmp_path, files)
    domino = speculators_files(*draft(), projector_type="domino")
    with pytest.raises(ValueError, match="Domino"):
        open_files(tmp_path, domino)


def test_malformed_nests_are_named(tmp_path):
    for nest in ([], "qwen3", {"model_type": 3}, {"model_type": "no_such_model"}, {"hidden_size": "x"}, {"dtype": []}):
        config, tensors = speculators_files(*draft())
        config["transformer_layer_config"] = nest
        with pytest.raises(ValueError, match="transformer_layer_config|model_type"):
            open_files(tmp_path, (config, tensors))
    assert info({}) == {}
