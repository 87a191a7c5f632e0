"""Answers in the background, without a page: STREAM-1 and STREAM-3, turns between visitors, settings, limits."""

import threading
import time

import pytest
import torch

import checks
import hf_dspark
import tiny
from demo_page import chat_tokenizer
from hf_dspark.demo.generation import Models
from hf_dspark.demo.settings import Limits, Settings

GREEDY = Settings(num_assistant_tokens=4, max_new_tokens=20)
LONG = Settings(num_assistant_tokens=4, max_new_tokens=400)


@pytest.fixture
def models():
    return Models(tiny.perm_target(), tiny.perm_draft(), chat_tokenizer())


def finished(generation, seconds=30):
    assert generation.done.wait(seconds)
    return generation.answer()


def chain_after(text, length):
    return tiny.chain(tiny.tokenizer()(text).input_ids[-1], length)


@pytest.mark.parametrize("drafted", [True, False])
@pytest.mark.parametrize("path", ["plain", "ragged"])
def test_the_answer_is_the_targets_text(models, path, drafted):
    answer = finished(models.ask("abc", [], Settings(num_assistant_tokens=4, max_new_tokens=20, path=path),
                                 drafted=drafted))  # fmt: skip
    assert answer.state == "finished" and [t.id for t in answer.tokens] == chain_after("abc", 20)
    assert {t.origin for t in answer.tokens} == ({"first", "accepted", "bonus"} if drafted else {"target"})
    assert 0 < answer.seconds and (answer.stats.path if drafted else answer.stats) == (path if drafted else None)


def test_the_numbers_are_those_of_the_same_run(models, monkeypatch):
    seen = []
    original = models.target.generate

    def generate(*args, **kwargs):
        with hf_dspark.record() as stats:
            output = original(*args, **kwargs)
        seen.append((output, stats))
        return output

    monkeypatch.setattr(models.target, "generate", generate)
    answer = finished(models.ask("abc", [], GREEDY))
    ((output, stats),) = seen
    assert answer.stats.to_dict() == stats.to_dict() and stats.num_rounds > 2
    assert output[0, 3:].tolist() == [t.id for t in answer.tokens]


def test_history_is_part_of_the_prompt(models):
    answer = finished(models.ask("d", [("abc", "xyz")], GREEDY))
    assert answer.tokens[0].position == 7 and answer.prompt == "d"


def test_a_growing_answer_can_be_read(models, monkeypatch):
    """Between two rounds the answer holds what those rounds account for."""
    steps, seen = threading.Semaphore(0), []
    original = models.target.forward

    def forward(*args, **kwargs):
        steps.acquire(timeout=10)
        return original(*args, **kwargs)

    monkeypatch.setattr(models.target, "forward", forward)
    generation = models.ask("abc", [], GREEDY)
    assert generation.answer().tokens == []
    for _ in range(5):
        steps.release()
        time.sleep(0.2)
        seen.append(len(generation.answer().tokens))
    assert seen[:4] == [1, 6, 11, 16] and generation.done.wait(10)


# ---- STREAM-1


class Broken(RuntimeError):
    pass


@pytest.mark.parametrize("at", [0, 5])
def test_an_error_in_the_middle_shows_within_a_second_and_the_next_request_works(models, monkeypatch, at):
    draft, calls = models.draft, []
    original = draft.run_block

    def run_block(*args, **kwargs):
        calls.append(1)
        if len(calls) > at:
            raise Broken("the draft fell over")
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(draft, "run_block", run_block)
        generation = models.ask("abc", [], LONG)
        while len(calls) <= at:
            time.sleep(0.01)
        answer = finished(generation, 1)
    assert answer.state == "failed" and "the draft fell over" in answer.error
    assert [t.id for t in answer.tokens] == chain_after("abc", 1 + 5 * at), "what was written stays"
    assert finished(models.ask("abc", [], GREEDY)).state == "finished"


@pytest.mark.parametrize("wrong", [{"num_assistant_tokens": 9}, {"assistant_confidence_threshold": 2}])
def test_an_option_that_generate_refuses(models, wrong):
    answer = finished(models.ask("abc", [], Settings(**({"temperature": 1.0, "num_assistant_tokens": 4} | wrong))), 5)
    assert answer.state == "failed" and next(iter(wrong)) in answer.error and answer.tokens == []
    assert finished(models.ask("abc", [], GREEDY)).state == "finished"


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"path": "fast"}, "path"),
        ({"scheduler": "best"}, "scheduler"),
        ({"scheduler": "measured"}, "--cost-model"),
        ({"max_new_tokens": 513}, "1..512"),
        ({"max_new_tokens": 0}, "1..512"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": None}, "temperature"),
        ({"top_p": 3}, "top_p"),
        ({"seed": None}, "seed"),
    ],
)
def test_a_setting_out_of_range_is_refused_at_once(models, wrong, named):
    with pytest.raises(ValueError, match=named):
        models.ask("abc", [], Settings(**wrong))


def test_limits(models):
    small = Models(models.target, models.draft, models.tokenizer, limits=Limits(max_prompt_tokens=5, max_new_tokens=8))
    with pytest.raises(ValueError, match="6 tokens long and this page takes 5"):
        small.ask("abcdef", [], Settings(max_new_tokens=8))
    with pytest.raises(ValueError, match="1..8"):
        small.ask("abc", [], Settings(max_new_tokens=9))
    with pytest.raises(ValueError, match="at least 1"):
        Limits(max_prompt_tokens=0)


def test_a_swapped_pair_is_refused(models):
    with pytest.raises(ValueError, match="`draft` a DSpark draft"):
        Models(models.draft, models.target, models.tokenizer)


# ---- STREAM-3


@pytest.mark.parametrize("drafted", [True, False])
@pytest.mark.parametrize("path", ["plain", "ragged"])
def test_stopping_ends_the_work_within_a_round(models, monkeypatch, path, drafted):
    calls, original = [], models.target.generate
    reached, go_on = threading.Event(), threading.Event()

    def generate(*args, streamer, **kwargs):
        put = streamer.put

        def slow(value):
            put(value)
            if len(streamer.ids) == 8:
                reached.set()
                go_on.wait(10)

        monkeypatch.setattr(streamer, "put", slow)
        with checks.CallCounter(models.target) as counter:
            output = original(*args, streamer=streamer, **kwargs)
        calls.append(counter)
        return output

    monkeypatch.setattr(models.target, "generate", generate)
    generation = models.ask("abc", [], Settings(num_assistant_tokens=4, max_new_tokens=400, path=path), drafted=drafted)
    assert reached.wait(20)
    generation.stop()
    go_on.set()
    answer = finished(generation, 5)
    assert answer.state == "stopped" and [t.id for t in answer.tokens] == chain_after("abc", 9)
    if drafted:
        assert answer.stats.num_rounds == 2 and answer.stats.num_tokens == 9
    again = finished(models.ask("abc", [], GREEDY))
    assert [t.id for t in again.tokens] == chain_after("abc", 20), "the next message starts clean"


def test_a_visitor_who_waits_can_be_stopped(models):
    with models.turn(threading.Event()) as mine:
        assert mine
        generation = models.ask("abc", [], GREEDY)
        time.sleep(0.3)
        assert generation.answer().state == "waiting"
        generation.stop()
        assert finished(generation, 2).state == "stopped" and generation.answer().tokens == []
    assert finished(models.ask("abc", [], GREEDY)).state == "finished"


# ---- several visitors


def test_visitors_take_turns_and_get_their_own_texts(models):
    prompts = ["abc", "def", "xyz"]
    generations = [models.ask(p, [], LONG) for p in prompts]
    for prompt, generation in zip(prompts, generations, strict=True):
        answer = finished(generation, 60)
        assert [t.id for t in answer.tokens] == chain_after(prompt, 400)
        assert answer.stats.calls == 1 and answer.stats.num_tokens == 400


def test_a_seed_gives_the_same_text_whoever_else_is_there(models):
    warm = tiny.table_target(torch.randn(tiny.V, tiny.V, generator=torch.Generator().manual_seed(1)))
    models = Models(warm, tiny.random_draft(), chat_tokenizer())
    settings = Settings(temperature=1.0, top_p=0.9, seed=3, num_assistant_tokens=4, max_new_tokens=40)
    alone = finished(models.ask("abc", [], settings))
    others = [models.ask("abc", [], Settings(**(vars(settings) | {"seed": s}))) for s in (4, 3, 5)]
    texts = [[t.id for t in finished(g).tokens] for g in others]
    assert texts[1] == [t.id for t in alone.tokens] and texts[0] != texts[1] != texts[2]


def test_a_scheduler_is_that_of_one_answer(models):
    draft = tiny.markov_draft(tiny.one_hot_table(tiny.NEXT), confidence=torch.ones(tiny.V))
    costs = hf_dspark.CostModel({1: 1.0, 2: 100.0})
    models = Models(tiny.perm_target(), draft, chat_tokenizer(), cost_model=costs)
    measured = finished(models.ask("abc", [], Settings(**(vars(GREEDY) | {"scheduler": "measured"}))))
    assert measured.stats.num_verified == 0 and draft.scheduler is None
    assert finished(models.ask("abc", [], GREEDY)).stats.num_verified > 0
    auto = finished(models.ask("abc", [], Settings(**(vars(GREEDY) | {"scheduler": "auto"}))))
    assert "fast path only" in auto.stats.reason


def test_thinking_reaches_the_template(models):
    tokenizer = chat_tokenizer()
    tokenizer.chat_template += "{% if enable_thinking %}xyz{% endif %}"
    models = Models(models.target, models.draft, tokenizer)
    positions = [
        finished(models.ask("abc", [], Settings(num_assistant_tokens=4, max_new_tokens=3, thinking=thinking)))
        .tokens[0].position
        for thinking in (False, True)
    ]  # fmt: skip
    assert models.can_think and positions == [3, 6]
