"""SAMPLE-1/3/5: sampled text follows the target's processed distribution, and a wrong rule fails the same tests.

Three sources of samples: the pure functions with tens of thousands of rows; long texts of a first-order target, in
which every transition has a known distribution whatever round it came from; and the joint of the first three tokens
over many calls, for processors that look at the whole prefix. Expected values are computed, never sampled.
"""

import dataclasses

import pytest
import scipy.stats
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

import checks
import hf_dspark
import oracle
import tiny
from hf_dspark import sampling
from hf_dspark.generation import verify

SIZE = 8
SURE, WRONG = 1e-3, 1e-6  # a right sampler stays above the first (seeds are fixed), a wrong one falls below the second


def p_value(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Chi-squared test of rows of counts [R, n] against distributions [R, n]; rare cells are pooled."""
    statistic, freedom = 0.0, 0
    for row, p in zip(counts.double(), probabilities.double(), strict=True):
        if row.sum() < 50:
            continue
        assert row[p <= 0].sum() == 0, "an outcome of probability zero"
        expected = p * row.sum()
        rare = expected < 5
        seen, wanted = row[~rare], expected[~rare]
        if expected[rare].sum() >= 5:
            seen, wanted = torch.cat((seen, row[rare].sum()[None])), torch.cat((wanted, expected[rare].sum()[None]))
        statistic += float(((seen - wanted) ** 2 / wanted).sum())
        freedom += len(seen) - 1
    assert freedom > 0, "nothing was tested"
    return float(scipy.stats.chi2.sf(statistic, freedom))


def tables(seed: int = 1, scale: float = 1.0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits [8, 8] of a target and of drafts of several qualities."""
    generator = torch.Generator().manual_seed(seed)
    target, noise, other = (scale * torch.randn(SIZE, SIZE, generator=generator) for _ in range(3))
    return target, {"equal": target, "good": target + 0.4 * noise, "bad": other, "opposite": -target}


# ---- pure functions


def two_tokens(
    p_table, q_table, rows: int, rule=sampling.accept, next_distribution=sampling.next_distribution, method="q"
):
    """Counts [8, 8] of the first two tokens after token 0 out of `rows` speculative rounds of two drafts."""
    p, q = p_table.softmax(-1), q_table.softmax(-1)
    if method == "greedy":
        q = torch.eye(SIZE)[q_table.argmax(-1)]
    first = torch.multinomial(q[0], rows, replacement=True)
    second = torch.multinomial(q[first], 1)[:, 0]
    tokens, uniform = torch.stack((first, second), 1), torch.rand(rows, 2)
    q_rows, p_rows = (
        torch.stack((q[0].expand(rows, -1), q[first]), 1),
        torch.stack((p[0].expand(rows, -1), p[first]), 1),
    )
    accepted = rule(tokens, q_rows, p_rows, uniform)
    own = torch.empty(rows, dtype=torch.long)
    for n, distribution in ((0, q_rows[:, 0]), (1, q_rows[:, 1])):
        here = accepted == n
        if here.any():
            residual = next_distribution(p_rows[here, n], distribution[here])
            own[here] = torch.multinomial(residual, 1)[:, 0]
    x1 = torch.where(accepted >= 1, first, own)
    # With both drafts rejected the second token comes from the target alone, in the next round.
    alone = torch.multinomial(p[x1], 1)[:, 0]
    x2 = torch.where(accepted >= 2, second, torch.where(accepted == 1, own, alone))
    return torch.bincount(x1 * SIZE + x2, minlength=SIZE * SIZE)[None]


def joint(p_table):
    p = p_table.softmax(-1)
    return (p[0][:, None] * p).reshape(1, -1)


@pytest.mark.parametrize("quality", ["equal", "good", "bad", "opposite"])
@pytest.mark.parametrize("method", ["q", "greedy"])
@pytest.mark.parametrize("banned", [False, True])
def test_pure_rule_is_exact(quality, method, banned):
    target, drafts = tables()
    draft = drafts[quality].clone()
    if banned:  # tokens that only one of the two can produce
        target[:, 2], draft[:, 5] = -torch.inf, -torch.inf
    counts = two_tokens(target, draft, 40_000, method=method)
    assert p_value(counts, joint(target)) > SURE


right_accept = sampling.accept
WRONG_RULES = {
    "p instead of p / q": {"rule": lambda t, q, p, u: right_accept(t, torch.ones_like(q), p, u)},
    "always": {"rule": lambda t, q, p, u: torch.full((len(t),), 2)},
    "no division by q's own temperature": {"rule": lambda t, q, p, u: right_accept(t, q**2, p, u)},
    "p as residual": {"next_distribution": lambda p, q: p},
    "residual of the drafts": {"next_distribution": lambda p, q: torch.where(q > p, q - p, 0) + 1e-9},
}


@pytest.mark.parametrize("name", WRONG_RULES)
def test_wrong_rules_fail_the_same_test(name):
    target, drafts = tables()
    assert p_value(two_tokens(target, drafts["bad"], 40_000, **WRONG_RULES[name]), joint(target)) < WRONG


def test_pure_rule_equals_the_oracle_row_by_row():
    generator = torch.Generator().manual_seed(5)
    p, q = (torch.randn(500, 3, SIZE, generator=generator).mul(2).softmax(-1) for _ in range(2))
    tokens = torch.multinomial(q.view(-1, SIZE), 1, generator=generator).view(500, 3)
    uniform = torch.rand(500, 3, generator=generator)
    uniform[:50, 0] = 0.0
    p[:25, 0] = p[:25, 0].scatter(-1, tokens[:25, :1], 0.0)
    accepted = sampling.accept(tokens, q, p, uniform)
    assert accepted.tolist() == [oracle.accept(tokens[i], q[i], p[i], uniform[i]) for i in range(500)]
    assert accepted[:25].eq(0).all(), "a token of probability zero is never accepted, not even by a draw of exactly 0"
    residual = sampling.next_distribution(p[:, 0], q[:, 0])
    for i in range(100):
        torch.testing.assert_close(residual[i], oracle.residual(p[i, 0], q[i, 0]))
    assert torch.equal(sampling.next_distribution(p[:, 0], None), p[:, 0]), "the bonus is p itself"
    same = sampling.next_distribution(p[:, 0], p[:, 0])
    torch.testing.assert_close(same, p[:, 0], msg="an empty residual falls back to p")


# ---- long texts of generate(): every transition is known


def transitions(target_table, draft_table, *, tokens=600, method="probabilistic", confidence=None, **options):
    """Counts [8, 8] of transitions in a sampled text, and the statistics."""
    target = tiny.table_target(target_table, layers=1, mask=None, max_position_embeddings=2048)
    settings = {"target_hidden": SIZE, "taps": (-1,), "mask": SIZE - 1, "gamma": 3}
    draft = tiny.markov_draft(draft_table, confidence=confidence, **settings)
    draft.draft_sample_method = method
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": tokens} | options
    ids, stats = checks.generate(target, draft, [0], **options)
    checks.adds_up(stats, tokens, 3)
    return torch.bincount(ids[0, :-1] * SIZE + ids[0, 1:], minlength=SIZE * SIZE).view(SIZE, SIZE), stats


def warped(table, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The processed distribution, written out: temperature, then top-k, top-p, min-p."""
    result = torch.zeros_like(table)
    for row, logits in enumerate(table / temperature):
        order = logits.argsort(descending=True)
        keep = order[: top_k or SIZE]
        p = logits[keep].softmax(-1)
        before = p.cumsum(-1) - p
        keep = keep[before < top_p]
        p = logits[keep].softmax(-1)
        keep = keep[p >= min_p * p.max()]
        result[row, keep] = logits[keep].softmax(-1)
    return result


SETTINGS = {
    "plain": {}, "cold": {"temperature": 0.2}, "cool": {"temperature": 0.7, "top_k": 3, "top_p": 0.9},
    "hot": {"temperature": 2.0}, "top-k": {"top_k": 3}, "top-p": {"top_p": 0.7}, "min-p": {"min_p": 0.3},
}  # fmt: skip


CASES = [(name, "good", method) for name in SETTINGS for method in ("probabilistic", "greedy")]


@pytest.mark.parametrize("name,quality,method", [*CASES, ("plain", "bad", "probabilistic"), ("cool", "bad", "greedy")])
def test_generate_is_exact(name, quality, method):
    target, drafts = tables()
    counts, stats = transitions(target, drafts[quality], method=method, **SETTINGS[name])
    assert p_value(counts, warped(target, **SETTINGS[name])) > SURE
    assert 0 < stats.num_accepted < stats.num_verified


def test_generate_is_exact_with_a_threshold_and_a_perfect_draft():
    target, drafts = tables()
    confidence = torch.tensor([3.0, -3.0, 3.0, 3.0, -3.0, 3.0, 3.0, 3.0])
    counts, stats = transitions(target, drafts["good"], confidence=confidence, assistant_confidence_threshold=0.5)
    assert p_value(counts, target.softmax(-1)) > SURE
    assert {r.verified for r in stats.rounds} == {0, 1, 2, 3}
    counts, stats = transitions(target, target)
    assert p_value(counts, target.softmax(-1)) > SURE
    assert stats.acceptance_rate > 0.99, "q = p is accepted but for rounding"


class Flatten(LogitsProcessor):
    """A caller's own processor: it runs on the target's side only, slot by slot, and q knows nothing of it."""

    def __call__(self, input_ids, scores):
        return scores.mul(0.5).index_fill(-1, torch.tensor([2]), -torch.inf)


@pytest.mark.parametrize("method", ["probabilistic", "greedy"])
def test_generate_is_exact_with_a_callers_own_processor(method):
    target, drafts = tables()
    processors = LogitsProcessorList([Flatten()])
    counts, stats = transitions(target, drafts["good"], method=method, temperature=0.8, logits_processor=processors)
    # Processors of the call come before temperature.
    expected = Flatten()(None, target.clone()) / 0.8
    assert p_value(counts, expected.softmax(-1)) > SURE
    assert 0 < stats.num_accepted < stats.num_verified


def patch_everywhere(monkeypatch, name, function):
    for module in (sampling, verify):
        monkeypatch.setattr(module, name, function)


WRONG_IN_GENERATE = [
    ("p instead of p / q", "probabilistic"),
    ("always", "greedy"),
    ("p as residual", "probabilistic"),
]


@pytest.mark.parametrize("name,method", WRONG_IN_GENERATE)
def test_wrong_rules_in_generate_fail_the_same_test(name, method, monkeypatch):
    target, drafts = tables()
    rule = WRONG_RULES[name]
    if "rule" in rule:
        patch_everywhere(
            monkeypatch, "accept", lambda t, q, p, u: rule["rule"](t, q, p, u).clamp(max=t.shape[1])
        )  # fmt: skip
    else:
        patch_everywhere(monkeypatch, "next_distribution", lambda p, q: p)
    counts, _ = transitions(target, drafts["bad"], method=method, tokens=1000)
    assert p_value(counts, target.softmax(-1)) < WRONG


def change_proposals(monkeypatch, change):
    """Put `change(tokens, q)` in the place of what every round sends to verification."""
    right = hf_dspark.DSparkCandidateGenerator.propose

    def propose(self, *args, **kwargs):
        proposal = right(self, *args, **kwargs)
        tokens, q = change(proposal.tokens, proposal.q)
        return dataclasses.replace(proposal, tokens=tokens, q=q)

    monkeypatch.setattr(hf_dspark.DSparkCandidateGenerator, "propose", propose)


def test_q_without_the_processors_would_fail(monkeypatch):
    """The q of the accept test must be the one drawn from: softmax of raw draft logits at temperature 0.4 is not."""
    target, drafts = tables()
    change_proposals(monkeypatch, lambda tokens, q: (tokens, (0.4 * q.log()).softmax(-1)))
    counts, _ = transitions(target, drafts["good"], temperature=0.4, tokens=1600)
    assert p_value(counts, warped(target, temperature=0.4)) < WRONG


# ---- the paper's Appendix A: a decision to verify x_k must not look at x_k


def first_of_round(anticipate: bool, monkeypatch, tokens=1000) -> torch.Tensor:
    """Counts of the tokens 0 and 1 that rounds put at their first slot; p = (.7, .3), q = (.5, .5)."""
    table, halves = torch.full((SIZE, SIZE), -1e4), torch.full((SIZE, SIZE), -1e4)
    table[:, :2], halves[:, :2] = torch.tensor([0.7, 0.3]).log(), torch.tensor([0.5, 0.5]).log()
    if anticipate:  # "x_1 looks bad, better not verify it"
        change_proposals(monkeypatch, lambda tokens, q: (tokens, q) if tokens.eq(0).all() else (tokens[:0], q[:0]))
    target = tiny.table_target(table, layers=1, mask=None, max_position_embeddings=4096)
    draft = tiny.markov_draft(halves, target_hidden=SIZE, taps=(-1,), mask=SIZE - 1, gamma=1)
    _, stats = checks.generate(target, draft, [0], do_sample=True, max_new_tokens=tokens, top_k=0)
    first = [r.draft_tokens[0] if r.accepted else r.next_token for r in stats.rounds[:-1]]
    return torch.bincount(torch.tensor(first), minlength=2)[None]


def test_appendix_a(monkeypatch):
    right, anticipated = torch.tensor([[0.7, 0.3]]), torch.tensor([[0.85, 0.15]])
    counts = first_of_round(False, monkeypatch)
    assert p_value(counts, right) > SURE and p_value(counts, anticipated) < WRONG
    counts = first_of_round(True, monkeypatch)
    assert p_value(counts, anticipated) > SURE and p_value(counts, right) < WRONG


# ---- processors that look at the whole prefix: joint of the first three tokens over many calls

EOS, CALLS = 6, 500
PREFIX_SETTINGS = {
    "repetition penalty, minimum length": (
        {"repetition_penalty": 1.6, "min_new_tokens": 2, "eos_token_id": EOS, "temperature": 1.5, "top_k": 6},
        lambda: [RepetitionPenaltyLogitsProcessor(1.6), MinNewTokensLengthLogitsProcessor(2, 2, [EOS]),
                 TemperatureLogitsWarper(1.5), TopKLogitsWarper(6)],
    ),
    "bad words": (
        {"bad_words_ids": [[3], [1, 4], [0, 2]], "eos_token_id": EOS, "top_k": 0},
        lambda: [NoBadWordsLogitsProcessor([[3], [1, 4], [0, 2]], [EOS])],
    ),
}  # fmt: skip


def exact_joint(table, prompt, processors) -> torch.Tensor:
    """P of each triple of new tokens [512]; a text that ended early is filled up with its last token."""
    result = torch.zeros(SIZE, SIZE, SIZE)

    def walk(new, probability):
        if len(new) == 3 or EOS in new:
            result[tuple((new + [EOS] * 3)[:3])] += probability
            return
        ids = torch.tensor([prompt + new])
        p = LogitsProcessorList(processors)(ids, table[ids[0, -1]][None].clone()).softmax(-1)[0]
        for token in range(SIZE):
            if p[token] > 0:
                walk([*new, token], probability * float(p[token]))

    walk([], 1.0)
    return result.view(1, -1)


def sampled_joint(table, draft_table, prompt, options, method) -> torch.Tensor:
    target = tiny.table_target(table, layers=1, mask=None)
    draft = tiny.markov_draft(draft_table, target_hidden=SIZE, taps=(-1,), mask=SIZE - 1, gamma=3)
    draft.draft_sample_method = method
    counts, accepted = torch.zeros(1, SIZE**3), 0
    with hf_dspark.record() as stats:
        for _ in range(CALLS):
            ids = target.generate(
                checks.tensor(prompt),
                assistant_model=draft,
                do_sample=True,
                max_new_tokens=3,
                pad_token_id=EOS,
                **options,
            )
            a, b, c = (ids[0, len(prompt) :].tolist() + [EOS] * 3)[:3]
            counts[0, (a * SIZE + b) * SIZE + c] += 1
    accepted = stats.num_accepted
    assert 0 < accepted < stats.num_verified
    return counts


@pytest.mark.parametrize(
    "name,method", [*((name, "probabilistic") for name in PREFIX_SETTINGS), (next(iter(PREFIX_SETTINGS)), "greedy")]
)
def test_generate_is_exact_for_processors_of_the_prefix(name, method):
    options, processors = PREFIX_SETTINGS[name]
    target, drafts = tables(seed=2)
    prompt = [0, 5]
    counts = sampled_joint(target, drafts["good"], prompt, options, method)
    assert p_value(counts, exact_joint(target, prompt, processors())) > SURE
