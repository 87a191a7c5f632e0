"""`DraftContext` and `ContextWindow`: which tokens are remembered, where, and how much memory that takes."""

import random

import pytest
import torch

import checks
import hf_dspark
import oracle
import tiny
from hf_dspark import ContextWindow
from hf_dspark.context import DraftContext

STATIC = {"cache_implementation": "static"}


class Attention:
    """Values are the given numbers, keys those of the rotary table."""

    def keys_values(self, states, rope):
        return rope[0].unsqueeze(1), states.unsqueeze(1)


class Layer:
    self_attn = Attention()


def context_of(window: ContextWindow | None) -> DraftContext:
    config = hf_dspark.DSparkConfig(num_hidden_layers=2, num_attention_heads=1, num_key_value_heads=1, head_dim=1)
    return DraftContext(config, 1, torch.device("cpu"), torch.float32, window)


def append(context: DraftContext, start: int, count: int) -> None:
    """`count` tokens whose keys and values are their positions."""
    positions = torch.arange(start, start + count, dtype=torch.float32)[None, :, None]
    context.append([Layer(), Layer()], positions.expand(-1, -1, 2), (positions, positions))


def held(context: DraftContext) -> list[int]:
    assert torch.equal(context.keys[:, :, :, : context.held], context.values[:, :, :, : context.held])
    return context.values[1, 0, 0, : context.held, 0].int().tolist()


@pytest.mark.parametrize("window", [None, ContextWindow(0, 1), ContextWindow(3, 5), ContextWindow(10, 300)])
def test_first_and_last_tokens_are_held(window):
    """Appended in pieces of any size, cut back now and then: always the sinks and what is recent, in order."""
    rng, context, expected, length = random.Random(1), context_of(window), [], 0
    for _ in range(200):
        if rng.random() < 0.2:
            length = rng.randint(max(0, length - 20), length)
            context.crop(length)
            expected = [i for i in expected if i < length]
        count = rng.choice([0, 1, 2, 3, 8, 8, 40, 700])
        append(context, length, count)
        expected, length = [*expected, *range(length, length + count)], length + count
        if window is not None:
            recent = [i for i in expected if i >= window.sinks][-window.recent :]
            expected = [i for i in expected if i < window.sinks] + recent
        assert held(context) == expected and context.length == length


def test_a_window_bounds_the_memory():
    context = context_of(ContextWindow(4, 60))
    for start in range(0, 20000, 500):
        append(context, start, 500)
    assert context.keys.shape[3] <= 512 and context.length == 20000


@pytest.mark.parametrize("arguments", [(-1, 5), (4, 0), (4, 2.5), (True, 5), (4, "8")])
def test_a_window_that_is_none(arguments):
    with pytest.raises(ValueError, match="of a context window must be an integer"):
        ContextWindow(*arguments)


# ---- in generate()

PROMPT = [5, 9, 11, 3, 8, 2, 30, 31, 17]


def windowed(window: tuple[int, int], family: str = "qwen3", gamma: int = 4, layers: int = 2, **settings):
    files = tiny.guided_files(torch.zeros(tiny.V, tiny.V), taps=(0, 2), gamma=gamma, layers=layers, **settings)
    target, draft = tiny.random_target(family, layers=4), tiny.load_draft(*files)
    draft.context_window = ContextWindow(*window)
    return target, draft, oracle.Oracle(*files, window)


def teach(draft, slow, texts: list[list[int]]) -> None:
    table = torch.zeros(tiny.V, tiny.V)
    for text in texts:
        own = tiny.text_table(text)
        table = torch.where(own.any(-1, keepdim=True), own, table)
    tiny.set_table(draft, table)
    slow.tensors["markov_head.markov_w2.weight"] = table.T.clone()


WINDOWS = [(0, 1), (0, 3), (2, 4), (4, 9), (9, 2), (4, 13), (12, 40)]


@pytest.mark.parametrize("options", [{}, STATIC, {"prefill_chunk_size": 4}, STATIC | {"prefill_chunk_size": 5}])
@pytest.mark.parametrize("window", WINDOWS)
def test_one_sequence_sees_just_the_window(window, options):
    target, draft, slow = windowed(window, gamma=4 if window[1] % 2 else 7)
    text = checks.plain(target, PROMPT, max_new_tokens=30)[0].tolist()
    teach(draft, slow, [text])
    _, stats = checks.generate(target, draft, PROMPT, max_new_tokens=30, **options)
    assert stats.path == ("ragged" if "cache_implementation" in options else "plain") and stats.num_accepted > 0
    checks.rounds_match(stats, slow, target, text)


class OneRow:
    def __init__(self, stats, row: int):
        self.rounds = [r for r in stats.rounds if r.row == row]


@pytest.mark.parametrize("window", WINDOWS)
def test_rows_of_a_batch_have_windows_of_their_own(window):
    """Prompts shorter than, as long as and longer than the window; the pair serves other shapes before."""
    target, draft, slow = windowed(window, "qwen3_sliding")
    rows = [[7], PROMPT, PROMPT[:4], PROMPT * 3]
    checks.batch_equals_plain(target, draft, rows[::-1], max_new_tokens=20)
    texts = [checks.plain(target, row, max_new_tokens=20)[0].tolist() for row in rows]
    teach(draft, slow, texts)
    _, stats, _ = checks.batch_equals_plain(target, draft, rows, max_new_tokens=20)
    for index, text in enumerate(texts):
        checks.rounds_match(OneRow(stats, index), slow, target, text)


def test_one_and_n_layout():
    target, draft, slow = windowed((2, 4), gamma=5, sample_from_anchor=False)
    text = checks.plain(target, PROMPT, max_new_tokens=30)[0].tolist()
    tiny.set_table(draft, tiny.text_table(text))
    traces = []
    for options in ({}, STATIC):
        found, stats = checks.generate(target, draft, PROMPT, max_new_tokens=30, **options)
        assert found[0].tolist() == text and stats.num_accepted > 0
        traces.append([(r.position, r.draft_tokens) for r in stats.rounds])
    assert traces[0] == traces[1]


def test_the_window_is_what_the_draft_sees_and_nothing_else():
    """Control: without the window, or with another, the same draft has other confidences."""
    target, draft, _ = windowed((2, 4))
    found = []
    for window in (ContextWindow(2, 4), None, ContextWindow(2, 5), ContextWindow(1, 4), ContextWindow(2, 4)):
        draft.context_window = window
        for options in ({}, STATIC):
            _, stats = checks.generate(target, draft, PROMPT, max_new_tokens=12, **options)
            found.append(torch.tensor(stats.rounds[-1].confidence))
    close = [[torch.allclose(a, b, atol=1e-4) for b in found] for a in found]
    assert close == [[i // 2 % 4 == j // 2 % 4 for j in range(10)] for i in range(10)]


@pytest.mark.parametrize("static", [{}, STATIC], ids=["plain", "ragged"])
@pytest.mark.parametrize("window", [(2, 6), (2, 60)])
def test_turns_of_a_session_with_a_window(window, static):
    target, draft, slow = windowed(window)
    session, text = hf_dspark.Session(target, draft), PROMPT
    for i in range(4):
        expected = checks.plain(target, text, max_new_tokens=9)[0].tolist()
        teach(draft, slow, [expected])
        with hf_dspark.record() as stats:
            found = session.generate(checks.tensor(text), max_new_tokens=9, do_sample=False, **static)
        assert found[0].tolist() == expected and (stats.num_reused > 0) == (i > 0)
        checks.rounds_match(stats, slow, target, expected)
        text = [*expected, 20 + i]
    with hf_dspark.record() as stats:  # back to the middle: what a window has dropped is not there any more
        edited = [*text[:20], 50]
        found = session.generate(checks.tensor(edited), max_new_tokens=9, do_sample=False, **static)
    assert found.tolist() == checks.plain(target, edited, max_new_tokens=9).tolist()
    assert stats.num_reused == (0 if static and window[1] == 6 else 20)
    if static or window[1] == 60:
        checks.rounds_match(stats, slow, target, found[0].tolist())


def test_a_window_of_the_wrong_kind_is_refused():
    target, draft, _ = windowed((2, 4))
    draft.context_window = (2, 4)
    for options in ({}, STATIC):
        with pytest.raises(ValueError, match=r"context_window.*ContextWindow.*\(2, 4\)"):
            checks.generate(target, draft, PROMPT, **options)


def test_another_window_finds_no_context_on_a_cache():
    target, draft, _ = windowed((2, 4))
    session = hf_dspark.Session(target, draft)
    text = session.generate(checks.tensor(PROMPT), max_new_tokens=5, do_sample=False)
    draft.context_window = None
    with hf_dspark.record() as stats:
        session.generate(torch.cat((text, text), dim=1), max_new_tokens=5, do_sample=False)
    assert "not seen" in stats.reason
