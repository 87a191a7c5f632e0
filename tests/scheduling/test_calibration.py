"""STS: known temperatures come back, what cannot change does not, labels are right, little data is refused."""

import copy
import json
import math

import pytest
import torch

import checks
import tiny
from hf_dspark.evaluation.metrics import auroc, ece
from hf_dspark.scheduling.calibration import (
    GRID,
    Recording,
    _token_ids,
    calibrate,
    fit,
    fit_temperatures,
    record_rounds,
)

SIZE, GAMMA = 8, 3
TRUE = [1.8, 0.6, 1.0, 2.5]


def logits_and_survival(rounds, temperatures=TRUE, seed=0, sampled=False):
    """Logits whose c_k are right at `temperatures`, and the outcomes, as probabilities or 0/1."""
    generator = torch.Generator().manual_seed(seed)
    logits = 1 + 2 * torch.randn(rounds, len(temperatures), generator=generator)
    c = (logits / torch.tensor(temperatures)).sigmoid()
    passed = (torch.rand(c.shape, generator=generator) < c).float() if sampled else c
    return logits, passed.cumprod(-1)


def recording(logits, survival, prompts=10):
    prompt = torch.arange(len(logits)) * prompts // len(logits)
    return Recording(logits, survival, survival, survival, prompt)


def a(logits, temperatures):
    return (logits / torch.tensor(temperatures)).sigmoid().cumprod(-1)


@pytest.mark.parametrize("sampled,rounds,tolerance", [(False, 3000, 0.025), (True, 20_000, 0.15)])
def test_known_temperatures_come_back(sampled, rounds, tolerance):
    logits, survival = logits_and_survival(rounds, sampled=sampled)
    found = fit_temperatures(logits, survival)
    assert all(abs(math.log(t / true)) < tolerance for t, true in zip(found, TRUE, strict=True)), found
    for j in range(len(TRUE)):
        before, after = (ece(a(logits, t)[:, j], survival[:, j]) for t in ([1.0] * 4, found))
        assert after < 0.01 and after < 0.6 * before


def test_positions_are_fitted_from_left_to_right():
    logits, survival = logits_and_survival(2000)
    found = fit_temperatures(logits, survival)
    assert fit_temperatures(logits[:, :2], survival[:, :2]) == found[:2]
    # A position makes up for what an earlier one could not fix: T_2 is found with T_1 in place, not alone.
    alone = fit_temperatures(logits[:, 1:], survival[:, 1:])
    assert alone[0] != found[1]


def test_few_rounds_scatter_less_than_the_lowest_ece_alone():
    def lowest_ece(logits, survival):
        found, before = [], torch.ones(len(logits))
        for j in range(logits.shape[1]):
            errors = {t: ece(before * (logits[:, j] / t).sigmoid(), survival[:, j]) for t in GRID}
            found.append(min(GRID, key=errors.get))
            before = before * (logits[:, j] / found[-1]).sigmoid()
        return found

    def distance(fit_with):
        data = [logits_and_survival(600, temperatures=[2.0] * 4, sampled=True, seed=seed) for seed in range(6)]
        return sum(abs(math.log(t / 2)) for logits, survival in data for t in fit_with(logits, survival)) / 24

    assert distance(fit_temperatures) < 0.3
    assert distance(fit_temperatures) < 0.75 * distance(lowest_ece)


def test_auroc_of_c_is_unchanged_and_reported():
    logits, survival = logits_and_survival(2000, sampled=True)
    report = fit(recording(logits, survival))
    assert report.temperatures != [1.0] * 4
    for k, t in enumerate(report.temperatures):
        labels = (torch.rand(2000) < logits[:, k].sigmoid()).double()
        scaled = (logits[:, k].double() / t).sigmoid()
        assert auroc(scaled, labels) == pytest.approx(auroc(logits[:, k], labels), abs=1e-9)
    assert len(report.auroc_c) == len(report.auroc_a) == len(report.auroc_a_before) == 4
    assert report.auroc_a[0] == report.auroc_a_before[0], "a_1 is c_1"


def test_report_is_of_held_out_texts(tmp_path):
    logits, survival = logits_and_survival(2000)
    report = fit(recording(logits, survival), holdout=0.3)
    assert (report.num_rounds, report.num_samples) == (2000, 1400)
    assert report.ece_after == pytest.approx(sum(report.ece_by_position) / 4)
    assert report.ece_before == pytest.approx(sum(report.ece_by_position_before) / 4)
    for bins in (report.reliability, report.reliability_before):
        assert sum(b["count"] for b in bins) == 4 * (report.num_rounds - report.num_samples)
        assert [b["predicted"] for b in bins] == sorted(b["predicted"] for b in bins)
    gaps = [
        sum(b["count"] * abs(b["predicted"] - b["accepted"]) for b in bins)
        for bins in (report.reliability, report.reliability_before)
    ]
    assert gaps[0] < gaps[1]
    assert report.ece_after < 0.01 < 0.03 < report.ece_before
    assert fit(recording(logits, survival), holdout=0.3) == report
    report.to_json(tmp_path / "sts.json")
    stored = json.loads((tmp_path / "sts.json").read_text())
    assert {"temperatures", "dataset", "num_samples", "ece_before", "ece_after"} <= set(stored)
    assert stored["temperatures"] == report.temperatures


def test_identity_is_kept_and_stated():
    logits, survival = logits_and_survival(1000, temperatures=[1.0] * 3)
    report = fit(recording(logits, survival))
    assert report.temperatures == [1.0] * 3 and report.ece_before == report.ece_after
    assert len(report.notes) >= 1 and "1" in report.notes[0]


def test_worse_on_held_out_texts_means_identity():
    """Nine texts are overconfident, the one held out is right: what was fitted would harm there."""
    logits, survival = logits_and_survival(1000, temperatures=[3.0] * 3)
    data = recording(logits, survival)
    held_out = fit(data, holdout=0.05).num_samples
    assert held_out == 900
    for p in range(10):
        rows = data.prompt == p
        right = a(logits, [1.0] * 3)
        changed = Recording(logits, survival, torch.where(rows[:, None], right, survival), survival, data.prompt)
        report = fit(changed, holdout=0.05)
        if report.temperatures == [1.0] * 3:
            assert "all T_k stay 1" in report.notes[0]
            assert report.ece_after == report.ece_before
            return
    raise AssertionError("some text is the one held out")


def test_too_little_data_is_refused():
    logits, survival = logits_and_survival(99)
    with pytest.raises(ValueError, match="at least 100 rounds.*got 99"):
        fit(recording(logits, survival))
    logits, survival = logits_and_survival(200)
    with pytest.raises(ValueError, match="one text"):
        fit(recording(logits, survival, prompts=1))


# ---- recording a pair whose p, q and c* are known after every token


def pair(overconfidence=1.0, seed=1):
    """A pair with distributions by last token; the confidence logit is `overconfidence` · logit(c*). Also c* [V]."""
    generator = torch.Generator().manual_seed(seed)
    p_table = torch.randn(SIZE, SIZE, generator=generator)
    # Drafts of very different quality, so that c* says something.
    noise = torch.linspace(0.1, 3.0, SIZE)[:, None] * torch.randn(SIZE, SIZE, generator=generator)
    q_table = p_table + noise
    expected = torch.minimum(p_table.softmax(-1), q_table.softmax(-1)).sum(-1)
    return pair_of(p_table, q_table, overconfidence * expected.logit()) + (expected,)


def pair_of(p_table, q_table, confidence):
    target = tiny.table_target(p_table, layers=1, mask=None, max_position_embeddings=2048)
    settings = {"target_hidden": SIZE, "taps": (-1,), "mask": SIZE - 1, "gamma": GAMMA}
    return target, tiny.markov_draft(q_table, confidence=confidence, **settings)


def test_labels_belong_to_their_slots():
    """Each confidence logit names the token before its slot, and so the c* that must stand beside it."""
    target, draft, expected = pair()
    data = record_rounds(target, draft, [[0, 1], [2]], max_new_tokens=120)
    assert data.confidence_logits.shape == data.survival.shape == (len(data), GAMMA) and len(data) > 60
    torch.testing.assert_close(data.confidence_logits.sigmoid(), data.expected, atol=1e-4, rtol=1e-3)
    assert len(data.expected[:, 0].unique()) > 4
    torch.testing.assert_close(data.survival[:, 0], data.expected[:, 0])
    assert (data.survival[:, 1:] <= data.survival[:, :-1].clamp(min=0) / data.expected[:, :-1] + 1e-5).all()
    assert set(data.sampled.unique().tolist()) == {0.0, 1.0} and (data.sampled.diff(dim=1) <= 0).all()
    assert data.prompt.unique().tolist() == [0, 1]


def test_survival_labels_have_the_mean_of_the_outcomes_and_products_of_c_star_do_not():
    """After 1 the draft proposes 0 and 2 alike; 0 always passes and a sure draft follows, 2 seldom, and none does."""
    p_table, q_table = torch.full((SIZE, SIZE), -1e4), torch.full((SIZE, SIZE), -1e4)
    p_table[:, 1], q_table[:, 1] = 0, 0
    p_table[1, :3] = torch.tensor([0.9, 1e-9, 0.1]).log()
    q_table[1, :3] = torch.tensor([0.5, 1e-9, 0.5]).log()
    q_table[2, 1], q_table[2, 3] = -1e4, 0
    target, draft = pair_of(p_table, q_table, torch.zeros(SIZE))
    data = record_rounds(target, draft, [[1]] * 3, max_new_tokens=500)
    error = (data.sampled.var(dim=0) / len(data)).sqrt()
    assert ((data.sampled - data.survival).mean(0).abs() < 3 * error).all()
    product = data.expected.cumprod(-1)
    assert (data.sampled - product).mean(0)[2] > 5 * error[2]


def test_calibrate_sets_the_temperatures():
    target, draft, expected = pair(overconfidence=2.0)
    state = torch.get_rng_state()
    prompts = [[i % SIZE, 1] for i in range(8)]
    report = calibrate(target, draft, prompts, max_new_tokens=150)
    assert torch.equal(torch.get_rng_state(), state), "the caller's random numbers go on as before"
    assert draft.config.confidence_temperatures == report.temperatures
    assert abs(math.log(report.temperatures[0] / 2)) < 0.1
    assert report.ece_after < 0.7 * report.ece_before and report.ece_by_position[0] < 0.05
    assert calibrate(target, draft, prompts, max_new_tokens=150) == report, "measured before temperatures, by seed"
    _, stats = checks.generate(target, draft, [0])
    first = stats.rounds[0]
    assert first.confidence[0] == pytest.approx(
        float((2 * expected[first.anchor].logit() / report.temperatures[0]).sigmoid()), abs=1e-4
    )


def test_whole_blocks_are_recorded_whatever_the_draft_is_set_to():
    target, draft, _ = pair()
    draft.generation_config.assistant_confidence_threshold = 0.99
    target.generation_config.top_k, target.generation_config.temperature = 1, 0.1
    data = record_rounds(target, draft, [[0]], max_new_tokens=60)
    assert len(data) > 10
    torch.testing.assert_close(data.confidence_logits.sigmoid(), data.expected, atol=1e-4, rtol=1e-3)


def test_targets_that_go_without_drafts_are_refused():
    """generate() would decode plainly there, so rounds would be those of nobody. A cache that is switched off is no
    reason: training leaves targets like that."""
    target, draft, _ = pair()
    target.generation_config.use_cache = False
    assert len(record_rounds(target, draft, [[0]], max_new_tokens=40)) > 5
    target.config.rope_parameters |= {"rope_type": "dynamic", "original_max_position_embeddings": 4}
    with pytest.raises(ValueError, match="goes without drafts.*rotary tables change"):
        calibrate(target, draft, [[0], [1]])


def test_wrong_calls_are_refused():
    target, draft, _ = pair()
    with pytest.raises(ValueError, match="at least 2 prompts"):
        calibrate(target, draft, [[0]])
    with pytest.raises(ValueError, match="tokenizer"):
        calibrate(target, draft, ["a", "b"])
    with pytest.raises(ValueError, match="empty"):
        calibrate(target, draft, [[0], []])
    with pytest.raises(ValueError, match="holdout"):
        calibrate(target, draft, [[0], [1]], holdout=1.0)
    with pytest.raises(ValueError, match="at least 100 rounds"):
        calibrate(target, draft, [[0], [1]], max_new_tokens=8)
    assert draft.config.confidence_temperatures is None
    draft.scheduler = "auto"
    with pytest.raises(ValueError, match="scheduler"):
        calibrate(target, draft, [[0], [1]])
    with pytest.raises(ValueError, match="no confidence head"):
        calibrate(target, tiny.random_draft(confidence=None), [[0], [1]])


def test_forms_of_prompts():
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}#"
    assert _token_ids([3, 4], None) == [3, 4] and _token_ids(torch.tensor([3, 4]), None) == [3, 4]
    assert _token_ids("ab", tokenizer) == [0, 1]
    assert _token_ids([{"role": "user", "content": "ab"}], tokenizer) == [0, 1, 63]
