"""The test of uniform places that stands behind `--chi-squared`."""

import torch

import tiny
from hf_dspark.diagnosis.sampling import token_places, uniformity


def test_uniform_numbers_pass_and_others_fail():
    assert uniformity(torch.rand(2000, dtype=torch.float64))[0] > 1e-3
    assert uniformity(torch.rand(2000, dtype=torch.float64) ** 1.5)[0] < 1e-8


def test_p_value_is_that_of_scipy():
    from scipy.stats import chi2

    places = torch.rand(500, dtype=torch.float64)
    p, statistic = uniformity(places)
    assert abs(p - chi2.sf(statistic, 19)) < 1e-9


def test_places_of_plain_samples_are_uniform():
    target = tiny.table_target(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)), mask=None)
    prompt = torch.tensor([[5, 9]])
    text = target.generate(prompt, do_sample=True, max_new_tokens=400, top_k=0)
    places = token_places(target, text, 2)
    assert len(places) == 400 and 0 <= places.min() and places.max() <= 1 and uniformity(places)[0] > 1e-3
    greedy = target.generate(prompt, do_sample=False, max_new_tokens=100)
    assert token_places(target, greedy, 2).mean() < 0.2, "likely tokens lie at the low end"
