"""CONFID: how many drafts are verified, and by which quantity."""

import math

import pytest
import torch
from transformers import GenerationConfig
from transformers.utils import logging

import checks
import hf_dspark
import tiny

PROMPT = [7, 21, 40]
STATIC = {"cache_implementation": "static"}
CHAIN = tiny.chain(40, 60)


def logit(c: float) -> float:
    return math.log(c / (1 - c))


def stub(confidences: list[float], gamma: int = 4, table=None):
    """D-full whose first block from the anchor `CHAIN[0]` has these c_k; 0.99 elsewhere."""
    values = torch.full((tiny.V,), logit(0.99))
    for k, c in enumerate(confidences):
        values[CHAIN[k]] = logit(c)
    return tiny.markov_draft(tiny.one_hot_table(table or tiny.NEXT), confidence=values, gamma=gamma)


@pytest.mark.parametrize("drafts", range(1, 8))
def test_confid_1_any_number_of_drafts_up_to_gamma(drafts):
    for target, draft in ((tiny.perm_target(), tiny.perm_draft(7)), (tiny.random_target(), tiny.random_draft(gamma=7))):
        new, stats = checks.equal_to_plain(target, draft, PROMPT, max_new_tokens=22, num_assistant_tokens=drafts)
        assert max(r.verified for r in stats.rounds) == drafts
        assert all(len(r.draft_tokens) == 7 for r in stats.rounds), "every round drafts the whole block"
        if target is tiny.perm_target():
            assert stats.num_rounds == math.ceil(21 / (drafts + 1))
        options = {"max_new_tokens": 22, "num_assistant_tokens": drafts}
        _, fast, _ = checks.batch_equals_plain(target, draft, [PROMPT], **options, **STATIC)
        assert [r.verified for r in fast.rounds] == [r.verified for r in stats.rounds]


@pytest.mark.parametrize("value", [0, -1, 5, 20, 2.5, "3", True])
def test_confid_1_other_numbers_are_refused(value):
    target, draft = tiny.perm_target(), tiny.perm_draft(4)
    with checks.CallCounter(target) as calls, pytest.raises((ValueError, TypeError)) as error:
        checks.generate(target, draft, PROMPT, num_assistant_tokens=value)
    assert "num_assistant_tokens" in str(error.value)
    assert not calls.shapes
    checks.equal_to_plain(target, draft, PROMPT)


@pytest.mark.parametrize("value", [-0.1, 1.5, math.nan, math.inf, "0.5", True, [0.5]])
def test_confid_3_thresholds_out_of_range_are_refused(value):
    target, draft = tiny.perm_target(), stub([0.5])
    with checks.CallCounter(target) as calls, pytest.raises((ValueError, TypeError)) as error:
        checks.generate(target, draft, PROMPT, assistant_confidence_threshold=value)
    assert "assistant_confidence_threshold" in str(error.value)
    assert not calls.shapes
    checks.equal_to_plain(target, draft, PROMPT)


@pytest.mark.parametrize("value", [None, 0, 0.0, 1, 1.0])
def test_confid_3_legal_ends_of_the_range(value):
    target, draft, options = tiny.perm_target(), stub([0.9] * 4), {"assistant_confidence_threshold": value}
    _, stats = checks.equal_to_plain(target, draft, PROMPT, **options)
    _, fast, _ = checks.batch_equals_plain(target, draft, [PROMPT], **options, **STATIC)
    for found in (stats, fast):
        assert found.num_verified == (0 if value == 1 else 15)
        assert found.num_rounds == (19 if value == 1 else 4)


def test_confid_5_threshold_without_head_warns_once_and_says_so(caplog):
    draft = tiny.perm_draft()
    logging.enable_propagation()
    try:
        for _ in range(2):
            _, stats = checks.equal_to_plain(tiny.perm_target(), draft, PROMPT, assistant_confidence_threshold=0.77)
            assert stats.num_verified == 15 and "no confidence head" in stats.reason
    finally:
        logging.disable_propagation()
    assert sum("no confidence head" in r.message and "0.77" in r.message for r in caplog.records) == 1
    _, stats = checks.equal_to_plain(tiny.perm_target(), draft, PROMPT)
    assert "confidence" not in stats.reason


CUTS = [
    ([0.9, 0.9, 0.4, 0.9], 0.5, 2), ([0.4, 0.9, 0.9, 0.9], 0.5, 0), ([0.8, 0.8, 0.8, 0.8], 0.6, 4),
    ([0.9, 0.9, 0.9, 0.4], 0.5, 3), ([0.9, 0.4, 0.4, 0.9], 0.3, 4), ([0.5, 0.5, 0.5, 0.5], 0.5, 4),
]  # fmt: skip


@pytest.mark.parametrize("confidences,threshold,expected", CUTS)
def test_confid_7_the_first_low_conditional_value_cuts_before_it(confidences, threshold, expected):
    target, draft, options = tiny.perm_target(), stub(confidences), {"assistant_confidence_threshold": threshold}
    _, plain = checks.equal_to_plain(target, draft, PROMPT, **options)
    _, fast, _ = checks.batch_equals_plain(target, draft, [PROMPT], **options, **STATIC)
    for stats in (plain, fast):
        first = stats.rounds[0]
        assert (first.verified, first.accepted) == (expected, expected)
        assert first.next_token == CHAIN[expected + 1]
        torch.testing.assert_close(torch.tensor(first.confidence), torch.tensor(confidences))
        torch.testing.assert_close(torch.tensor(first.survival), torch.tensor(confidences).cumprod(0))
        assert stats.num_drafted == 4 * stats.num_rounds


def test_pure_functions():
    from hf_dspark import confidence

    logits = torch.tensor([[logit(0.9), logit(0.5)], [logit(0.2), logit(0.8)]])
    c = confidence.conditional(logits)
    torch.testing.assert_close(c, torch.tensor([[0.9, 0.5], [0.2, 0.8]]))
    torch.testing.assert_close(confidence.survival(c), torch.tensor([[0.9, 0.45], [0.2, 0.16]]))
    torch.testing.assert_close(
        confidence.conditional(logits, [2.0, 0.5]), (logits / torch.tensor([2.0, 0.5])).sigmoid()
    )
    for values, threshold, expected in CUTS:
        assert confidence.truncate(torch.tensor(values), threshold) == expected


def test_temperatures_move_the_cut():
    """c_k = σ(logit / T_k) decides, and is what a round shows."""
    draft = stub([0.9, 0.9, 0.9, 0.9])
    draft.config.confidence_temperatures = [1.0, 1.0, 8.0, 1.0]
    _, stats = checks.equal_to_plain(tiny.perm_target(), draft, PROMPT, assistant_confidence_threshold=0.7)
    assert stats.rounds[0].verified == 2
    expected = [0.9, 0.9, 1 / (1 + math.exp(-logit(0.9) / 8)), 0.9]
    torch.testing.assert_close(torch.tensor(stats.rounds[0].confidence), torch.tensor(expected))


def test_expected_acceptance_length_uses_verified_slots():
    _, stats = checks.generate(
        tiny.perm_target(), stub([0.9, 0.8, 0.4, 0.9]), PROMPT, max_new_tokens=4, assistant_confidence_threshold=0.5
    )
    assert stats.num_rounds == 1 and stats.num_verified == 2
    assert stats.expected_acceptance_length == pytest.approx(1 + 0.9 + 0.72, abs=1e-4)
    _, stats = checks.generate(tiny.perm_target(), tiny.perm_draft(), PROMPT)
    assert stats.expected_acceptance_length is None


PLACES = {
    "call": lambda draft, values: values,
    "passed config": lambda draft, values: {
        "generation_config": GenerationConfig(max_new_tokens=20, do_sample=False, **values), "max_new_tokens": 20,
    },
    "draft": lambda draft, values: [setattr(draft.generation_config, k, v) for k, v in values.items()] and {},
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name,value,verified", [
    ("num_assistant_tokens", 2, 2), ("num_assistant_tokens", 4, 4), ("assistant_confidence_threshold", 0.4, 2),
    ("assistant_confidence_threshold", 0.85, 1),
])  # fmt: skip
def test_options_are_found_in_the_call_the_config_and_the_draft(place, name, value, verified):
    """Also when the value is the one that generate() fills in by itself (threshold 0.4)."""
    draft = stub([0.9, 0.8, 0.3, 0.9])
    _, stats = checks.equal_to_plain(tiny.perm_target(), draft, PROMPT, **PLACES[place](draft, {name: value}))
    assert stats.rounds[0].verified == verified


def test_the_call_wins_over_the_draft_and_nothing_set_means_the_whole_block():
    draft = stub([0.9, 0.8, 0.3, 0.9])
    _, stats = checks.generate(tiny.perm_target(), draft, PROMPT)
    assert stats.rounds[0].verified == 4
    draft.generation_config.num_assistant_tokens = 1
    draft.generation_config.assistant_confidence_threshold = 0.85
    _, stats = checks.generate(tiny.perm_target(), draft, PROMPT, num_assistant_tokens=3)
    assert stats.rounds[0].verified == 1, "the threshold still comes from the draft"
    _, stats = checks.generate(
        tiny.perm_target(), draft, PROMPT, num_assistant_tokens=3, assistant_confidence_threshold=0.0
    )
    assert stats.rounds[0].verified == 3


def test_sampling_does_not_look_at_the_draft_it_decides_about():
    """ℓ depends on x_0..x_{k-1} only: with a cut at slot 1, no statistics of x_1 can leak into ℓ."""
    table = torch.zeros(tiny.V, tiny.V)
    confidence = torch.full((tiny.V,), logit(0.9))
    confidence[::2] = logit(0.1)
    draft = tiny.markov_draft(table, confidence=confidence)
    target = tiny.table_target(torch.zeros(tiny.V, tiny.V))
    with hf_dspark.record() as stats:
        for _ in range(4):
            target.generate(
                checks.tensor(PROMPT), assistant_model=draft, do_sample=True, max_new_tokens=60,
                assistant_confidence_threshold=0.5,
            )  # fmt: skip
    for here in stats.rounds[:-4]:
        chain = [here.anchor, *here.draft_tokens]
        cut = next((k for k in range(4) if chain[k] % 2 == 0), 4)
        assert here.verified == cut or here.verified < cut  # the limit may cut further
        assert here.verified == cut or here.position > 50
