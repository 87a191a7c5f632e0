"""Rounds that start before the last one is read: the same texts and decisions, whatever ends in between."""

import copy
import threading
import types

import pytest
import test_chi_squared as chi
import torch
from transformers import TextStreamer

import checks
import hf_dspark
import tiny
from hf_dspark.generation import device_round, engine, graphs
from hf_dspark.generation.device_round import DeviceRounds
from hf_dspark.generation.engine import Engine, FastPath
from hf_dspark.generation.engines import engine_of
from hf_dspark.generation.graphs import TURN, Graphs, RecordingFailed, Turn
from hf_dspark.generation.rounds import Rounds, Running
from hf_dspark.scheduling.scheduler import PrefixScheduler

ROWS = [[5, 9, 11, 3, 8], [40, 7], [3, 30, 31, 17, 2, 12, 50], [21]]


class Overwriting(Graphs):
    """As on a GPU: the results of a recording lie where those of its last run were."""

    def __init__(self, *args):
        super().__init__(*args)
        self.kept: dict = {}

    def run(self, key, function, static=True):
        with TURN:
            outputs = function()
        if key[0] != "round":
            return outputs
        kept = self.kept.setdefault(key, torch.empty_like(outputs))
        assert kept.shape == outputs.shape
        return kept.copy_(outputs)


@pytest.fixture
def log(monkeypatch):
    """What happened: "start" of a round, "read" of its results."""
    seen, start, wait = [], Running.__init__, Running.wait
    monkeypatch.setattr(Running, "__init__", lambda self, *args: (seen.append("start"), start(self, *args))[1])
    monkeypatch.setattr(Running, "wait", lambda self: (seen.append("read"), wait(self))[1])
    monkeypatch.setattr(engine, "Graphs", Overwriting)
    monkeypatch.setattr(Engine, "_why_uncaptured", lambda self, *pair: "" if self._options.capture else "as asked")
    return seen


def ahead(draft, is_on=True):
    draft.fast_path = FastPath(compile=False, ahead=is_on)
    return draft


def pair(**draft):
    target = copy.deepcopy(tiny.random_target("qwen3", layers=2))
    return target, tiny.random_draft(target, taps=(-1, 0), confidence="markov", **draft)


def run(target, draft, rows=ROWS, **options):
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0} | options
    torch.manual_seed(5)
    with hf_dspark.record() as stats:
        ids = target.generate(**checks.batch(rows), assistant_model=draft, **options)
    assert stats.path == "ragged" and stats.captured
    decisions = [(r.row, r.position, r.anchor, r.draft_tokens, r.verified, r.accepted) for r in stats.rounds]
    return ids.tolist(), sorted(decisions), stats


def most_at_work(log):
    found = at_work = 0
    for what in log:
        at_work += 1 if what == "start" else -1
        found = max(found, at_work)
    assert at_work == 0
    return found


def endings(target):
    """No token, and tokens that end some rows early and others late."""
    plain = target.generate(**checks.batch(ROWS), max_new_tokens=24, do_sample=False, pad_token_id=0)
    new = plain[:, -24:]
    return [None, *({int(new[0, 3]), int(new[1, 9]), int(new[2, 16])})]


@pytest.mark.parametrize("scripted", [False, True])
def test_texts_and_decisions_are_those_of_rounds_one_by_one(scripted, log):
    """Rows end at different times, by length and by end-of-text ids in the middle of a block."""
    if scripted:
        target, draft = copy.deepcopy(tiny.perm_target()), tiny.scripted_draft([0, 1, 2, 3, 4], 5)
    else:
        target, draft = pair()
    ends = endings(target)
    for end in ends:
        for new in (1, 2, 7, 24):
            options = {"eos_token_id": end, "max_new_tokens": new}
            plain = target.generate(**checks.batch(ROWS), do_sample=False, pad_token_id=0, **options)
            log.clear()
            expected = run(target, ahead(copy.deepcopy(draft), False), **options)[:2]
            assert most_at_work(log) <= 1
            log.clear()
            assert run(target, ahead(copy.deepcopy(draft)), **options)[:2] == expected
            assert expected[0] == plain.tolist()
            assert most_at_work(log) == 2 or new < 24


def test_sampled_texts_are_the_same_draws(log):
    target, draft = pair()
    options = {"do_sample": True, "temperature": 0.9}
    texts = [run(target, ahead(copy.deepcopy(draft), is_on), **options)[:2] for is_on in (False, True)]
    assert texts[0] == texts[1] and most_at_work(log) == 2


@pytest.mark.parametrize("lagged", [False, True])
def test_sampled_texts_follow_the_target(lagged, log):
    """Ended rows move the others to other random numbers; every transition has its probability all the same."""
    table, drafts = chi.tables()
    confidence = torch.tensor([3.0, -3.0, 3.0, 3.0, -3.0, 3.0, 3.0, 3.0]) if lagged else None
    target = tiny.table_target(table, layers=1, mask=None, max_position_embeddings=2048)
    settings = {"target_hidden": chi.SIZE, "taps": (-1,), "mask": chi.SIZE - 1, "gamma": 3}
    draft = tiny.markov_draft(drafts["good"], confidence=confidence, **settings)
    draft.scheduler = PrefixScheduler(Dear(), lagged=True) if lagged else None
    ahead(draft)
    counts, end = torch.zeros(chi.SIZE, chi.SIZE, dtype=torch.long), 6
    rows = [[i % 6] for i in range(16)]
    torch.manual_seed(3)
    for _ in range(12):
        ids = target.generate(
            **checks.batch(rows), assistant_model=draft, max_new_tokens=80, do_sample=True, top_k=0, eos_token_id=end,
            pad_token_id=end,
        ).tolist()  # fmt: skip
        for text in ids:
            text = text[: text.index(end) + 1] if end in text else text
            for token, following in zip(text, text[1:], strict=False):
                counts[token, following] += 1
    assert counts.sum() > 1500 and most_at_work(log) == 2
    assert chi.p_value(counts, table.softmax(-1)) > chi.SURE


class Dear:
    """A cost model by which every token costs the same: few drafts pay."""

    def steps_per_second(self, batch_tokens):
        return 1000 / (4 + batch_tokens)


def test_a_lagged_scheduler_knows_what_is_two_rounds_old(log, monkeypatch):
    target, draft = pair()
    told, budgets = [], []
    update, budget = PrefixScheduler.update, PrefixScheduler.budget
    monkeypatch.setattr(PrefixScheduler, "update", lambda self, a: (told.append(len(log)), update(self, a))[1])
    monkeypatch.setattr(
        PrefixScheduler,
        "budget",
        lambda self, pending=0: (budgets.append((len(told), pending)), budget(self, pending))[1],
    )
    texts = {}
    for is_on in (False, True):
        told.clear(), budgets.clear(), log.clear()
        draft = ahead(copy.deepcopy(draft), is_on)
        draft.scheduler = PrefixScheduler(Dear(), lagged=True)
        texts[is_on], decisions, _ = run(target, draft)
        assert len({verified for *_, verified, _ in decisions}) > 1
        # Of round n, asked when it starts, it has been told of n - 2 and then waits for one.
        full = budgets[1:-4]
        assert all(known + 1 == n and pending == 1 for n, (known, pending) in enumerate(full, start=1)), full
    assert texts[True] == texts[False]
    assert most_at_work(log) == 2


class Ruinous(Dear):
    """Without any draft it would be far faster."""

    def plain_steps_per_second(self, num_rows):
        return 1e6


@pytest.mark.parametrize("lagged", [True, False])
def test_rounds_without_drafts_follow_each_other_too(lagged, log):
    """Nothing is told in them, and the scheduler tries again later; an exact one has to decide in between then."""
    target, draft = pair()
    plain = target.generate(**checks.batch(ROWS), max_new_tokens=60, do_sample=False, pad_token_id=0)
    draft.scheduler = PrefixScheduler(Ruinous(), lagged=lagged)
    text, _, stats = run(target, ahead(draft), max_new_tokens=60)
    assert text == plain.tolist() and most_at_work(log) == (2 if lagged else 1)
    assert {bool(r.draft_tokens) for r in stats.rounds} == {True, False}


def test_it_is_said_why_rounds_do_not_run_ahead(log):
    target, draft = pair()
    exact, windowed = (ahead(copy.deepcopy(draft)) for _ in range(2))
    exact.scheduler = PrefixScheduler(Dear())
    windowed.context_window = hf_dspark.ContextWindow(sinks=1, recent=8)
    cases = [
        (exact, {}, "the scheduler decides"), (windowed, {}, "a context window"),
        (ahead(draft), {"repetition_penalty": 1.3}, "the host decides"),
    ]  # fmt: skip
    for model, options, reason in cases:
        for rows in (ROWS, ROWS[:1]):
            stats = run(target, model, rows, cache_implementation="static", **options)[2]
            assert "rounds do not run ahead" in stats.reason and reason in stats.reason
    assert most_at_work(log) <= 1
    for model in (draft, ahead(copy.deepcopy(exact), False)):
        assert "run ahead" not in run(target, model)[2].reason


def at_work(log):
    return log.count("start") - log.count("read")


class Words:
    def decode(self, ids, **options):
        return " ".join(map(str, ids))


def test_streamers_and_criteria_look_on_while_the_next_round_runs(log, capsys):
    """They see what they see in rounds one by one, and no lock is held."""
    target, draft = pair()
    seen, free = [], []

    class Streamer(TextStreamer):
        def put(self, value):
            seen.append((value.tolist(), len(stats.rounds)))
            free.append((at_work(log), TURN._depth))

    def watching(ids, scores, **kwargs):
        seen.append(ids.tolist())
        free.append((at_work(log), TURN._depth))
        return ids[:, -1] == end

    end = endings(target)[1]
    for options in ({"streamer": Streamer(Words())}, {"stopping_criteria": [watching]}):
        rows = ROWS[:1] if "streamer" in options else ROWS
        found = {}
        for is_on in (False, True):
            seen.clear(), free.clear(), log.clear()
            ahead(draft, is_on)
            with hf_dspark.record() as stats:
                ids = target.generate(
                    **checks.batch(rows), assistant_model=draft, max_new_tokens=48, do_sample=False, pad_token_id=0,
                    cache_implementation="static", **options,
                )  # fmt: skip
            found[is_on] = ids.tolist(), list(seen)
            assert {depth for _, depth in free} == {0} and max(count for count, _ in free) == is_on
        assert found[True] == found[False] and len(seen) > 10


def test_a_lone_row_runs_ahead_when_the_device_has_waited_for_a_round(log, monkeypatch):
    """An end-of-text id makes the last round one for nothing; by then as much has been won, or could have been."""
    target, draft = pair()
    now, wait, commit = [0.0], Running.wait, DeviceRounds._commit

    def waiting(self):
        now[0] += 1
        return wait(self)

    def committing(self, *args):
        commit(self, *args)
        now[0] += 0.3

    monkeypatch.setattr(device_round, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(Running, "wait", waiting)
    monkeypatch.setattr(DeviceRounds, "_commit", committing)
    run(target, ahead(draft), ROWS[:1], cache_implementation="static", max_new_tokens=48)
    found = "".join(what[0] for what in log)
    # Three waits of 0.3 are not worth a round, four are.
    assert found.startswith("sr" * 4 + "ss") and most_at_work(log) == 2


def test_caches_do_not_grow_under_a_round_at_work(log, monkeypatch):
    """And every round has room for what it writes, also for rows that have ended without the device knowing."""
    target, draft = copy.deepcopy(tiny.perm_target()), tiny.perm_draft()
    ends = endings(target)
    at_work, resize, reserve, start = [], engine.RaggedCache.resize, Engine.reserve, Rounds.start
    first = [0]

    def noted(self, *args):
        at_work.append(log.count("start") - log.count("read"))
        return resize(self, *args)

    def checked(self, *args):
        length = int(torch.where(self.ends > self.lengths + 1, self.lengths, 0).max())
        assert length + self.block_size <= self._twin.cache.capacity
        return start(self, *args)

    def little(self, num_rows, slots, keep):
        """The first reservation does not hold the whole text."""
        return reserve(self, num_rows, slots if keep else min(slots, first[0]), keep)

    monkeypatch.setattr(Engine, "reserve", little)
    monkeypatch.setattr(engine.RaggedCache, "resize", noted)
    monkeypatch.setattr(Rounds, "start", checked)
    monkeypatch.setattr(engine, "STEP", 1)
    for slots in range(20, 40):
        monkeypatch.setattr(engine, "FIRST_SLOTS", slots)
        first[0] = slots
        options = {"max_new_tokens": 60, "eos_token_id": ends[slots % len(ends)]}
        plain = target.generate(**checks.batch(ROWS), do_sample=False, pad_token_id=0, **options)
        assert run(target, ahead(copy.deepcopy(draft)), **options)[0] == plain.tolist()
    assert len(at_work) > 40 and set(at_work) == {0}
    assert most_at_work(log) == 2


def test_a_thread_that_comes_between_gets_its_turns(log, monkeypatch):
    """While another thread uses the device too it is busy anyway, and rounds are read one by one."""
    target, draft = pair()
    plain = target.generate(**checks.batch(ROWS), max_new_tokens=24, do_sample=False, pad_token_id=0)
    monkeypatch.setattr(Turn, "is_ours", property(lambda self: log.count("start") <= 3))
    assert run(target, ahead(draft))[0] == plain.tolist()
    assert log[:6] == ["start", "start", "read", "start", "read", "start"]
    assert log[6:9] == ["read", "read", "start"]
    assert "".join(what[0] for what in log[8:]) == "sr" * (len(log[8:]) // 2)


def test_turn_knows_who_had_it():
    turn, entered = Turn(), threading.Event()

    def enter():
        with turn:
            entered.set()

    assert not turn.is_ours
    with turn, turn:
        thread = threading.Thread(target=enter)
        thread.start()
        assert turn.is_ours and not entered.wait(0.05)
    assert entered.wait(5)
    thread.join()
    assert not turn.is_ours
    with pytest.raises(ZeroDivisionError), turn:
        raise ZeroDivisionError
    assert turn.is_ours and turn._depth == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_turn_that_was_not_taken_is_free(error, monkeypatch):
    def fails():
        raise error

    turn, entered = Turn(), threading.Event()
    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(graphs, "_current_device", fails)
        with turn:
            pass
    thread = threading.Thread(target=lambda: turn.__enter__() or entered.set(), daemon=True)
    thread.start()
    assert entered.wait(5)


def test_an_error_at_the_end_of_a_turn_does_not_hide_the_one_inside(monkeypatch):
    def fails():
        raise RuntimeError("no stream")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", fails)
    monkeypatch.setattr(graphs, "_current_device", lambda: 0)
    turn = Turn()
    for inside, seen in ((RecordingFailed("no more"), "no more"), (None, "no stream")):
        with pytest.raises(RuntimeError, match=seen), turn:
            if inside is not None:
                raise inside
        assert turn._depth == 0


def test_a_recording_that_fails_while_a_round_is_at_work(log, monkeypatch):
    """The round at work is read all the same."""
    target, draft = pair()
    plain = target.generate(**checks.batch(ROWS), max_new_tokens=24, do_sample=False, pad_token_id=0)
    run_, failed = Overwriting.run, []

    def run_once(self, key, *args, **kwargs):
        if self.enabled and key[0] == "round" and log.count("start") == 4 and not failed:
            failed.append(key)
            raise RecordingFailed("no more")
        return run_(self, key, *args, **kwargs)

    monkeypatch.setattr(Overwriting, "run", run_once)
    with hf_dspark.record() as stats:
        text = target.generate(
            **checks.batch(ROWS), assistant_model=ahead(draft), max_new_tokens=24, do_sample=False, pad_token_id=0
        )
    assert failed and text.tolist() == plain.tolist() and "no more" in stats.reason


def test_an_interrupt_leaves_the_engine_usable(log, monkeypatch):
    target, draft = pair()
    plain = target.generate(**checks.batch(ROWS), max_new_tokens=24, do_sample=False, pad_token_id=0)
    ahead(draft)
    wait = Running.wait

    def interrupted(self):
        if log.count("start") == 5:
            raise KeyboardInterrupt
        return wait(self)

    with monkeypatch.context() as patch:
        patch.setattr(Running, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(target, draft)
    log.clear()
    assert run(target, draft)[0] == plain.tolist() and most_at_work(log) == 2
    assert engine_of(target, draft).texts
