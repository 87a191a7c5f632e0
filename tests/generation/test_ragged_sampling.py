"""Invariant 2 on the ragged path: every row of a batch follows the target's processed distribution, on its own.

Long texts of a first-order target, in which every transition has a known distribution whatever round and row it came
from; the joint of two rows, which must be independent; and the first tokens of many rows, for processors that look at
the whole prefix. Wrong acceptance rules fail the same tests. See `tests/test_chi_squared.py` for the plain path.
"""

import pytest
import test_chi_squared as chi
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import checks
import hf_dspark
import tiny
from hf_dspark import sampling
from hf_dspark.generation import verify
from hf_dspark.kernels import reference

SIZE, GAMMA = chi.SIZE, 3
ROWS = [[0], [5, 1, 2], [3, 3]]


def pair(target_table, draft_table, method="probabilistic", confidence=None, positions=2048):
    target = tiny.table_target(target_table, layers=1, mask=None, max_position_embeddings=positions)
    settings = {"target_hidden": SIZE, "taps": (-1,), "mask": SIZE - 1, "gamma": GAMMA}
    draft = tiny.markov_draft(draft_table, confidence=confidence, **settings)
    draft.draft_sample_method = method
    return target, draft


def sampled(target, draft, rows=ROWS, **options):
    """New tokens of each row and the statistics of one sampled call."""
    options = {"do_sample": True, "top_k": 0, "pad_token_id": 0} | options
    options |= {"cache_implementation": "static"} if len(rows) == 1 else {}
    with hf_dspark.record() as stats:
        ids = target.generate(**checks.batch(rows), assistant_model=draft, **options)
    assert stats.path == "ragged"
    return ids[:, max(map(len, rows)) :], stats


def transitions(
    target_table, draft_table, *, tokens=400, rows=ROWS, method="probabilistic", confidence=None, **options
):
    """Counts [rows, 8, 8] of transitions in sampled texts, and the statistics."""
    target, draft = pair(target_table, draft_table, method, confidence)
    new, stats = sampled(target, draft, rows, max_new_tokens=tokens, **options)
    checks.rows_add_up(stats, rows, new.tolist(), GAMMA)
    texts = torch.cat((torch.tensor([[row[-1]] for row in rows]), new), dim=1)
    pairs = texts[:, :-1] * SIZE + texts[:, 1:]
    return torch.stack([torch.bincount(row, minlength=SIZE * SIZE).view(SIZE, SIZE) for row in pairs]), stats


def follows(counts: torch.Tensor, expected: torch.Tensor) -> bool:
    """Each row by itself and all of them together."""
    rows = all(chi.p_value(part, expected) > chi.SURE / 10 for part in counts)
    return rows and chi.p_value(counts.sum(0), expected) > chi.SURE


CASES = [(name, "good", method) for name in chi.SETTINGS for method in ("probabilistic", "greedy")]


@pytest.mark.parametrize("name,quality,method", [*CASES, ("plain", "bad", "probabilistic"), ("cool", "bad", "greedy")])
def test_every_row_is_exact(name, quality, method):
    target, drafts = chi.tables()
    counts, stats = transitions(target, drafts[quality], method=method, **chi.SETTINGS[name])
    assert follows(counts, chi.warped(target, **chi.SETTINGS[name]))
    assert 0 < stats.num_accepted < stats.num_verified


@pytest.mark.parametrize("name", ["plain", "cool"])
def test_one_row_with_a_static_cache_is_exact(name):
    target, drafts = chi.tables()
    counts, _ = transitions(target, drafts["good"], rows=[[0]], tokens=800, **chi.SETTINGS[name])
    assert follows(counts, chi.warped(target, **chi.SETTINGS[name]))


def test_exact_with_a_threshold_and_a_perfect_draft():
    target, drafts = chi.tables()
    confidence = torch.tensor([3.0, -3.0, 3.0, 3.0, -3.0, 3.0, 3.0, 3.0])
    counts, stats = transitions(target, drafts["good"], confidence=confidence, assistant_confidence_threshold=0.5)
    assert follows(counts, target.softmax(-1))
    assert {r.verified for r in stats.rounds} == {0, 1, 2, 3}
    counts, stats = transitions(target, target)
    assert follows(counts, target.softmax(-1))
    assert stats.acceptance_rate > 0.99, "q = p is accepted but for rounding"


@pytest.mark.parametrize("method", ["probabilistic", "greedy"])
@pytest.mark.parametrize("safe", [False, True])
def test_exact_with_a_callers_own_processor(method, safe):
    target, drafts = chi.tables()
    processor = chi.Flatten()
    processor.draft_safe = safe
    options = {"temperature": 0.8, "logits_processor": LogitsProcessorList([processor]), "tokens": 300}
    counts, stats = transitions(target, drafts["good"], method=method, **options)
    assert follows(counts, (chi.Flatten()(None, target.clone()) / 0.8).softmax(-1))
    assert 0 < stats.num_accepted < stats.num_verified


class TiltRow(LogitsProcessor):
    """A processor with another setting for each row."""

    def __init__(self, bias: torch.Tensor):
        self.bias = bias

    def __call__(self, input_ids, scores):
        return scores + self.bias


def test_exact_with_another_setting_for_each_row():
    target, drafts = chi.tables()
    bias = torch.randn(3, SIZE, generator=torch.Generator().manual_seed(4))
    processors = LogitsProcessorList([TiltRow(bias)])
    counts, _ = transitions(target, drafts["good"], logits_processor=processors)
    for row in range(3):
        assert chi.p_value(counts[row], (target + bias[row]).softmax(-1)) > chi.SURE


# ---- wrong rules fail


def use_rule(monkeypatch, name: str) -> None:
    """Put a wrong rule wherever the ragged path decides: on the device's terms and, slot by slot, on the host."""
    wrong = chi.WRONG_RULES[name]
    for module in (sampling, verify, reference):
        if "rule" in wrong:
            rule = lambda t, q, p, u: wrong["rule"](t, q, p, u).clamp(max=t.shape[1])  # noqa: E731
            monkeypatch.setattr(module, "accept", rule)
        else:
            monkeypatch.setattr(module, "next_distribution", lambda p, q: p)


WRONG = [("p instead of p / q", "probabilistic"), ("p as residual", "probabilistic"), ("p as residual", "greedy")]


@pytest.mark.parametrize("custom", [False, True])
@pytest.mark.parametrize("name,method", WRONG)
def test_wrong_rules_fail_the_same_test(name, method, custom, monkeypatch):
    """Once with the decision in the round itself, once on the host because of a caller's processor."""
    target, drafts = chi.tables()
    use_rule(monkeypatch, name)
    options = {"logits_processor": LogitsProcessorList([TiltRow(torch.zeros(1))])} if custom else {}
    counts, _ = transitions(target, drafts["bad"], method=method, tokens=600, **options)
    assert chi.p_value(counts.sum(0), target.softmax(-1)) < chi.WRONG


# ---- rows are independent, and seeds repeat


def first_pairs(target, draft, calls: int, rows: int = 16) -> torch.Tensor:
    """Counts [1, 64] of (token of one row, token of its neighbour) at one place behind equal prompts."""
    counts = torch.zeros(SIZE * SIZE)
    for _ in range(calls):
        new, _ = sampled(target, draft, [[0]] * rows, max_new_tokens=4)
        for step in range(4):
            left, right = new[::2, step], new[1::2, step]
            counts += torch.bincount(left * SIZE + right, minlength=SIZE * SIZE)
    return counts[None]


def test_rows_with_equal_prompts_draw_independently():
    """A target without memory: the joint of two rows is the product, also inside blocks and at corrections."""
    row = torch.tensor([0.3, -0.4, 0.9, 0.0, 0.5, -1.0, 0.2, 0.1])
    target, draft = pair(row.expand(SIZE, -1).clone(), (0.5 * row).expand(SIZE, -1).clone())
    counts = first_pairs(target, draft, calls=30)
    p = row.softmax(-1)
    assert chi.p_value(counts, (p[:, None] * p).view(1, -1)) > chi.SURE


def test_rows_that_share_their_draws_would_fail():
    row = torch.tensor([0.3, -0.4, 0.9, 0.0, 0.5, -1.0, 0.2, 0.1])
    p = row.softmax(-1)
    tokens = torch.multinomial(p, 960, replacement=True)
    counts = torch.bincount(tokens * SIZE + tokens, minlength=SIZE * SIZE)[None]
    counts += torch.bincount(tokens * SIZE + tokens.roll(1), minlength=SIZE * SIZE)
    assert chi.p_value(counts, (p[:, None] * p).view(1, -1)) < chi.WRONG


@pytest.mark.parametrize("method", ["probabilistic", "greedy"])
@pytest.mark.parametrize("custom", [False, True])
def test_same_seed_same_texts(method, custom):
    """`torch.manual_seed` before the call decides; calls in between and the state of the buffers do not."""
    table, drafts = chi.tables()
    target, draft = pair(table, drafts["good"], method)
    options = {"max_new_tokens": 30, "temperature": 0.8, "top_k": 6, "top_p": 0.95}
    options |= {"logits_processor": LogitsProcessorList([TiltRow(torch.zeros(1))])} if custom else {}

    def run(seed=0, rows=ROWS):
        torch.manual_seed(seed)
        return sampled(target, draft, rows, **options)[0].tolist()

    first = run()
    assert run() == first and run(seed=1) != first
    single = run(rows=ROWS[:1])
    sampled(target, draft, [[1] * 40] * 7, **options)
    assert run() == first
    hf_dspark.release()
    assert run() == first
    assert run(rows=ROWS[:1]) == single


def test_consecutive_calls_differ():
    table, drafts = chi.tables()
    target, draft = pair(table, drafts["good"])
    texts = [sampled(target, draft, max_new_tokens=30)[0].tolist() for _ in range(3)]
    assert texts[0] != texts[1] != texts[2]


def test_cold_sampling_is_greedy():
    target, draft = tiny.random_target("qwen3", layers=3), tiny.random_draft(taps=(0, 1))
    greedy, _, _ = checks.batch_equals_plain(target, draft, ROWS, max_new_tokens=12)
    for options in ({"temperature": 1e-4}, {"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert sampled(target, draft, max_new_tokens=12, **options)[0].tolist() == greedy


# ---- processors of the prefix: joint of the first three tokens over many rows


@pytest.mark.parametrize(
    "name,method", [(name, m) for name in chi.PREFIX_SETTINGS for m in ("probabilistic", "greedy")]
)
def test_exact_for_processors_of_the_prefix(name, method):
    options, processors = chi.PREFIX_SETTINGS[name]
    table, drafts = chi.tables(seed=2)
    target, draft = pair(table, drafts["good"], method)
    prompt, counts = [0, 5], torch.zeros(1, SIZE**3)
    for _ in range(25):
        given = {"pad_token_id": chi.EOS, "max_new_tokens": 3} | options
        new, _ = sampled(target, draft, [prompt] * 24, **given)
        for a, b, c in (row + [chi.EOS] * (3 - len(row)) for row in new.tolist()):
            counts[0, (a * SIZE + b) * SIZE + c] += 1
    assert chi.p_value(counts, chi.exact_joint(table, prompt, processors())) > chi.SURE


# ---- ends of sampled rows


def test_sampled_rows_end_by_themselves():
    """Rows end at the end-of-text id at random places; nothing but padding follows, and the sums hold."""
    table, drafts = chi.tables()
    target, draft = pair(table, drafts["good"])
    rows = [[0], [5, 1], [3], [2, 2, 2], [1]]
    new, stats = sampled(target, draft, rows, max_new_tokens=40, eos_token_id=6, pad_token_id=7)
    texts = [row[: row.index(6) + 1] if 6 in row else row for row in new.tolist()]
    assert all(set(row[len(text) :]) <= {7} for row, text in zip(new.tolist(), texts, strict=True))
    checks.rows_add_up(stats, rows, texts, GAMMA)
