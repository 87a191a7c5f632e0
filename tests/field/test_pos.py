"""POS: positions and rotary embedding of the draft (also VLM-2 and CONTEXT-2)."""

import pytest
import torch
from transformers.utils import logging

import checks
import oracle
import tiny

PROMPT = [5, 9, 11, 3, 8, 2, 30]
ROPES = {
    "nested": ({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, 500.0),
    "top level": ({"rope_parameters": None, "rope_theta": 500.0}, 500.0),
    "both, equal": ({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "rope_theta": 500.0}, 500.0),
}


def pair(drop=(), theta=None, **settings):
    config = tiny.draft_config(**settings)
    tensors = tiny.draft_tensors(config)
    for name in drop:
        config.pop(name)
    config = {name: value for name, value in config.items() if value is not None or name != "rope_parameters"}
    reference = config | {"rope_parameters": {"rope_theta": theta}} if theta else config
    return config, tensors, oracle.Oracle(reference, tensors)


def same_proposals(draft, slow, context=9):
    features = torch.randn(1, context, 192)
    block, expected = draft.propose(torch.tensor([9]), features), slow.propose(9, features[0])
    torch.testing.assert_close(block.hidden_states[0], expected.hidden, atol=3e-4, rtol=3e-4)


@pytest.mark.parametrize("name", ROPES)
def test_pos_2_rope_theta_is_found_wherever_it_sits(name):
    settings, theta = ROPES[name]
    config, tensors, slow = pair(theta=theta, **settings)
    same_proposals(tiny.load_draft(config, tensors), slow)


def test_pos_2_conflicting_thetas_are_reported():
    config, tensors, _ = pair(rope_parameters={"rope_type": "default", "rope_theta": 500.0}, rope_theta=900.0)
    try:
        draft = tiny.load_draft(config, tensors)
    except ValueError as error:
        assert "500" in str(error) and "900" in str(error)
    else:
        assert any("500" in str(why) and "900" in str(why) for why in draft.config.resolution.values())


def test_pos_2_missing_theta_is_a_stated_default(caplog):
    config, tensors, slow = pair(drop=["rope_parameters"], theta=10000.0)
    logging.enable_propagation()
    try:
        draft = tiny.load_draft(config, tensors)
    finally:
        logging.disable_propagation()
    assert any("rope_theta" in r.getMessage() and "10000" in r.getMessage() for r in caplog.records)
    assert "10000" in draft.config.resolution["rope_theta"]
    same_proposals(draft, slow)


@pytest.mark.parametrize("key", ["rope_is_neox_style", "is_neox_style"])
def test_pos_2_interleaved_pairs_are_read_as_the_file_says(key):
    """Neighbouring channels rotate together; read as halves the same weights would propose something else."""
    config, tensors, slow = pair(**{key: False})
    draft = tiny.load_draft(config, tensors)
    assert draft.config.rope_interleaved
    with pytest.raises(AssertionError):
        same_proposals(draft, slow)


LEAKED = {
    "vision": {"vision_config": {"hidden_size": 8}, "image_token_id": 3},
    "experts": {"num_experts": 8, "num_experts_per_tok": 2},
    "quantization": {"quantization_config": None},
    "sliding window off": {"sliding_window": 8, "use_sliding_window": False},
}  # fmt: skip


@pytest.mark.parametrize("name", LEAKED)
def test_pos_4_keys_of_the_target_are_ignored(name):
    config, tensors, slow = pair(**LEAKED[name])
    same_proposals(tiny.load_draft(config, tensors), slow)


DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
ROTARY = {
    "partial at top level": {"partial_rotary_factor": 0.25},
    "partial nested": {"rope_parameters": DEFAULT | {"partial_rotary_factor": 0.25}},
    "sections": {"rope_parameters": DEFAULT | {"mrope_section": [2, 3, 3]}},
}  # fmt: skip


@pytest.mark.parametrize("name", ROTARY)
def test_pos_4_rotary_keys_never_change_the_maths_in_silence(name):
    """A draft turns all of its 1-D frequencies. A key that says otherwise is named in an error or in `resolution`."""
    config, tensors, slow = pair(theta=10000.0, **ROTARY[name])
    key = "mrope_section" if name == "sections" else "partial_rotary_factor"
    try:
        draft = tiny.load_draft(config, tensors)
    except ValueError as error:
        assert key in str(error)
        return
    same_proposals(draft, slow)


def guided(text, **settings):
    config, tensors = tiny.guided_files(tiny.text_table(text), **settings)
    return tiny.load_draft(config, tensors), oracle.Oracle(config, tensors)


def test_vlm_2_explicit_position_ids_with_a_jump():
    """The target's own positions may jump; the draft counts the row's real tokens, and acceptance does not suffer."""
    target = tiny.random_target()
    positions = torch.tensor([[0, 1, 2, 40, 41, 42, 43]])
    text = checks.plain(target, PROMPT, position_ids=positions)[0].tolist()
    assert text != checks.plain(target, PROMPT)[0].tolist(), "the jump must matter to the target"
    draft, slow = guided(text)
    _, stats = checks.equal_to_plain(target, draft, PROMPT, position_ids=positions)
    assert stats.rounds[0].position == len(PROMPT)
    whole = torch.cat((positions, torch.arange(44, 44 + len(text) - 7)[None]), dim=-1)
    checks.rounds_match(stats, slow, target, text, position_ids=whole)
    output, fast = checks.generate(target, draft, PROMPT, position_ids=positions, cache_implementation="static")
    assert output[0].tolist() == text and fast.path == "plain" and "position" in fast.reason
    assert [r.accepted for r in fast.rounds] == [r.accepted for r in stats.rounds]
    permuting = tiny.perm_target()
    counts = [
        checks.equal_to_plain(permuting, tiny.perm_draft(), PROMPT, **options)[1].num_accepted
        for options in ({}, {"position_ids": positions})
    ]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("padding", [1, 5])
def test_left_padding_shifts_no_position(padding):
    target = tiny.random_target()
    text = checks.plain(target, PROMPT)[0].tolist()
    draft, slow = guided(text)
    ids = checks.tensor([1] * padding + PROMPT)
    mask = torch.tensor([[0] * padding + [1] * 7])
    _, stats = checks.equal_to_plain(target, draft, ids, attention_mask=mask)
    assert [r.position for r in stats.rounds][0] == 7
    checks.rounds_match(stats, slow, target, text)


def test_context_2_positions_far_out():
    """Features and rotary phases at position 5000 are those computed from scratch."""
    config, tensors, slow = pair(max_position_embeddings=8192)
    draft = tiny.load_draft(config, tensors)
    features = torch.randn(1, 5000, 192)
    block, expected = draft.propose(torch.tensor([9]), features), slow.propose(9, features[0])
    torch.testing.assert_close(block.hidden_states[0], expected.hidden, atol=1e-3, rtol=1e-3)
