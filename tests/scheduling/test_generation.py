"""`draft.scheduler` in generate(): exact text, lengths as scheduled, no drafts where they do not pay."""

import random

import pytest
import test_chi_squared as chi
import torch

import checks
import hf_dspark
import tiny
from hf_dspark import CostModel, PrefixScheduler
from hf_dspark.proposal import Proposer

ROWS = [[0], [1, 0, 1], [0, 0], [1]]


class Linear:
    """Every token costs; `share` of a one-token step is what one more token costs."""

    def __init__(self, share: float):
        self.share = share

    def steps_per_second(self, batch_tokens, num_rows):
        return 1000 / (1 + self.share * (batch_tokens / num_rows - 1))


def schedulers() -> list[PrefixScheduler]:
    costs = [Linear(0.02), Linear(0.4), Linear(3.0), CostModel({4: 1.0, 9: 1.1, 16: 2.5}, {4: 0.2})]
    return [PrefixScheduler(cost, lagged=lagged) for cost in costs for lagged in (False, True)]


@pytest.mark.parametrize("form", ["plain", "static", "batch", "processors"])
@pytest.mark.parametrize("index", [*range(8), "auto"])
def test_greedy_text_is_exact(index, form):
    rng = random.Random(f"{index} {form}")
    target = tiny.random_target("qwen3", layers=2)
    draft = tiny.random_draft(target, taps=(-1, 0), confidence="markov", seed=rng.randrange(9))
    draft.scheduler = index if index == "auto" else schedulers()[index]
    size = {"plain": 1, "static": 1}.get(form, 4)
    rows = [[rng.randint(1, 60) for _ in range(rng.randint(1, 9))] for _ in range(size)]
    options = {"max_new_tokens": 25, "do_sample": False, "pad_token_id": 0} | checks.batch(rows)
    options |= {"eos_token_id": [rng.randint(1, 60) for _ in range(3)]}
    options |= {"repetition_penalty": 1.3} if form == "processors" else {}
    expected = target.generate(**options)
    more = {"cache_implementation": "static"} if form == "static" else {}
    more |= {"assistant_confidence_threshold": 0.1} if rng.random() < 0.3 else {}
    output = target.generate(assistant_model=draft, return_dict_in_generate=True, **options, **more)
    assert torch.equal(output.sequences, expected)
    stats = output.speculation
    assert stats.path == ("plain" if form == "plain" else "ragged")
    assert ("auto" in stats.reason) == (form == "plain" and index == "auto")


@pytest.mark.parametrize("rows", [[[5, 17]], [[5, 17], [9, 33, 2]]])
@pytest.mark.parametrize("more", [{}, {"cache_implementation": "static"}])
def test_cheap_tokens_are_all_verified_and_dear_ones_are_not(rows, more):
    """Whole blocks where verifying is free; where it only costs, drafting stops and is tried again now and then."""
    target, draft = tiny.perm_target(), tiny.random_draft(confidence="markov")
    options = {"max_new_tokens": 60, "do_sample": False, "pad_token_id": 0} | checks.batch(rows) | more
    verified = {}
    for share in (0.0, 50.0):
        draft.scheduler = PrefixScheduler(Linear(share))
        with hf_dspark.record() as stats:
            target.generate(assistant_model=draft, **options)
        verified[share] = stats
        for here in stats.rounds:
            assert here.verified <= len(here.draft_tokens) in (0, 4)
            assert (here.confidence is None) == (not here.draft_tokens)
    assert verified[0.0].num_verified >= verified[0.0].num_drafted - (1 + 2 + 3 + 4) * len(rows)
    assert verified[50.0].num_verified == 0
    assert any(not r.draft_tokens for r in verified[50.0].rounds) and any(r.draft_tokens for r in verified[50.0].rounds)


def test_what_cannot_schedule():
    target, draft = tiny.perm_target(), tiny.perm_draft(confidence=None)
    draft.scheduler = PrefixScheduler(Linear(50.0))
    _, stats = checks.generate(target, draft, [5, 17])
    assert "no confidence head" in stats.reason and stats.num_verified > 0
    for wrong in ("always", 3, Linear(1.0)):
        draft.scheduler = wrong
        with pytest.raises(ValueError, match="draft.scheduler"):
            checks.generate(target, draft, [5, 17])


# ---- the paper's Appendix A, end to end at batch 4


class PaperCosts:
    def steps_per_second(self, batch_tokens, num_rows):
        here = batch_tokens / num_rows
        return 1 - 0.5 * (here - 1) if here <= 2 else 0.5 - 0.05 * (here - 2)


class Hindsight(PrefixScheduler):
    """The anticipating variant: for each row the number of drafts that is best by current survivals."""

    def fresh(self):
        return self

    def schedule(self, survival, budget=None):
        speeds = [self.cost_model.steps_per_second(n + 1, 1) for n in range(survival.shape[1] + 1)]
        theta = [[(1 + float(a[:n].sum())) * speed for n, speed in enumerate(speeds)] for a in survival]
        return [values.index(max(values)) for values in theta]


DECIDE = {
    "exact": lambda: {"scheduler": PrefixScheduler(PaperCosts())},
    "lagged": lambda: {"scheduler": PrefixScheduler(PaperCosts(), lagged=True)},
    "cheap": lambda: {"scheduler": PrefixScheduler(Linear(0.3))},
    "threshold": lambda: {"assistant_confidence_threshold": 0.5},
    "hindsight": lambda: {"scheduler": Hindsight(PaperCosts())},
}


def first_of_round(decide: str, rows: list[list[int]], monkeypatch, **more) -> torch.Tensor:
    """Counts of the tokens 0 and 1 that rounds put at their first slot; a_1 = .8, and c_2 likes x_1 = 0."""

    def confidence_logits(self, backbone, anchors, tokens):
        c = torch.where(tokens[:, :1] == 0, torch.tensor([0.8, 0.9]), torch.tensor([0.8, 0.1]))
        return c.logit()

    monkeypatch.setattr(Proposer, "confidence_logits", confidence_logits)
    monkeypatch.setattr("hf_dspark.scheduling.scheduler.PROBE_ROUNDS", 10**6)  # the example has no parking
    size = chi.SIZE
    table, halves = torch.full((size, size), -1e4), torch.full((size, size), -1e4)
    table[:, :2], halves[:, :2] = torch.tensor([0.7, 0.3]).log(), torch.tensor([0.5, 0.5]).log()
    target = tiny.table_target(table, layers=1, mask=None, max_position_embeddings=4096)
    draft = tiny.markov_draft(
        halves, confidence=torch.zeros(size), target_hidden=size, taps=(-1,), mask=size - 1, gamma=2
    )
    options = {"do_sample": True, "max_new_tokens": 700, "top_k": 0, "pad_token_id": 0} | DECIDE[decide]() | more
    draft.scheduler = options.pop("scheduler", None)
    torch.manual_seed(0)
    with hf_dspark.record() as stats:
        target.generate(**checks.batch(rows), assistant_model=draft, **options)
    first = [r.draft_tokens[0] if r.accepted else r.next_token for r in stats.rounds if r.next_token is not None]
    assert stats.path == ("plain" if len(rows) == 1 else "ragged")
    return torch.bincount(torch.tensor(first), minlength=2)[None]


@pytest.mark.parametrize("rows", [ROWS, ROWS[:1]], ids=["batch", "plain"])
@pytest.mark.parametrize("decide", DECIDE)
def test_appendix_a(decide, rows, monkeypatch):
    right = torch.tensor([[0.7, 0.3]])
    counts = first_of_round(decide, rows, monkeypatch)
    if decide == "hindsight":
        assert chi.p_value(counts, right) < chi.WRONG
    else:
        assert chi.p_value(counts, right) > chi.SURE


@pytest.mark.parametrize("decide", DECIDE)
def test_appendix_a_with_processors_between_the_forwards(decide, monkeypatch):
    """Epsilon sampling is no warper of the device, so the host decides."""
    counts = first_of_round(decide, ROWS, monkeypatch, epsilon_cutoff=1e-4)
    p = chi.p_value(counts, torch.tensor([[0.7, 0.3]]))
    assert p < chi.WRONG if decide == "hindsight" else p > chi.SURE
