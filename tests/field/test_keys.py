"""KEYS: the same key in another place, under another name, missing, or saying two things."""

import copy

import pytest
import torch
from family_files import SHARED, torchspec_files, without, zlab_files
from torch import nn

import checks
import tiny
from hf_dspark import DSparkForCausalLM

PROMPT = [7, 21, 40]
DRAFT_KEYS = ("mask_token_id", "target_layer_ids", "block_size", "markov_rank", "markov_head_type")


def guided(**settings):
    return tiny.guided_files(tiny.one_hot_table(tiny.NEXT, 40.0), **settings)


def slim_files():
    config, tensors = guided()
    return config, without(tensors, *SHARED)


@pytest.mark.parametrize("nest", ["dflash_config", "text_config"])
@pytest.mark.parametrize("moved", [(name,) for name in DRAFT_KEYS] + [DRAFT_KEYS])
def test_keys_1_same_draft_wherever_a_key_stands(moved, nest):
    config, tensors = guided()
    nested = without(config, *moved) | {nest: {name: config[name] for name in moved}}
    anchors, features = torch.tensor([9]), torch.randn(1, 5, 192)
    blocks = [tiny.load_draft(raw, tensors).propose(anchors, features) for raw in (config, nested)]
    assert torch.equal(blocks[0].logits, blocks[1].logits)


@pytest.mark.parametrize("name", ["mask_token_id", "target_layer_ids", "block_size"])
@pytest.mark.parametrize("nest", [None, "dflash_config", "text_config"])
def test_keys_1_a_missing_key_names_the_places_and_can_be_given(name, nest, tmp_path):
    config, tensors = guided()
    raw = without(config, name) | ({} if nest is None else {nest: {"other": 1}})
    folder = tiny.write_draft(tmp_path, raw, tensors)
    with pytest.raises(ValueError, match=f"{name}, dflash_config.{name}, text_config.{name}.*{name}=.*from_pretrained"):
        DSparkForCausalLM.from_pretrained(folder)
    draft = DSparkForCausalLM.from_pretrained(folder, **{name: config[name]})
    assert "set by the caller" in draft.config.resolution[name]
    checks.equal_to_plain(tiny.perm_target(), draft, PROMPT)


@pytest.mark.parametrize("nest", ["dflash_config", "text_config"])
def test_keys_1_several_missing_keys(nest, tmp_path):
    """One after the other is asked for, until the file with what the caller gave is complete."""
    config, tensors = guided()
    names = ("target_layer_ids", "mask_token_id", "block_size")
    folder = tiny.write_draft(tmp_path, without(config, *names) | {nest: {"other": 1}}, tensors)
    given: dict = {}
    for name in names:
        with pytest.raises(ValueError, match=f"searched: {name}, dflash_config.{name}, text_config.{name}"):
            DSparkForCausalLM.from_pretrained(folder, **given)
        given[name] = config[name]
    checks.equal_to_plain(tiny.perm_target(), DSparkForCausalLM.from_pretrained(folder, **given), PROMPT)


def test_keys_1_both_generations_of_z_lab_files():
    config, tensors = tiny.slot0_files(gamma=5)
    drafts = [tiny.load_draft(*zlab_files(config, tensors, nested_block_size=nested)) for nested in (False, True)]
    assert [draft.config.num_draft_tokens for draft in drafts] == [4, 4]


def test_keys_3_mask_row():
    """An id behind the tokenizer's length is normal; an id behind the embedding's rows is refused with both numbers."""
    draft = tiny.random_draft(mask=60)
    assert len(tiny.tokenizer()) > 60
    checks.equal_to_plain(tiny.random_target(), draft, PROMPT)
    with pytest.raises(ValueError, match="64"):
        tiny.random_draft(mask=64)
    target = copy.deepcopy(tiny.random_target())
    target.resize_token_embeddings(40)
    shared = tiny.load_draft(*slim_files())
    checks.refused(target, shared, PROMPT, 40)
    checks.refused(target, draft, PROMPT, 64, 40)


def test_keys_3_shared_embedding_smaller_than_the_logits_say():
    """Only the embedding was cut: the mask row is looked for in the rows that are really used."""
    target = copy.deepcopy(tiny.random_target())
    target.set_input_embeddings(nn.Embedding(63, 64))
    checks.refused(target, tiny.load_draft(*slim_files()), PROMPT, 63)


SPELLINGS = {
    "query_zero_predicts_next": ({"query_zero_predicts_next": False}, "layout", 3),
    "shift_label": ({"shift_label": False}, "layout", 3),
    "use_confidence_head": ({"enable_confidence_head": None, "use_confidence_head": True}, None, 4),
    "runtime_block_size": ({"runtime_block_size": 2}, "runtime_block_size", 4),
    "classical": ({"markov_head_type": "classical"}, "markov_head_type", 4),
    "torch_dtype": ({"dtype": None, "torch_dtype": "float32"}, None, 4),
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
def test_keys_5_spellings_of_vendors(name):
    keys, noted, gamma = SPELLINGS[name]
    config, tensors = guided()
    raw = {key: value for key, value in (config | keys).items() if value is not None}
    draft = tiny.load_draft(raw, tensors)
    assert draft.config.num_draft_tokens == gamma and draft.confidence_head is not None
    assert noted is None or name in f"{noted}: {draft.config.resolution[noted]}"
    checks.equal_to_plain(tiny.perm_target(), draft, PROMPT)


def test_keys_5_contradictions_are_decided_in_order_and_kept():
    config, tensors = guided()
    draft = tiny.load_draft(config | {"sample_from_anchor": True, "shift_label": False}, tensors)
    said = draft.config.resolution["layout"]
    assert draft.config.num_draft_tokens == 4 and "sample_from_anchor: true" in said and "shift_label: false" in said
    draft = tiny.load_draft(config | {"shift_label": False}, tensors, sample_from_anchor=True)
    assert draft.config.num_draft_tokens == 4 and "caller" in draft.config.resolution["layout"]


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_keys_5_other_markov_heads_work_and_unknown_ones_are_refused(kind):
    config, tensors = guided(head=kind)
    checks.equal_to_plain(tiny.perm_target(), tiny.load_draft(config, tensors), PROMPT)
    with pytest.raises(ValueError, match="`markov_head_type` 'transformer' is unknown"):
        tiny.load_draft(config | {"markov_head_type": "transformer"}, tensors)


def test_keys_5_the_number_of_taps_is_not_the_targets_depth():
    config, tensors = guided()
    draft = tiny.load_draft(*torchspec_files(config, tensors), block_size=4)
    assert draft.config.num_target_layers == 6 and len(draft.config.target_layer_ids) == 3
    checks.equal_to_plain(tiny.perm_target(), draft, PROMPT)
