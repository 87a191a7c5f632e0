"""`record(probabilities=True)`: q and p of every round are those of the two models, on both paths."""

import functools

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

import checks
import hf_dspark
import tiny

PROMPT = [7, 21, 40]


@functools.cache
def tables():
    """Logits of target and draft after each token: different, yet alike enough for some drafts to be accepted."""
    generator = torch.Generator().manual_seed(3)
    target = 2 * torch.randn(tiny.V, tiny.V, generator=generator)
    target[tiny.MASK] = 0
    return target, target + 0.7 * torch.randn(tiny.V, tiny.V, generator=generator)


@functools.cache
def pair():
    target, draft = tables()
    return tiny.table_target(target), tiny.markov_draft(draft, confidence=torch.linspace(-1, 2, tiny.V))


def run(options, **more):
    target, draft = pair()
    torch.manual_seed(5)
    ids = checks.tensor(PROMPT) if more.get("rows", 1) == 1 else torch.tensor([PROMPT, [3, 5, 9]])
    more.pop("rows", None)
    with hf_dspark.record(**more) as stats:
        output = target.generate(
            ids, attention_mask=torch.ones_like(ids), assistant_model=draft, **({"max_new_tokens": 40} | options)
        )
    return output, stats


class Stateful(LogitsProcessor):
    """Changes nothing, but must be called on committed text: slots are then decided one after the other."""

    def __call__(self, input_ids, scores):
        return scores


GREEDY = {"do_sample": False}
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 0}
STATIC = {"cache_implementation": "static"}


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("cut", [{}, {"assistant_confidence_threshold": 0.5}])
@pytest.mark.parametrize("options", [GREEDY, SAMPLED, GREEDY | STATIC, SAMPLED | STATIC])
def test_q_and_p_are_those_of_the_models(options, cut, rows):
    _, stats = run(options | cut, probabilities=True, rows=rows)
    warp = LogitsProcessorList()
    if options["do_sample"]:
        warp = LogitsProcessorList([TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.8)])

    def probability(table, before, token):
        return float(warp(torch.tensor([[before]]), table[before][None].clone()).softmax(dim=-1)[0, token])

    target, draft = tables()
    assert any(r.accepted for r in stats.rounds) and any(r.accepted < r.verified for r in stats.rounds)
    for r in stats.rounds:
        chain = [r.anchor, *r.draft_tokens]
        q = [probability(draft, *edge) for edge in zip(chain, r.draft_tokens, strict=False)]
        torch.testing.assert_close(r.q, q, rtol=1e-4, atol=1e-5)
        decided = [(chain[k], chain[k + 1]) for k in range(r.accepted)]
        if r.next_token is not None:
            decided += [(chain[r.accepted], chain[r.accepted + 1])] if r.accepted < r.verified else []
            decided.append((chain[r.accepted], r.next_token))
        torch.testing.assert_close(r.p, [probability(target, *edge) for edge in decided], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("static", [{}, STATIC])
def test_slots_decided_one_by_one_have_them_too(static):
    _, stats = run(GREEDY | static | {"logits_processor": LogitsProcessorList([Stateful()])}, probabilities=True)
    expected = run(GREEDY | static, probabilities=True)[1]
    for here, there in zip(stats.rounds, expected.rounds, strict=True):
        torch.testing.assert_close((here.q, here.p), (there.q, there.p))


def test_drafts_that_are_not_drawn_have_probability_one():
    target, draft = pair()
    draft.draft_sample_method = "greedy"
    try:
        _, stats = run(SAMPLED, probabilities=True)
    finally:
        draft.draft_sample_method = "probabilistic"
    assert all(r.q == [1.0] * 4 for r in stats.rounds)


@pytest.mark.parametrize("options", [GREEDY, SAMPLED, GREEDY | STATIC])
def test_asking_changes_no_text_and_nobody_pays_who_does_not_ask(options):
    expected, silent = run(options)
    found, _ = run(options, probabilities=True)
    assert found.tolist() == expected.tolist()
    assert all(r.q is None and r.p is None for r in silent.rounds)


def test_an_end_inside_a_block_leaves_out_the_targets_own():
    target, draft = tiny.perm_target(), tiny.perm_draft()
    chain = tiny.chain(40, 20)
    with hf_dspark.record(probabilities=True) as stats:
        target.generate(checks.tensor(PROMPT), assistant_model=draft, eos_token_id=chain[3], max_new_tokens=20)
    (r,) = stats.rounds
    assert r.accepted == 3 and r.next_token is None and len(r.p) == 3 and len(r.q) == 4
