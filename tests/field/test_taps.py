"""TAPS: which hidden states of the target the draft reads, from which rows, and before or after which norm."""

import copy

import pytest
import torch
from family_files import speculators_files

import checks
import hf_dspark
import oracle
import tiny

PROMPT = [5, 9, 11, 3, 8, 2, 30]


def signed_target(family="qwen3"):
    """T-rand whose layers each add a vector of their own, so that no two taps can be confused."""
    shared = tiny.random_target(family)
    # A new one: transformers' hooks that note hidden states stay in a model that was once asked for them, and would
    # come before those that are added here.
    target = type(shared)(shared.config).eval()
    target.load_state_dict(shared.state_dict())
    for i, layer in enumerate(target.model.layers):
        shift = torch.randn(64, generator=torch.Generator().manual_seed(i))
        layer.register_forward_hook(lambda module, args, output, shift=shift: output + shift)
    return target


def guided(target, text, **settings):
    """(draft, oracle): proposals lead along `text`, confidence depends on every context row."""
    config, tensors = tiny.guided_files(tiny.text_table(text), **settings)
    return tiny.load_draft(config, tensors), oracle.Oracle(config, tensors)


def fed_to(draft, run):
    """What `draft.fc` receives while `run()` goes on, one tensor a call."""
    seen = []
    handle = draft.fc.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    try:
        run()
    finally:
        handle.remove()
    return seen


@pytest.mark.parametrize("taps", [(0, 2), (4, 0), (-1, 3), (1,)])
def test_taps_1_are_entries_i_plus_1_of_hidden_states(taps):
    target = signed_target()
    draft, slow = guided(target, PROMPT, taps=taps)
    seen = fed_to(draft, lambda: checks.generate(target, draft, PROMPT, max_new_tokens=1 + 5))
    with torch.no_grad():
        hidden = target(checks.tensor(PROMPT), output_hidden_states=True).hidden_states
    expected = torch.cat([hidden[i + 1] for i in taps], dim=-1)
    assert torch.equal(seen[0], expected), "the prompt's rows, bit for bit"
    assert torch.equal(hf_dspark.context_features(hidden, taps), expected)


def test_taps_1_files_that_count_inputs_of_layers():
    """speculators' `aux_hidden_state_layer_ids` [1, 3] are what others call layers 0 and 2: the same rows arrive."""
    target = signed_target()
    config, tensors = tiny.guided_files(tiny.text_table(PROMPT), taps=(0, 2))
    draft = tiny.load_draft(*speculators_files(config, tensors, aux_hidden_state_layer_ids=[1, 3]))
    seen = fed_to(draft, lambda: checks.generate(target, draft, PROMPT, max_new_tokens=1 + 5))
    with torch.no_grad():
        hidden = target(checks.tensor(PROMPT), output_hidden_states=True).hidden_states
    assert torch.equal(seen[0], torch.cat([hidden[1], hidden[3]], dim=-1))


def test_context_features_reads_outputs_and_partial_tuples():
    target = tiny.random_target()
    with torch.no_grad():
        outputs = target(checks.tensor(PROMPT), output_hidden_states=True)
    hidden = outputs.hidden_states
    expected = torch.cat([hidden[1], hidden[3]], dim=-1)
    assert torch.equal(hf_dspark.context_features(outputs, [0, 2]), expected)
    partial = tuple(h if i in (1, 3) else None for i, h in enumerate(hidden))
    assert torch.equal(hf_dspark.context_features(partial, [0, 2]), expected)
    with pytest.raises(ValueError, match="2"):
        hf_dspark.context_features(partial, [0, 1])


@pytest.mark.parametrize("family", ["qwen3", "qwen3_sliding", "gemma3_text", "gpt2"])
def test_verified_rows_follow_accepted_drafts(family):
    """After partly accepted blocks the context holds exactly the committed rows, each once."""
    target = signed_target(family) if family != "gpt2" else tiny.random_target(family)
    text = checks.plain(target, PROMPT, max_new_tokens=30)[0].tolist()
    draft, slow = guided(target, text, layers=2)
    new, stats = checks.equal_to_plain(target, draft, PROMPT, max_new_tokens=30)
    assert stats.num_accepted > 0
    checks.rounds_match(stats, slow, target, text)


PROMPT_PATHS = {
    "whole": {}, "chunks of 3": {"prefill_chunk_size": 3}, "chunks of 1": {"prefill_chunk_size": 1},
    "chunk longer than the prompt": {"prefill_chunk_size": 50},
    "with scores": {"return_dict_in_generate": True, "output_scores": True},
    "with hidden states": {"return_dict_in_generate": True, "output_hidden_states": True},
}  # fmt: skip


@pytest.mark.parametrize("name", PROMPT_PATHS)
def test_every_prompt_row_becomes_context(name):
    target = tiny.random_target()
    text = checks.plain(target, PROMPT, max_new_tokens=20)[0].tolist()
    draft, slow = guided(target, text)
    _, stats = checks.equal_to_plain(target, draft, PROMPT, **PROMPT_PATHS[name])
    assert stats.num_accepted > 0
    checks.rounds_match(stats, slow, target, text)


def test_prompt_of_embeddings_becomes_context():
    target = tiny.random_target()
    text = checks.plain(target, PROMPT, max_new_tokens=20)[0].tolist()
    draft, slow = guided(target, text)
    embeds = target.get_input_embeddings()(checks.tensor(PROMPT)).detach()
    output, stats = checks.generate(target, draft, None, inputs_embeds=embeds)
    assert output[0].tolist() == text[len(PROMPT) :]
    assert stats.num_accepted > 0
    checks.rounds_match(stats, slow, target, text)


def test_padding_is_no_context():
    """Rows under a zero attention mask are dropped; position counts the row's real tokens."""
    target = tiny.random_target()
    padded = checks.tensor([17, 17, 17] + PROMPT)
    mask = torch.tensor([[0] * 3 + [1] * len(PROMPT)])
    text = checks.plain(target, PROMPT, max_new_tokens=20)[0].tolist()
    assert checks.plain(target, padded, attention_mask=mask)[0, 3:].tolist() == text
    draft, slow = guided(target, text)
    _, stats = checks.equal_to_plain(target, draft, padded, attention_mask=mask)
    assert stats.rounds[0].position == len(PROMPT)
    assert stats.num_accepted > 0
    checks.rounds_match(stats, slow, target, text)


@pytest.mark.parametrize("tap", [6, 7, 40])
def test_taps_3_a_tap_past_the_last_layer_is_refused_at_pairing(tap):
    draft = tiny.random_draft(taps=(0, 2, tap))
    target = tiny.random_target()
    with checks.CallCounter(target) as calls, pytest.raises(ValueError, match=rf"(?s){tap}.*\b[56]\b|\b[56]\b.*{tap}"):
        checks.generate(target, draft, PROMPT)
    assert not calls.shapes, "refused before any forward"
    with pytest.raises(ValueError):
        draft.attach_target(target)


def test_taps_5_last_layer_is_what_output_hidden_states_gives():
    """The last entry of `hidden_states` is behind the target's final norm; a tap on it means that entry."""
    target = copy.deepcopy(signed_target())
    target.model.norm.weight.data.mul_(7)
    text = checks.plain(target, PROMPT, max_new_tokens=12)[0].tolist()
    draft, slow = guided(target, text, taps=(0, 5))
    seen = fed_to(draft, lambda: checks.generate(target, draft, PROMPT, max_new_tokens=6))
    with torch.no_grad():
        hidden = target(checks.tensor(PROMPT), output_hidden_states=True).hidden_states
    assert torch.equal(seen[0], torch.cat([hidden[1], hidden[6]], dim=-1))
    _, stats = checks.equal_to_plain(target, draft, PROMPT, max_new_tokens=12)
    checks.rounds_match(stats, slow, target, text)
    _, stats, _ = checks.batch_equals_plain(target, draft, [PROMPT], cache_implementation="static", max_new_tokens=12)
    checks.rounds_match(stats, slow, target, text)


@pytest.mark.parametrize("own_head", [True, False])
def test_taps_7_head_and_confidence_read_the_normed_hidden_state(own_head):
    """Draft and target norms are far from one; a shared head is called on the draft's own normed states."""
    target = copy.deepcopy(tiny.random_target())
    target.model.norm.weight.data.mul_(torch.linspace(0.2, 9, 64))
    config = tiny.draft_config()
    tensors = tiny.draft_tensors(config)
    tensors["norm.weight"] *= torch.linspace(9, 0.2, 64)
    full = dict(tensors)
    if not own_head:
        full["lm_head.weight"] = target.lm_head.weight.detach()
        full["embed_tokens.weight"] = target.model.embed_tokens.weight.detach()
        del tensors["lm_head.weight"], tensors["embed_tokens.weight"]
    draft = tiny.load_draft(config, tensors).attach_target(target)
    features = torch.randn(1, 5, 192)
    block, expected = draft.propose(torch.tensor([9]), features), oracle.Oracle(config, full).propose(9, features[0])
    close = {"atol": 1e-3, "rtol": 1e-5}
    torch.testing.assert_close(block.base_logits[0], expected.base_logits, **close)
    torch.testing.assert_close(block.hidden_states[0], expected.hidden, **close)
    torch.testing.assert_close(block.confidence_logits[0], expected.confidence_logits, **close)
