"""`CostModel`: the staircase, its extrapolation, monotone tables, medians of a fake timer, files, the plot."""

import copy
import json
import random
import sys
import time

import pytest

import checks
import hf_dspark
import tiny
from hf_dspark.generation.engine import Engine
from hf_dspark.generation.engines import engine_of
from hf_dspark.scheduling.cost_model import CostModel
from hf_dspark.scheduling.scheduler import PrefixScheduler


def test_staircase_inside_and_a_line_above():
    model = CostModel({8: 2.0, 1: 1.0, 16: 4.0}, {1: 0.5, 4: 1.0})
    milliseconds = {b: 1000 / model.steps_per_second(b) - 0.5 for b in (1, 2, 8, 9, 16, 17, 32)}
    expected = {1: 1.0, 2: 2.0, 8: 2.0, 9: 4.0, 16: 4.0, 17: 4.25, 32: 8.0}
    assert milliseconds == pytest.approx(expected)
    assert 1000 / model.steps_per_second(8, num_rows=1) == pytest.approx(2.5)
    assert 1000 / model.steps_per_second(8, num_rows=2) == pytest.approx(3.0)
    assert 1000 / model.steps_per_second(8, num_rows=7) == pytest.approx(2.0 + 1.5)
    assert 1000 / model.plain_steps_per_second(8) == pytest.approx(2.0), "no draft"
    assert isinstance(model.steps_per_second(8, 2), float)


def test_the_time_of_the_host_counts_for_rounds_with_and_without_drafts():
    model = CostModel({8: 2.0, 16: 4.0}, {1: 0.5}).with_host({4: 1.5, 8: 3.0})
    assert 1000 / model.steps_per_second(16, num_rows=3) == pytest.approx(4.0 + 1.5 + 1.5)
    assert 1000 / model.steps_per_second(8) == pytest.approx(2.0 + 0.5 + 1.5)
    assert 1000 / model.plain_steps_per_second(8) == pytest.approx(2.0 + 3.0)


def test_many_sizes_at_once_are_the_same():
    rng = random.Random(0)
    for sizes in (1, 2, 9):
        tables = [{size: rng.uniform(0.1, 5) for size in rng.sample(range(1, 60), sizes)} for _ in range(3)]
        for model in (CostModel(tables[0]), CostModel(*tables[:2]), CostModel(*tables[:2], None, tables[2])):
            for rows in (1, 7, 70):
                asked = range(rows, 90)
                expected = [model.steps_per_second(b, rows) for b in asked]
                assert model.speeds(asked, rows).tolist() == pytest.approx(expected)


def test_one_size_goes_on_from_the_origin():
    assert 1000 / CostModel({8: 2.0}).steps_per_second(24) == pytest.approx(6.0)


def test_more_work_never_costs_less():
    rng = random.Random(0)
    for _ in range(50):
        table = {size: rng.uniform(0.1, 5) for size in rng.sample(range(1, 200), 12)}
        model = CostModel(table, table)
        speeds = [model.steps_per_second(b, num_rows=b) for b in range(1, 300)]
        assert all(later <= earlier for earlier, later in zip(speeds, speeds[1:], strict=False))
        assert all(model.verify_ms[size] == min(table[larger] for larger in table if larger >= size) for size in table)
    assert CostModel({1: 1.0, 3: 2.0, 2: 3.0, 4: 4.0}).verify_ms == {1: 1.0, 2: 2.0, 3: 2.0, 4: 4.0}


class FakeTimer:
    """Known costs; of five runs of a size one is far too slow and one too fast."""

    def __init__(self):
        self.runs = {}

    def _time(self, kind, count, milliseconds):
        self.runs.setdefault((kind, count), []).append(milliseconds)
        return milliseconds * {1: 40.0, 3: 0.1}.get(len(self.runs[kind, count]), 1.0)

    def verify(self, num_tokens):
        # A captured graph of 2, 4, 8, … tokens.
        return self._time("verify", num_tokens, 1.0 + 0.1 * (1 << (num_tokens - 1).bit_length()))

    def draft(self, num_rows):
        return self._time("draft", num_rows, 0.3 + 0.01 * num_rows)


def test_measure_takes_medians():
    timer = FakeTimer()
    model = CostModel.measure(timer, token_counts=[8, 3, 4, 3], row_counts=(2, 1), environment={"device": "fake"})
    assert model.verify_ms == pytest.approx({3: 1.4, 4: 1.4, 8: 1.8})
    assert model.draft_ms == pytest.approx({1: 0.31, 2: 0.32})
    assert {len(runs) for runs in timer.runs.values()} == {5}
    for wrong in ({"token_counts": []}, {"row_counts": []}, {"repeats": 0}):
        with pytest.raises(ValueError, match="Nothing to measure"):
            CostModel.measure(timer, **({"token_counts": [1], "row_counts": [1]} | wrong))


def test_profile_measures_every_length_of_every_batch():
    target, draft = tiny.perm_target(), tiny.perm_draft(gamma=4)
    model = CostModel.profile(target, draft, batch_sizes=(3, 1), context_length=20)
    assert list(model.verify_ms) == [1, 2, 3, 4, 5, 6, 9, 12, 15] and list(model.draft_ms) == [1, 3]
    assert list(model.host_ms) == [1, 3] and draft.scheduler is None
    assert model.environment["gamma"] == 4 and model.environment["context_length"] == 20
    assert {"torch", "transformers", "python"} <= set(model.environment["versions"])
    for wrong in ({"batch_sizes": ()}, {"batch_sizes": (0,)}, {"context_length": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            CostModel.profile(target, draft, **({"batch_sizes": (1,), "context_length": 8} | wrong))


def test_json_round_trip(tmp_path):
    model = CostModel({1: 1.5, 8: 2.25}, {1: 0.5}, {"device": "x", "versions": {"torch": "2"}}, {1: 0.1})
    path = tmp_path / "costs.json"
    model.to_json(path)
    again = CostModel.from_json(path)
    tables = ("verify_ms", "draft_ms", "host_ms")
    assert [getattr(again, name) for name in tables] == [getattr(model, name) for name in tables]
    assert again.environment == model.environment
    content = json.loads(path.read_text())
    assert content["verify_ms"] == {"1": 1.5, "8": 2.25}
    del content["host_ms"]  # as files of earlier versions
    path.write_text(json.dumps(content))
    assert CostModel.from_json(path).host_ms == {}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"verify_ms": {"a": 1}, "draft_ms": {}}', '{"verify_ms": 3}'])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="not a cost table"):
        CostModel.from_json(path)


def test_wrong_tables_and_sizes_are_refused():
    for table in ({}, {0: 1.0}, {1: 0.0}, {1: float("nan")}, {1: -1.0}):
        with pytest.raises(ValueError, match="verify_ms"):
            CostModel(table)
    model = CostModel({1: 1.0}, {1: 1.0})
    with pytest.raises(ValueError, match="batch_tokens"):
        model.steps_per_second(0)
    with pytest.raises(ValueError, match="num_rows"):
        model.steps_per_second(1, num_rows=0)


def test_the_scheduler_follows_the_measured_costs():
    """A flat curve is verified whole; where it rises, less is; where even nothing pays, drafting stops."""
    survival = [[0.8, 0.5, 0.3, 0.2]] * 4
    flat = CostModel({4: 5.0, 20: 5.0}, {4: 1.0})
    rising = CostModel({b: 2 + 0.5 * b for b in range(4, 21)}, {4: 1.0})
    steep = CostModel({b: 1.0 * b for b in range(4, 21)}, {4: 1.0})
    lengths = [PrefixScheduler(costs).schedule(survival) for costs in (flat, rising, steep)]
    assert lengths == [[4] * 4, [1] * 4, [0] * 4]
    scheduler = PrefixScheduler(CostModel({4: 5.0, 20: 5.0}, {4: 20.0}))
    drafted = 0
    for _ in range(20):
        if scheduler.should_draft():
            drafted += 1
            scheduler.schedule(survival)
    assert drafted == 8


def test_plot_and_its_missing_library(tmp_path, monkeypatch):
    model = CostModel({1: 1.5, 8: 2.25}, {1: 0.5, 2: 0.6}, {"device": "x", "target": "y"}, {2: 0.1})
    pytest.importorskip("matplotlib")
    figure = model.plot(tmp_path / "costs.png")
    assert (tmp_path / "costs.png").stat().st_size > 1000
    assert [len(axes.lines[0].get_xdata()) for axes in figure.axes] == [2, 2, 1]
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"hf-dspark\[eval\]"):
        model.plot()


def test_a_slow_host_makes_whole_blocks_worth_it():
    """What verifying saves on the device is a small part of such a round."""
    survival = [[0.9, 0.5, 0.2, 0.1]] * 4
    costs = CostModel({b: 0.1 + 0.01 * b for b in range(4, 21)}, {4: 0.05})
    assert sum(PrefixScheduler(costs).schedule(survival)) < 16
    assert sum(PrefixScheduler(costs.with_host({4: 5.0})).schedule(survival)) == 16


def test_auto_counts_the_time_of_the_host_in_the_last_call(monkeypatch):
    target, draft = tiny.perm_target(), tiny.random_draft(confidence="markov")
    draft.scheduler, seen = "auto", []
    cost_model = Engine.cost_model
    monkeypatch.setattr(Engine, "cost_model", lambda *args: seen.append(cost_model(*args)) or seen[-1])
    for _ in range(2):
        target.generate(**checks.batch([[5, 17], [9, 33, 2]]), assistant_model=draft, max_new_tokens=30, pad_token_id=0)
    first, second = (costs.host_ms for costs in seen)
    assert first == {} and list(second) == [2] and 0 < second[2] < 1000


def test_the_time_of_the_host_is_that_of_calls_that_nobody_watches():
    """A streamer's time is its own; a handful of rounds says little."""
    target, draft = tiny.perm_target(), tiny.bad_draft()

    class Slow:
        def put(self, value):
            time.sleep(0.01)

        def end(self):
            pass

    def host_ms(**options):
        checks.generate(target, draft, [5, 17], cache_implementation="static", **options)
        return dict(engine_of(target, draft).host_ms)

    assert host_ms(max_new_tokens=3) == {} and host_ms(max_new_tokens=12, streamer=Slow()) == {}
    once = host_ms(max_new_tokens=12)
    assert 0 < once[1] < 10 and host_ms(max_new_tokens=12, streamer=Slow()) == once


def test_profile_does_not_depend_on_how_the_target_generates_by_default():
    """Nor does anybody's record see its calls."""
    target, draft = copy.deepcopy(tiny.perm_target()), tiny.perm_draft()
    target.generation_config.update(num_beams=4, repetition_penalty=1.3, num_return_sequences=2, eos_token_id=0)
    own = copy.deepcopy(target.generation_config)
    with hf_dspark.record() as stats:
        model = CostModel.profile(target, draft, batch_sizes=(2,), context_length=8)
    assert list(model.host_ms) == [2] and stats.calls == 0
    assert target.generation_config == own and draft.scheduler is None
