"""The fast draft against the slow oracle on random weights: every head, confidence input, depth and batch."""

import copy

import pytest
import torch

import checks
import oracle
import tiny

SHAPES = {
    "vanilla": {}, "gated": {"head": "gated"}, "rnn": {"head": "rnn"}, "no confidence": {"confidence": None},
    "confidence on hidden": {"confidence": "hidden"}, "dflash": {"rank": 0, "confidence": None},
    "dflash with confidence": {"rank": 0, "confidence": "hidden"}, "deep": {"layers": 3, "gamma": 7},
    "one slot": {"gamma": 1}, "one tap": {"taps": (3,)}, "embedding tap, unordered": {"taps": (4, -1, 1)},
    "no grouping": {"num_key_value_heads": 4}, "attention bias": {"attention_bias": True}, "eps": {"rms_norm_eps": 0.1},
    "large theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
}  # fmt: skip


def pair(settings: dict, seed: int = 1):
    """(draft, oracle) with the same random weights; norm weights are far from one."""
    config = tiny.draft_config(**settings)
    tensors = tiny.draft_tensors(config, seed=seed)
    tensors["norm.weight"] *= 3
    if config["attention_bias"]:
        for name in [n for n in tensors if "self_attn" in n and "proj" in n]:
            tensors[name.replace("weight", "bias")] = torch.randn(tensors[name].shape[0])
    return tiny.load_draft(config, tensors), oracle.Oracle(config, tensors)


@pytest.mark.parametrize("name", SHAPES)
def test_propose(name):
    draft, slow = pair(SHAPES[name])
    for context in (0, 1, 9):
        features = torch.randn(2, context, len(draft.config.target_layer_ids) * 64)
        anchors = torch.tensor([7, 50])
        block = draft.propose(anchors, features)
        assert block.tokens.dtype == torch.int64
        for row in range(2):
            expected = slow.propose(int(anchors[row]), features[row])
            assert checks.before_near_tie(expected.logits) == len(expected.tokens), "choose another seed"
            assert block.tokens[row].tolist() == expected.tokens.tolist()
            close = {"atol": 2e-4, "rtol": 2e-4}
            torch.testing.assert_close(block.hidden_states[row], expected.hidden, **close)
            torch.testing.assert_close(block.base_logits[row], expected.base_logits, **close)
            torch.testing.assert_close(block.logits[row], expected.logits, **close)
            if expected.confidence_logits is None:
                assert block.confidence_logits is None and block.survival is None
            else:
                torch.testing.assert_close(block.confidence_logits[row], expected.confidence_logits, **close)
                torch.testing.assert_close(block.survival[row], expected.survival(), **close)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_sampled_proposals(head):
    """At temperature > 0 the logits follow the tokens really drawn, drawn from softmax(logits / temperature)."""
    draft, slow = pair({"head": head})
    features = torch.randn(1, 5, 192)
    generator = torch.Generator().manual_seed(3)
    block = draft.propose(torch.tensor([7]), features, temperature=1.7, generator=generator)
    drawn = block.tokens[0].tolist()
    expected = slow.propose(7, features[0], choose=lambda k, logits: drawn[k])
    torch.testing.assert_close(block.logits[0], expected.logits, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(block.confidence_logits[0], expected.confidence_logits, atol=2e-4, rtol=2e-4)
    again = draft.propose(torch.tensor([7]), features, temperature=1.7, generator=torch.Generator().manual_seed(3))
    assert again.tokens[0].tolist() == drawn

    draws, temperature = 4000, 2.0
    block = draft.propose(torch.full((draws,), 7), features.expand(draws, -1, -1), temperature=temperature)
    q = (expected.logits[0] / temperature).softmax(-1)
    counts = torch.bincount(block.tokens[:, 0], minlength=tiny.V) / draws
    noise = (q * (1 - q) / draws).sqrt()
    assert ((counts - q).abs() < 5 * noise + 1e-3).all()


def test_propose_leaves_no_gradient_and_works_in_train_mode():
    draft, slow = pair({})
    draft = copy.deepcopy(draft).train()
    block = draft.propose(torch.tensor([7]), torch.randn(1, 3, 192, requires_grad=True))
    assert draft.training
    assert not any(t.requires_grad for t in (block.tokens, block.logits, block.hidden_states, block.survival))


def test_temperatures_enter_survival_only():
    draft, slow = pair({})
    draft = copy.deepcopy(draft)
    features = torch.randn(1, 6, 192)
    before = draft.propose(torch.tensor([9]), features)
    temperatures = [0.5, 1.0, 2.0, 4.0]
    draft.config.confidence_temperatures = temperatures
    after = draft.propose(torch.tensor([9]), features)
    assert torch.equal(before.confidence_logits, after.confidence_logits)
    expected = slow.propose(9, features[0]).survival(temperatures)
    torch.testing.assert_close(after.survival[0], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "name", ["vanilla", "gated", "rnn", "confidence on hidden", "dflash", "embedding tap, unordered"]
)
@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_rounds_of_generate(name, threshold):
    """Every round of generate() is the oracle's round: proposals, confidence, ℓ and accepted."""
    draft, slow = pair(SHAPES[name])
    target, prompt = tiny.random_target(), [5, 9, 11]
    new, stats = checks.equal_to_plain(
        target, draft, prompt, max_new_tokens=16, assistant_confidence_threshold=threshold
    )
    checks.rounds_match(stats, slow, target, prompt + new)
    ids, rounds = oracle.greedy(target, slow, prompt, 16, threshold=threshold)
    assert ids == prompt + new
    counts = [(r.position, r.verified, r.accepted, r.next_token) for r in rounds if 19 - r.position - 1 > 4]
    assert [(r.position, r.verified, r.accepted, r.next_token) for r in stats.rounds][: len(counts)] == counts
