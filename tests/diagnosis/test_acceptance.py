"""What the shape of acceptance, the confidence and the length of texts are taken to mean."""

import pytest

from hf_dspark.diagnosis.acceptance import by_length, check_acceptance, shape
from hf_dspark.generation.record import Round


def rounds_like(accepted: list[int], gamma: int = 4, position: int = 10, confidence: float | None = None):
    survival = None if confidence is None else [confidence ** (k + 1) for k in range(gamma)]
    c = None if confidence is None else [confidence] * gamma
    return [Round(0, 0, position, 1, [2] * gamma, c, survival, gamma, n, 3, 1.0) for n in accepted]


SHAPES = {
    "healthy": [0.9, 0.85, 0.8, 0.8], "never": [0.02, None, None, None], "first only": [0.9, 0.01, None, None],
    "falling": [0.8, 0.5, 0.3, 0.2], "low": [0.2, 0.2, 0.2, 0.2],
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name):
    assert shape(SHAPES[name], [100, 60, 40, 20]) == name


def test_few_rounds_prove_nothing():
    assert shape([0.0, None], [3, 0]) == "healthy"


def test_answers_without_rounds_say_nothing_about_acceptance():
    (finding,), measured = check_acceptance([], 4)
    assert finding.level == "note" and "no rounds" in finding.seen
    assert measured["num_rounds"] == 0 and measured["acceptance_by_position"] == [None] * 4


def test_low_acceptance_is_a_problem_and_good_acceptance_is_none():
    (bad,), measured = check_acceptance(rounds_like([0] * 40), 4)
    assert bad.level == "problem" and "τ = 1.00" in bad.seen and bad.fix
    assert measured["acceptance_by_position"] == [0.0, None, None, None]
    (good,), _ = check_acceptance(rounds_like([4, 3, 4, 2] * 10), 4)
    assert good.level == "ok" and not good.fix


def test_a_draft_that_is_sure_of_what_is_rejected():
    findings, _ = check_acceptance(rounds_like([0] * 40, confidence=0.95), 4)
    assert "sure of drafts" in findings[1].seen
    findings, _ = check_acceptance(rounds_like([0] * 40, confidence=0.05), 4)
    assert "knows that it guesses" in findings[1].seen
    findings, _ = check_acceptance(rounds_like([4, 3, 4, 2] * 10, confidence=0.9), 4)
    assert len(findings) == 1


def test_acceptance_that_falls_with_the_length_of_the_text():
    short, long = rounds_like([4] * 20), rounds_like([1] * 20, position=5000)
    findings, _ = check_acceptance(short + long, 4)
    assert "behind 4096 tokens" in findings[1].seen and "context_window" in findings[1].fix
    assert [part["from"] for part in by_length(short + long)] == [0, 4096]
    assert len(check_acceptance(short + rounds_like([3] * 20, position=5000), 4)[0]) == 1
