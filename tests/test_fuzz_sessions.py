"""Sessions on seeded cases: histories that grow, are edited, cut, branched and interrupted, on both paths (float32).

Every text is compared with plain generate() on the same ids, and no more is reused than the history has in common.
"""

import contextlib
import random

import pytest
import torch
from test_fuzz_batch import draft_of, teach
from transformers import StoppingCriteriaList

import checks
import hf_dspark
import tiny
from hf_dspark.context import common_length

CASES, CHUNK = 60, 10
TARGETS = (
    ("qwen3", {}), ("qwen3_sliding", {"sliding_window": 3}), ("mistral", {"sliding_window": 5}), ("gemma2", {}),
    ("gemma3_text", {"sliding_window": 4}), ("llama", {}), ("gpt2", {}), ("gpt_neox", {}), ("lfm2", {}),
    ("qwen3_next", {}),
)  # fmt: skip


def draw_window(rng: random.Random) -> hf_dspark.ContextWindow | None:
    return rng.choice([None, None, hf_dspark.ContextWindow(rng.randint(0, 6), rng.randint(1, 30))])


def draw_rows(rng: random.Random, rows: list[list[int]]) -> list[list[int]]:
    """The next prompt of every row: the text so far with an end cut off or not, and something new."""
    drawn = []
    for row in rows:
        cut = rng.choice([len(row), len(row), len(row), rng.randint(1, len(row)), 0])
        drawn.append(row[:cut] + [rng.randrange(1, 62) for _ in range(rng.choice([0, 1, 3, 9]) or cut == 0)])
    return drawn


def run_turn(rng: random.Random, session, rows: list[list[int]], lesson: str, options: dict, note: dict):
    """One call: what it gave for each row, and its statistics."""
    inputs = checks.batch(rows)
    plain = {name: value for name, value in options.items() if name != "cache_implementation"}
    expected = session.target.generate(**inputs, **plain)
    width = inputs["input_ids"].shape[1]
    texts = [[*row, *new] for row, new in zip(rows, expected[:, width:].tolist(), strict=True)]
    teach(rng, session.draft, lesson, texts)
    if rng.random() < 0.25:
        note["interrupts"] += 1
        criteria = StoppingCriteriaList([checks.Interrupt(rng.randint(0, 8))])
        with contextlib.suppress(KeyboardInterrupt):
            session.generate(**inputs, **options, stopping_criteria=criteria)
    with hf_dspark.record() as stats:
        found = session.generate(**inputs, **options)
    assert found.tolist() == expected.tolist()
    return texts, stats


def run_case(seed: int, note: dict | None = None) -> dict:
    """One session of a few turns; fills `note` with what was drawn and returns what happened."""
    rng, note = random.Random(seed), {} if note is None else note
    torch.manual_seed(seed)
    family, settings = rng.choice(TARGETS)
    target = tiny.random_target(family, layers=2, **settings)
    num_rows = rng.choice([1, 1, 1, 2, 3])
    options = {"cache_implementation": "static"} if num_rows > 1 or rng.random() < 0.4 else {}
    draft, lesson = draft_of(rng.choice([2, 4, 7]), rng.choice(["vanilla", "silent"])), rng.choice(["full", "gaps"])
    draft.context_window = draw_window(rng)
    note |= {"target": family, "rows": num_rows, "options": options, "window": draft.context_window, "interrupts": 0}
    session, reused, accepted = hf_dspark.Session(target, draft), 0, 0
    rows = [[rng.randrange(1, 62) for _ in range(rng.randint(1, 12))] for _ in range(num_rows)]
    texts: list[list[int]] = [[]] * num_rows
    for _ in range(rng.randint(2, 5)):
        turn = options | {"max_new_tokens": rng.randint(1, 12), "do_sample": False, "pad_token_id": 0}
        if rng.random() < 0.3:
            turn["prefill_chunk_size"] = rng.randint(1, 9)
        if rng.random() < 0.3:
            turn["repetition_penalty"] = 1.3
        note["prompts"] = rows
        interrupted = note["interrupts"]
        common = sum(common_length(row[:-1], text) for row, text in zip(rows, texts, strict=True))
        texts, stats = run_turn(rng, session, rows, lesson, turn, note)
        if note["interrupts"] == interrupted:
            assert stats.num_reused <= common
        reused, accepted = reused + stats.num_reused, accepted + stats.num_accepted
        rows = draw_rows(rng, texts)
        if rng.random() < 0.15:
            session = session.fork()
    draft.context_window = None
    return {"reused": reused, "accepted": accepted, "interrupts": note["interrupts"], "path": stats.path}


RESULTS: dict[int, dict] = {}


@pytest.mark.parametrize("chunk", range(CASES // CHUNK))
def test_sessions_equal_plain_generate(chunk):
    RESULTS.update(checks.run_cases(run_case, range(chunk * CHUNK, (chunk + 1) * CHUNK)))


def test_the_cases_reach_every_path():
    if len(RESULTS) < CASES:
        pytest.skip("needs all chunks in this process")
    assert {result["path"] for result in RESULTS.values()} == {"plain", "ragged", "target_only"}
    for what in ("reused", "accepted", "interrupts"):
        assert sum(result[what] > 0 for result in RESULTS.values()) > CASES // 4, what
