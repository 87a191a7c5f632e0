"""PERF on the ragged path: work per round, reads per round, and counters that mean what they say."""

import copy
import json

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import checks
import hf_dspark
import tiny
from hf_dspark import DSparkForCausalLM
from hf_dspark.generation.twin import Twin
from hf_dspark.kernels import reference

ROWS = [[7, 21, 40], [1, 2, 3, 4, 5, 6, 7, 8], [9]]
SINGLE = {"cache_implementation": "static"}


class Work:
    """Tokens of each target forward, and rows of each backbone, context and head call of the draft."""

    def __init__(self, draft, patch):
        self.target, self.backbone, self.context, self.head = [], [], [], []
        original = Twin.forward

        def forward(twin, ids, *args):
            self.target.append(ids.shape[-1])
            return original(twin, ids, *args)

        patch.setattr(Twin, "forward", forward)
        rows = lambda into: lambda module, args: into.append(args[0].shape[:-1].numel())  # noqa: E731
        self.hooks = [
            draft.layers[-1].register_forward_pre_hook(rows(self.backbone)),
            draft.fc.register_forward_pre_hook(rows(self.context)),
            draft.lm_head.register_forward_pre_hook(rows(self.head)),
        ]

    def clear(self):
        """Forget what a first call did to build its engine."""
        for seen in (self.target, self.backbone, self.context, self.head):
            seen.clear()

    def close(self):
        for hook in self.hooks:
            hook.remove()


def steps_of(stats) -> list[list]:
    """Rounds grouped by the step that they shared."""
    steps: list[list] = []
    for here in stats.rounds:
        if not steps or here.row <= steps[-1][-1].row:
            steps.append([])
        steps[-1].append(here)
    return steps


def led(target, rows=ROWS, **settings):
    table = torch.zeros(tiny.V, tiny.V)
    for row in rows:
        text = checks.plain(target, row, max_new_tokens=30)[0].tolist()
        own = tiny.text_table(text)
        table = torch.where(own.any(-1, keepdim=True), own, table)
    return tiny.load_draft(*tiny.guided_files(table, **settings))


@pytest.mark.parametrize("rows", [ROWS, ROWS[:1]])
@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("confidence", [None, "markov"])
def test_perf_2_work_per_round(rows, sample, confidence, monkeypatch):
    """A step is one target forward over the verify tokens of living rows and one backbone forward over their blocks."""
    target = tiny.random_target("qwen3")
    draft = led(target, layers=2, confidence=confidence)
    options = {"max_new_tokens": 30, "do_sample": sample, "temperature": 0.7, "pad_token_id": 0}
    options |= {"eos_token_id": 58} | (SINGLE if len(rows) == 1 else {})
    work = Work(draft, monkeypatch)
    target.generate(**checks.batch(rows), assistant_model=draft, **options)
    work.clear()
    with hf_dspark.record() as stats:
        target.generate(**checks.batch(rows), assistant_model=draft, **options)
    work.close()
    steps = steps_of(stats)
    prompt = sum(map(len, rows))
    assert work.target == [prompt] + [sum(1 + r.verified for r in step) for step in steps]
    assert len(work.backbone) == len(work.head) == len(steps), "one backbone and one head call a step"
    most = [4 * len(rows)] * len(steps)
    assert all(found <= bound for found, bound in zip(work.head, most, strict=True)), "at most γ head rows a row"
    assert work.backbone == work.head
    assert work.context[0] == prompt and len(work.context) <= 1 + len(steps)
    bounds = [sum(1 + r.verified for r in step) for step in steps]
    assert all(found <= bound for found, bound in zip(work.context[1:], bounds, strict=False))


def test_perf_2_a_threshold_saves_verify_tokens(monkeypatch):
    target = tiny.perm_target()
    confidence = torch.full((tiny.V,), tiny.NEVER)
    draft = tiny.markov_draft(tiny.one_hot_table(tiny.NEXT), confidence=confidence)
    work = Work(draft, monkeypatch)
    checks.batch_equals_plain(target, draft, ROWS)
    work.clear()
    _, stats, _ = checks.batch_equals_plain(target, draft, ROWS, assistant_confidence_threshold=0.5)
    work.close()
    assert {r.verified for r in stats.rounds} == {0}
    assert work.target == [12] + [3] * 19


class CountReads(TorchDispatchMode):
    """Counts reads of one value from a tensor (`.item()`, `bool()`, `int()`), each a sync on an accelerator.

    Those of the reference attention do not count, since a kernel takes its place there.
    """

    reads = 0
    pauses = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.reads += func is torch.ops.aten._local_scalar_dense.default and not self.pauses
        return func(*args, **(kwargs or {}))

    def without(self, function):
        def paused(*args, **kwargs):
            self.pauses = True
            try:
                return function(*args, **kwargs)
            finally:
                self.pauses = False

        return paused


def reads_per_step(draft, rows, gamma: int, monkeypatch) -> float:
    target, options = tiny.perm_target(), {"do_sample": False, "pad_token_id": 0}
    options |= SINGLE if len(rows) == 1 else {}
    batch = checks.batch(rows)
    target.generate(**batch, assistant_model=draft, max_new_tokens=1 + 6 * (gamma + 1), **options)
    counts = []
    for new in (1 + 6 * (gamma + 1), 1 + 2 * (gamma + 1)):
        with CountReads() as count, monkeypatch.context() as patch:
            patch.setattr(reference, "ragged_attention", count.without(reference.ragged_attention))
            target.generate(**batch, assistant_model=draft, max_new_tokens=new, **options)
        counts.append(count.reads)
    return (counts[0] - counts[1]) / 4


def test_perf_2_host_reads_do_not_grow_with_block_or_batch(monkeypatch):
    """Stated number: at most four a step, and as many for a long block or for three rows as for one."""
    cases = (2, ROWS[:1]), (7, ROWS[:1]), (4, ROWS)
    counts = [reads_per_step(tiny.perm_draft(gamma), rows, gamma, monkeypatch) for gamma, rows in cases]
    assert counts[0] == counts[1] == counts[2] <= 4


def test_perf_4_statistics_of_each_call_and_of_all():
    """A batch and a static call in one record: per-call numbers by `.speculation`, sums by `record()`, both JSON."""
    target, draft = tiny.perm_target(), tiny.perm_draft()
    options = {"max_new_tokens": 11, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    with hf_dspark.record() as stats:
        outputs = [
            target.generate(**checks.batch(rows), assistant_model=draft, **more, **options)
            for rows, more in ((ROWS, {}), (ROWS[:1], SINGLE), (ROWS[1:], {}), (ROWS[:1], {}))
        ]
    assert [output.speculation.num_tokens for output in outputs] == [33, 11, 22, 11]
    assert [output.speculation.path for output in outputs] == ["ragged"] * 3 + ["plain"]
    assert (stats.calls, stats.num_tokens) == (4, 77)
    assert [sum(r.call == i for r in stats.rounds) for i in range(4)] == [6, 2, 4, 2]
    assert stats.mean_acceptance_length == 5.0
    for found in (stats, *(output.speculation for output in outputs)):
        assert json.loads(json.dumps(found.to_dict()))["num_rounds"] == found.num_rounds


@pytest.mark.parametrize("options", [{"max_new_tokens": 1}, {"max_new_tokens": 2}, {"eos_token_id": tiny.NEXT[40]},
                                     {"eos_token_id": tiny.chain(40, 2)[1]}])  # fmt: skip
@pytest.mark.parametrize("rows", [ROWS, ROWS[:1]])
def test_perf_6_counters_of_short_replies(rows, options):
    """Accepted never exceeds what was returned, in sum and in each row; no division by zero."""
    more = SINGLE if len(rows) == 1 else {}
    new, stats, _ = checks.batch_equals_plain(tiny.perm_target(), tiny.perm_draft(7), rows, **options, **more)
    for row, tokens in enumerate(new):
        assert sum(r.accepted for r in stats.rounds if r.row == row) <= max(0, len(tokens) - 1)
    if options == {"max_new_tokens": 1}:
        assert (stats.num_rounds, stats.mean_acceptance_length, stats.acceptance_rate) == (0, 0.0, 0.0)
        assert stats.acceptance_by_position == [None] * 7
    kinds = (stats.mean_acceptance_length, stats.acceptance_rate)
    assert all(isinstance(value, float) for value in kinds)
    json.dumps(stats.to_dict())


@pytest.mark.parametrize("rows", [ROWS, ROWS[:1]])
def test_perf_rounds_are_plain_numbers(rows):
    _, stats, _ = checks.batch_equals_plain(
        tiny.perm_target(), led(tiny.perm_target()), rows, **(SINGLE if len(rows) == 1 else {})
    )
    for here in stats.rounds:
        assert all(type(n) is int for n in (here.call, here.row, here.position, here.anchor, here.verified))
        assert all(type(token) is int for token in here.draft_tokens)
        assert len(here.confidence) == len(here.survival) == 4
        assert all(type(value) is float for value in (*here.confidence, *here.survival, here.milliseconds))
        product = 1.0
        for c, a in zip(here.confidence, here.survival, strict=True):
            product *= c
            assert a == pytest.approx(product, abs=1e-5)


def test_perf_temperatures_and_threshold_are_those_of_the_plain_path():
    """Calibrated temperatures reach c_k, a_j and the cut of each row."""
    target = tiny.random_target("qwen3", layers=3)
    draft: DSparkForCausalLM = copy.deepcopy(led(target, taps=(0, 1)))
    draft.config.confidence_temperatures = [0.5, 1.0, 2.0, 4.0]
    for threshold in (0.3, 0.5, 0.7):
        options = {"assistant_confidence_threshold": threshold}
        _, stats, _ = checks.batch_equals_plain(target, draft, ROWS, **options)
        for index, row in enumerate(ROWS):
            _, alone = checks.equal_to_plain(target, draft, row, **options)
            found = [r for r in stats.rounds if r.row == index]
            for here, there in zip(found, alone.rounds, strict=True):
                assert here.verified == there.verified
                torch.testing.assert_close(here.confidence, there.confidence, atol=1e-4, rtol=1e-4)
                torch.testing.assert_close(here.survival, there.survival, atol=1e-4, rtol=1e-4)


def test_perf_a_threshold_without_a_head_says_that_it_has_no_effect():
    draft = tiny.perm_draft()
    assert draft.confidence_head is None
    _, stats, _ = checks.batch_equals_plain(tiny.perm_target(), draft, ROWS, assistant_confidence_threshold=0.5)
    assert "no effect" in stats.reason and max(r.verified for r in stats.rounds) == 4
