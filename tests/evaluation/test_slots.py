"""What rounds say about each position, against rounds written by hand and an independent simulation."""

import torch

from hf_dspark import Round, SpeculationStats
from hf_dspark.evaluation import slots

C = [0.9, 0.5, 0.8, 0.2]


def round_of(accepted, verified=4, next_token=1, confidence=C):
    survival = torch.tensor(confidence, dtype=torch.float64).cumprod(0).tolist() if confidence else None
    return Round(
        call=0, row=0, position=5, anchor=1, draft_tokens=[1, 2, 3, 4], confidence=confidence, survival=survival,
        verified=verified, accepted=accepted, next_token=next_token, milliseconds=1.0,
    )  # fmt: skip


def test_tried_slots():
    assert slots.num_tried(round_of(2)) == 3  # x_3 was rejected
    assert slots.num_tried(round_of(4)) == 4  # all passed
    assert slots.num_tried(round_of(2, verified=2)) == 2  # the block was cut
    assert slots.num_tried(round_of(2, next_token=None)) == 2  # x_2 ended the text, x_3 was not tried
    rounds = [round_of(2), round_of(4), round_of(0), round_of(2, next_token=None)]
    assert slots.tried_by_position(rounds) == [4, 3, 2, 1]
    assert slots.tried_by_position([]) == []


def test_counts_agree_with_the_statistics():
    generator = torch.Generator().manual_seed(0)
    rounds = []
    for _ in range(200):
        verified = int(torch.randint(0, 5, (), generator=generator))
        accepted = int(torch.randint(0, verified + 1, (), generator=generator))
        ended = accepted > 0 and float(torch.rand((), generator=generator)) < 0.2
        rounds.append(round_of(accepted, verified, None if ended else 1))
    rates = SpeculationStats(rounds=rounds).acceptance_by_position
    for k, tried in enumerate(slots.tried_by_position(rounds)):
        _, labels = slots.conditional_outcomes(rounds, k)
        assert len(labels) == tried and sum(labels) / tried == rates[k]


def test_outcomes_of_survival_know_what_a_rejection_settles():
    rounds = [round_of(1), round_of(1, next_token=None), round_of(3, verified=3)]
    assert [slots.survival_outcomes(rounds, k)[1] for k in range(4)] == [[1, 1, 1], [0, 1], [0, 1], [0]]
    assert slots.survival_outcomes(rounds, 1)[0] == [0.45, 0.45]
    assert slots.conditional_outcomes(rounds, 1) == ([0.5, 0.5], [0, 1])


def test_quality_of_a_calibrated_head_and_of_one_that_is_not():
    generator = torch.Generator().manual_seed(0)
    honest, boasting = [], []
    for _ in range(4000):
        c = (0.2 + 0.7 * torch.rand(4, generator=generator)).tolist()
        passed = [float(torch.rand((), generator=generator)) < p for p in c]
        accepted = next((k for k, ok in enumerate(passed) if not ok), 4)
        honest.append(round_of(accepted, confidence=c))
        boasting.append(round_of(accepted, confidence=[p**0.3 for p in c]))
    good, bad = slots.confidence_by_position(honest), slots.confidence_by_position(boasting)
    assert [at["position"] for at in good] == [1, 2, 3, 4]
    for right, wrong in zip(good, bad, strict=True):
        for key in ("c", "a"):
            assert right[key]["count"] == wrong[key]["count"]
            assert right[key]["ece"] < 0.09 and wrong[key]["ece"] > 2 * right[key]["ece"]
            assert right[key]["brier"] < wrong[key]["brier"]
            assert right[key]["auroc"] > 0.6
        assert right["c"]["auroc"] == wrong["c"]["auroc"]
    for bins in slots.reliability(honest).values():
        assert all(abs(b["predicted"] - b["accepted"]) < 0.07 for b in bins if b["count"] > 200)
    assert sum(b["count"] for b in slots.reliability(honest)["c"]) == sum(slots.tried_by_position(honest))


def test_no_confidence_head():
    rounds = [round_of(2, confidence=None)]
    assert slots.confidence_by_position(rounds) is None
    assert slots.reliability(rounds) is None and slots.threshold_curve(rounds) is None
    assert slots.confidence_by_position([]) is None


def test_threshold_curve_by_hand():
    rounds = [round_of(3), round_of(1), round_of(2, next_token=None)]
    curve = {point["threshold"]: point for point in slots.threshold_curve(rounds, steps=10)}
    # Whole blocks: 3 + 1, 1 + 1 and 2 tokens, the last without one of the target's own.
    assert curve[0.0]["tokens_per_step"] == 8 / 3 and curve[0.0]["verified_per_step"] == 4
    assert curve[0.0]["draft_acceptance_rate"] == 6 / 12
    # Cut before slot 2: one draft and the target's own token each.
    assert curve[0.6]["tokens_per_step"] == 2 and curve[0.6]["draft_acceptance_rate"] == 1
    # Cut before slot 4, which changes nothing but the cost.
    assert curve[0.3]["tokens_per_step"] == 8 / 3 and curve[0.3]["verified_per_step"] == 3
    assert curve[1.0]["tokens_per_step"] == 1 and curve[1.0]["draft_acceptance_rate"] is None
