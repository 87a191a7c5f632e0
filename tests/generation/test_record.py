"""Statistics: who sees which call."""

import asyncio
import functools
import json
import threading
from dataclasses import replace

import pytest
import torch
from transformers import StoppingCriteria

import checks
import hf_dspark
import tiny
from hf_dspark.generation.rounds import Rounds

PROMPT = [7, 21, 40]


@functools.cache
def pair():
    return tiny.perm_target(), tiny.perm_draft()


def run(prompt=PROMPT, **options):
    target, draft = pair()
    return target.generate(
        checks.tensor(prompt), assistant_model=draft, do_sample=False, **({"max_new_tokens": 11} | options)
    )


def test_rounds_are_plain_numbers_in_order():
    with hf_dspark.record() as stats:
        run()
    chain = tiny.chain(40, 11)
    first, second = stats.rounds
    assert (first.call, first.row, first.position, first.anchor) == (0, 0, 3, chain[0])
    assert first.draft_tokens == chain[1:5] and (first.verified, first.accepted, first.next_token) == (4, 4, chain[5])
    assert (second.position, second.anchor, second.next_token) == (8, chain[5], chain[10])
    assert first.milliseconds > 0 and isinstance(first.milliseconds, float)
    assert type(first.accepted) is int and type(first.draft_tokens[0]) is int
    assert (stats.calls, stats.path, stats.captured) == (1, "plain", False) and stats.reason
    assert stats.acceptance_by_position == [1.0] * 4 and stats.mean_acceptance_length == 5.0
    found = json.loads(json.dumps(stats.to_dict()))
    assert found["num_tokens"] == 11 and found["rounds"][1]["position"] == 8


def test_calls_add_up_and_records_nest():
    with hf_dspark.record() as outer:
        run()
        with hf_dspark.record() as inner:
            run(max_new_tokens=6)
        run(max_new_tokens=1)
    run()
    assert [r.call for r in outer.rounds] == [0, 0, 1] and [r.call for r in inner.rounds] == [0]
    assert (outer.calls, inner.calls) == (3, 1)
    assert (outer.num_tokens, inner.num_tokens) == (18, 6)
    assert outer.num_accepted + outer.num_rounds == 18 - 3


def test_return_dict_carries_the_statistics_of_that_call_alone():
    with hf_dspark.record() as stats:
        first = run(return_dict_in_generate=True)
        second = run(return_dict_in_generate=True, max_new_tokens=6)
    assert (first.speculation.num_rounds, second.speculation.num_rounds) == (2, 1)
    assert [r.call for r in second.speculation.rounds] == [0] and stats.calls == 2
    assert first.speculation.num_tokens == 11
    assert not hasattr(
        tiny.perm_target().generate(checks.tensor(PROMPT), max_new_tokens=3, return_dict_in_generate=True),
        "speculation",
    )


def test_rounds_fill_while_the_call_runs():
    seen = []

    class Watch(checks.ListStreamer):
        def put(self, value):
            super().put(value)
            seen.append(len(stats.rounds))

    with hf_dspark.record() as stats:
        run(streamer=Watch())
    assert seen[-1] == 1 and len(stats.rounds) == 2


def test_threads_do_not_mix():
    pair()  # transformers does not load models from several threads at once
    found = {}

    def work(tokens):
        with hf_dspark.record() as stats:
            for _ in range(3):
                run(max_new_tokens=tokens)
        found[tokens] = (stats.calls, stats.num_tokens)

    with hf_dspark.record() as outside:
        threads = [threading.Thread(target=work, args=(tokens,)) for tokens in (2, 7, 12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {2: (3, 6), 7: (3, 21), 12: (3, 36)}
    assert outside.calls == 0


def test_async_tasks_do_not_mix():
    async def work(tokens):
        with hf_dspark.record() as stats:
            for _ in range(2):
                await asyncio.sleep(0)
                run(max_new_tokens=tokens)
                await asyncio.sleep(0)
        return stats.calls, stats.num_tokens

    async def both():
        return await asyncio.gather(work(3), work(8))

    assert asyncio.run(both()) == [(2, 6), (2, 16)]


def test_batch_of_records_from_one_draft_with_confidence():
    draft = tiny.random_draft()
    with hf_dspark.record() as stats:
        checks.plain(tiny.random_target(), PROMPT, assistant_model=draft, max_new_tokens=6)
    for here in stats.rounds:
        assert len(here.confidence) == len(here.survival) == 4
        assert all(0 <= c <= 1 for c in here.confidence)
        torch.testing.assert_close(torch.tensor(here.survival), torch.tensor(here.confidence).cumprod(0))
    expected = [1 + sum(r.survival[: r.verified]) for r in stats.rounds]
    assert abs(stats.expected_acceptance_length - sum(expected) / len(expected)) < 1e-5


class LooksOn(StoppingCriteria):
    """What the statistics hold at every token."""

    def __init__(self, stats):
        self.stats, self.seen = stats, []

    def put(self, value):
        self.seen.append(len(self.stats.rounds))

    def end(self):
        self.seen.append(len(self.stats.rounds))

    def __call__(self, input_ids, scores, **kwargs):
        self.put(None)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class Dear:
    """A half of the drafts is worth verifying."""

    def steps_per_second(self, batch_tokens, num_rows):
        return 1 / (1 + 0.25 * batch_tokens / num_rows)


@pytest.mark.parametrize("scheduler", [None, "exact", "lagged", "parks"])
def test_the_fast_path_notes_the_same_rounds_whether_somebody_looks_on_or_not(scheduler):
    target, draft = tiny.perm_target(), tiny.random_draft(confidence="markov")
    if scheduler is not None:
        costs = hf_dspark.CostModel({b: 9.0 * b for b in range(1, 16)}, {3: 9.0}) if scheduler == "parks" else Dear()
        draft.scheduler = hf_dspark.PrefixScheduler(costs, lagged=scheduler != "exact")
    rows = [PROMPT, [5], [9, 9]]
    options = {"do_sample": False, "max_new_tokens": 30, "assistant_model": draft, "pad_token_id": 0}
    found = {}
    for name, given in (("nobody", rows), ("criterion", rows), ("alone", rows[:1]), ("streamer", rows[:1])):
        with hf_dspark.record() as stats:
            looks = LooksOn(stats)
            more = {"streamer": looks} if name == "streamer" else {}
            more |= {"stopping_criteria": [looks]} if name == "criterion" else {}
            target.generate(**checks.batch(given), **options, **more, cache_implementation="static")
        assert stats.path == "ragged"
        found[name] = [replace(r, milliseconds=0.0) for r in stats.rounds]
        assert not looks.seen or set(looks.seen) >= {n * len(given) for n in range(len(stats.rounds) // len(given))}
    assert found["nobody"] == found["criterion"] and found["alone"] == found["streamer"]
    assert len(found["alone"]) > 20
    assert ({r.verified for r in found["alone"][:-4]} == {4}) == (scheduler is None)
    assert any(not r.draft_tokens for r in found["alone"]) == (scheduler == "parks")


def test_the_fast_path_notes_the_rows_before_one_whose_criterion_fails():
    target, draft = pair()

    class Fails(StoppingCriteria):
        calls = 0

        def __call__(self, input_ids, scores, **kwargs):
            self.calls += 1
            if self.calls == 12:
                raise KeyboardInterrupt
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    rows, options = [PROMPT, [5], [9, 9]], {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    with hf_dspark.record() as stats, pytest.raises(KeyboardInterrupt):
        target.generate(**checks.batch(rows), **options, assistant_model=draft, stopping_criteria=[Fails()])
    assert [r.row for r in stats.rounds] == [0] and stats.num_tokens == 3 + 5


def test_what_only_a_scheduler_wanted_to_know_cannot_fail_a_finished_call():
    """The cost model is asked while a later round runs, so not for the last one."""

    class Fails:
        def steps_per_second(self, batch_tokens):
            raise RuntimeError("no costs")

    target, draft = tiny.perm_target(), tiny.random_draft(confidence="markov")
    draft.scheduler = hf_dspark.PrefixScheduler(Fails(), lagged=True)
    inputs = checks.batch([PROMPT, [5]]) | {"do_sample": False, "pad_token_id": 0, "assistant_model": draft}
    with hf_dspark.record() as stats:
        target.generate(**inputs, max_new_tokens=2)
    assert stats.num_rounds == 2 and stats.num_tokens == 4
    with hf_dspark.record() as stats, pytest.raises(RuntimeError, match="no costs"):
        target.generate(**inputs, max_new_tokens=20)
    assert stats.num_rounds == 2


def test_the_fast_path_notes_the_last_round_before_an_interrupt(monkeypatch):
    target, draft = pair()
    start = Rounds.start

    def interrupted(self, *args, **more):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(None)
        return start(self, *args, **more)

    done: list[None] = []
    monkeypatch.setattr(Rounds, "start", interrupted)
    with hf_dspark.record() as stats, pytest.raises(KeyboardInterrupt):
        target.generate(
            **checks.batch([PROMPT, [5]]), assistant_model=draft, max_new_tokens=40, do_sample=False, pad_token_id=0
        )
    assert [r.row for r in stats.rounds] == [0, 1, 0, 1]
