"""LAYOUT: which slots of a block are read, and how a draft says so."""

import pytest
import torch
from family_files import speculators_files
from transformers.utils import logging

import checks
import oracle
import tiny

PROMPT = [7, 21, 40]


def slot_draft(**settings):
    """Draft whose slot s has hidden state e_s, prefers token 10 + s and has confidence logit s, whatever it reads."""
    config = tiny.draft_config(confidence="hidden", **{"rank": 0} | settings)
    tensors = tiny.draft_tensors(config)
    tensors["lm_head.weight"].zero_()
    for slot in range(8):
        tensors["lm_head.weight"][10 + slot, slot] = 5.0
    tensors["confidence_head.proj.weight"] = torch.arange(64.0)[None]
    tensors["confidence_head.proj.bias"] = torch.zeros(1)
    return config, tensors


def number_the_slots(draft, monkeypatch):
    """Replace the last layer's output by the slot's own direction; the final norm makes it 8 · e_s."""
    slots = torch.eye(64)[: draft.config.block_size]
    forward = lambda hidden, *args, **kwargs: slots.expand(hidden.shape[0], -1, -1)  # noqa: E731
    monkeypatch.setattr(draft.layers[-1], "forward", forward)
    draft.norm.weight.data.fill_(1 / 8)


@pytest.mark.parametrize("anchor_first", [None, True, False])
def test_layout_1_read_out_decides_acceptance_not_text(anchor_first):
    """A DeepSpec file is anchor-first; a caller may force either layout; the text is the same in all of them."""
    draft = tiny.slot0_draft(sample_from_anchor=anchor_first)
    expected = anchor_first is not False
    assert draft.config.sample_from_anchor is expected
    assert draft.config.num_draft_tokens == (4 if expected else 3)
    said = draft.config.resolution["layout"]
    assert said.startswith("anchor-first" if expected else "1+N") and ("caller" in said) == (anchor_first is False)
    new, stats = checks.equal_to_plain(tiny.perm_target(), draft, PROMPT, max_new_tokens=21)
    assert new == tiny.chain(40, 21)
    assert [r.accepted for r in stats.rounds] == [int(expected)] * (10 if expected else 20)
    _, fast, _ = checks.batch_equals_plain(
        tiny.perm_target(), draft, [PROMPT], max_new_tokens=21, cache_implementation="static"
    )
    assert [r.accepted for r in fast.rounds] == [r.accepted for r in stats.rounds]


@pytest.mark.parametrize("key,override,anchor_first", [
    (None, None, False), (None, True, True), (None, False, False), (True, None, True), (False, None, False),
])  # fmt: skip
def test_layout_1_an_assumed_layout_is_said_aloud(key, override, anchor_first, caplog):
    """speculators files without a word on the layout are read 1+N; the log says so, and how to read them otherwise."""
    files = speculators_files(*tiny.slot0_files(), sample_from_anchor=key, speculators_config=None)
    logging.enable_propagation()
    try:
        draft = tiny.load_draft(*files, sample_from_anchor=override)
    finally:
        logging.disable_propagation()
    assert draft.config.sample_from_anchor is anchor_first
    assumed = {r.getMessage() for r in caplog.records if "assumed" in r.getMessage()}
    assert len(assumed) == (key is None and override is None)
    assert all("1+N" in message and "sample_from_anchor=True" in message for message in assumed)
    _, stats = checks.equal_to_plain(tiny.perm_target(), draft, PROMPT, max_new_tokens=21)
    assert [r.accepted for r in stats.rounds] == [int(anchor_first)] * (10 if anchor_first else 20)


def test_layout_3_dflash_without_markov_head_is_anchor_first():
    """DeepSpec's DFlash files have the DSpark architecture name, rank 0, and none of the head keys."""
    config, tensors = tiny.slot0_files(gamma=7)
    for key in ("markov_head_type", "confidence_head_with_markov"):
        config.pop(key, None)
    draft = tiny.load_draft(config, tensors)
    assert draft.markov_head is None and draft.confidence_head is None
    _, stats = checks.equal_to_plain(tiny.perm_target(), draft, PROMPT, max_new_tokens=21)
    assert {r.accepted for r in stats.rounds} == {1}
    assert {len(r.draft_tokens) for r in stats.rounds} == {7}
    assert all(r.confidence is None and r.survival is None for r in stats.rounds)
    _, fast, _ = checks.batch_equals_plain(
        tiny.perm_target(), draft, [PROMPT], max_new_tokens=21, cache_implementation="static"
    )
    assert [r.accepted for r in fast.rounds] == [r.accepted for r in stats.rounds]
    assert {len(r.draft_tokens) for r in fast.rounds} == {7}


@pytest.mark.parametrize("rank", [0, 8])
@pytest.mark.parametrize("anchor_first", [True, False])
def test_layout_5_slot_k_is_scored_with_its_own_hidden_state(anchor_first, rank, monkeypatch):
    config, tensors = slot_draft(rank=rank)
    if rank:
        tensors["markov_head.markov_w2.weight"].zero_()
    draft = tiny.load_draft(config, tensors, sample_from_anchor=anchor_first)
    number_the_slots(draft, monkeypatch)
    read = [0, 1, 2, 3] if anchor_first else [1, 2, 3]
    block = draft.propose(torch.tensor([5, 6]), torch.randn(2, 3, 192))
    assert block.tokens.tolist() == [[10 + s for s in read]] * 2
    assert block.hidden_states.argmax(-1).tolist() == [read] * 2
    assert block.base_logits.argmax(-1).tolist() == [[10 + s for s in read]] * 2
    torch.testing.assert_close(block.confidence_logits, torch.tensor([read, read]).float(), atol=1e-3, rtol=0)
    assert block.tokens.shape == block.survival.shape == (2, len(read))
    _, stats = checks.generate(tiny.perm_target(), draft, PROMPT, max_new_tokens=8)
    assert all(r.draft_tokens == [10 + s for s in read] for r in stats.rounds)


def test_one_plus_n_markov_walk_starts_from_the_anchor():
    """In the 1+N layout the first draft still follows the anchor: x_1 from slot 1 with bias B(x_0)."""
    config = tiny.draft_config(gamma=5, rank=64, confidence=None)
    tensors = tiny.markov_tensors(config, tiny.one_hot_table(tiny.NEXT))
    draft = tiny.load_draft(config, tensors, sample_from_anchor=False)
    assert draft.propose(torch.tensor([9]), torch.zeros(1, 0, 192)).tokens[0].tolist() == tiny.chain(9, 4)
    _, stats = checks.equal_to_plain(tiny.perm_target(), draft, PROMPT, max_new_tokens=21)
    assert [r.accepted for r in stats.rounds] == [4] * 4


def test_one_plus_n_block_has_as_many_slots_as_the_file_says():
    """The slot that is not read is still attended to: hidden states equal those of the whole block."""
    config = tiny.draft_config(gamma=4, layers=2)
    tensors = tiny.draft_tensors(config)
    draft, slow = tiny.load_draft(config, tensors, sample_from_anchor=False), oracle.Oracle(config, tensors)
    features = torch.randn(1, 5, 192)
    hidden = draft.propose(torch.tensor([9]), features).hidden_states[0]
    torch.testing.assert_close(hidden, slow.block_hidden(9, features[0])[1:], atol=2e-4, rtol=2e-4)


def test_one_plus_n_needs_two_slots():
    with pytest.raises(ValueError, match="block_size"):
        tiny.slot0_draft(gamma=1, sample_from_anchor=False)
