"""CONTEXT on the ragged path: positions, windows and features far out are those computed from scratch.

A draft's own window (CONTEXT-4) is refused by the loader, see `tests/formats/test_deepspec_read.py`.
"""

import pytest
import torch

import checks
import oracle
import tiny


def far_pair(family: str, length: int, **extra):
    target = tiny.random_target(family, layers=2, max_position_embeddings=8192, **extra)
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randint(1, 62, (length,), generator=generator).tolist()
    text = checks.plain(target, prompt, max_new_tokens=8)[0].tolist()
    config, tensors = tiny.guided_files(tiny.text_table(text[-10:]), taps=(-1, 0), max_position_embeddings=8192)
    return target, tiny.load_draft(config, tensors), oracle.Oracle(config, tensors), text, prompt


@pytest.mark.parametrize("family", ["qwen3", "qwen3_sliding"])
def test_context_2_position_5000(family):
    """A prompt of 5000 tokens, alone and beside a short one: proposals equal those from the whole text at once."""
    target, draft, slow, text, prompt = far_pair(family, 5000)
    new, stats, _ = checks.batch_equals_plain(target, draft, [prompt], cache_implementation="static", max_new_tokens=8)
    assert [*prompt, *new[0]] == text and stats.rounds[0].position == 5000
    checks.rounds_match(stats, slow, target, text)
    new, stats, _ = checks.batch_equals_plain(target, draft, [[7, 21, 40], prompt], max_new_tokens=8)
    assert [*prompt, *new[1]] == text
    assert stats.num_accepted > 0


@pytest.mark.parametrize("family", ["qwen3_sliding", "mistral", "gemma2", "gemma3_text"])
@pytest.mark.parametrize("window", [2, 5, 16])
def test_context_windows_of_the_target_at_every_prompt_length(family, window):
    """Rows shorter than, as long as and longer than the window in one batch; the draft sees features of each."""
    target = tiny.random_target(family, layers=2, sliding_window=window)
    rows = [[(5 * i + j) % 61 + 1 for j in range(length)] for i, length in enumerate((1, window - 1, window, 33))]
    texts = [checks.plain(target, row, max_new_tokens=16)[0].tolist() for row in rows]
    table = torch.zeros(tiny.V, tiny.V)
    for text in texts:
        table += tiny.text_table(text)
    config, tensors = tiny.guided_files(table, taps=(-1, 0))
    draft, slow = tiny.load_draft(config, tensors), oracle.Oracle(config, tensors)
    _, stats, _ = checks.batch_equals_plain(target, draft, rows, max_new_tokens=16)
    for index, text in enumerate(texts):
        checks.rounds_match(OneRow(stats, index), slow, target, text)


class OneRow:
    """The rounds of one row, for checks of single sequences."""

    def __init__(self, stats, row: int):
        self.rounds = [r for r in stats.rounds if r.row == row]


def test_context_left_padding_shifts_no_position():
    """The same row behind no, one and many pad tokens: positions, proposals and confidence stay."""
    target = tiny.random_target("qwen3", layers=3)
    config, tensors = tiny.guided_files(torch.randn(tiny.V, tiny.V), taps=(0, 1))
    draft, slow, row = tiny.load_draft(config, tensors), oracle.Oracle(config, tensors), [7, 21, 40]
    text = checks.plain(target, row)[0].tolist()
    for width in (3, 4, 20):
        _, stats, _ = checks.batch_equals_plain(target, draft, [row, [9] * width])
        assert stats.rounds[0].position == 3
        checks.rounds_match(OneRow(stats, 0), slow, target, text)
