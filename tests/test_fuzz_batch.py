"""Invariants 1, 5 and 9 on the ragged path: hundreds of seeded batches, each row equal to plain generate (float32).

Each case draws a target (windows, head counts), a batch of 1 to 5 left-padded prompts, a draft that is taught the rows'
texts in part, processors, a way to end and assistant options. Targets and drafts serve many cases, so every call also
finds whatever an earlier one of another shape left behind; a part of the cases calls the pair twice.
"""

import functools
import random

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import checks
import hf_dspark
import tiny

CASES, CHUNK = 320, 20
LENGTH = 14
TARGETS = (
    ("qwen3", {}), ("qwen3_sliding", {"sliding_window": 3}), ("qwen3_sliding", {"num_key_value_heads": 4}),
    ("mistral", {"sliding_window": 5, "num_key_value_heads": 1}), ("llama", {"num_key_value_heads": 4}),
    ("gemma3_text", {"sliding_window": 4}), ("gemma2", {"sliding_window": 9, "num_key_value_heads": 1}),
    ("gemma2", {"sliding_window": 2}), ("perm", {}), ("perm", {}), ("perm", {}),
)  # fmt: skip
HEADS = {"vanilla": 2, "silent": 1, "gated": 4, "rnn": 2}  # key-value heads of the draft, of 4


class BanByRow(LogitsProcessor):
    """A caller's processor with one setting a row: bans a token of the row's own and the token at hand."""

    def __init__(self, tokens: list[int]):
        self.tokens = torch.tensor(tokens)[:, None]

    def __call__(self, input_ids, scores):
        assert input_ids.shape[0] == scores.shape[0] == len(self.tokens)
        return scores.scatter(-1, self.tokens, -torch.inf).scatter(-1, input_ids[:, -1:], -torch.inf)


@functools.cache
def target_of(index: int):
    family, settings = TARGETS[index]
    return tiny.perm_target(layers=2) if family == "perm" else tiny.random_target(family, layers=2, **settings)


@functools.cache
def draft_of(gamma: int, kind: str):
    """Templates whose Markov table is rewritten for each case."""
    head, confidence = ("vanilla", None) if kind == "silent" else (kind, "markov")
    settings = {"gamma": gamma, "taps": (-1, 0), "head": head, "confidence": confidence}
    config, tensors = tiny.guided_files(torch.randn(tiny.V, tiny.V), num_key_value_heads=HEADS[kind], **settings)
    if head == "gated":  # gates wide open, so that the table still leads
        tensors["markov_head.gate_proj.bias"] += 8
    if head == "rnn":  # the output part of the recurrent state reads W1[x_{k-1}]
        tensors["markov_head.joint_proj.weight"][2 * tiny.V :, tiny.V : 2 * tiny.V] += 8 * torch.eye(tiny.V)
    return tiny.load_draft(config, tensors)


def draw_options(rng: random.Random, num_rows: int, texts: list[list[int]]):
    """Processors and ways to end, as a function that makes the keyword arguments anew for each run."""
    seen = sorted({token for text in texts for token in text})
    pick = lambda n: rng.sample(seen, min(n, len(seen)))  # noqa: E731
    pool = {
        "repetition_penalty": lambda: rng.choice([0.7, 1.3, 2.5]),
        "no_repeat_ngram_size": lambda: rng.choice([1, 2, 3]),
        "min_new_tokens": lambda: rng.randint(1, LENGTH),
        "min_length": lambda: rng.randint(1, 20 + LENGTH),
        "bad_words_ids": lambda: [[t] for t in pick(2)] + [pick(2)],
        "suppress_tokens": lambda: pick(2),
        "begin_suppress_tokens": lambda: pick(1),
        "forced_eos_token_id": lambda: rng.choice(seen),
        "sequence_bias": lambda: [[pick(1), rng.choice([-9.0, 5.0])]],
        "encoder_repetition_penalty": lambda: 1.4,
        "renormalize_logits": lambda: True,
    }
    chosen = {name: pool[name]() for name in rng.sample(sorted(pool), rng.choice([0, 0, 0, 1, 2]))}
    if "forced_eos_token_id" in chosen:  # transformers refuses to force what is suppressed
        chosen.pop("suppress_tokens", None)
    if rng.random() < 0.5:
        chosen["eos_token_id"] = rng.choice([pick(1)[0], pick(3), [*pick(6), 62]])
    chosen["max_new_tokens"] = rng.choice([1, 2, 3, *range(4, LENGTH + 1), LENGTH])
    chosen["pad_token_id"] = rng.choice([0, 0, 5])
    banned = [rng.choice(seen) for _ in range(num_rows)] if rng.random() < 0.25 else None

    def make():
        custom = {"logits_processor": LogitsProcessorList([BanByRow(banned)])} if banned else {}
        return chosen | custom

    return make


def draw_assistant(rng: random.Random, draft, num_rows: int) -> dict:
    options: dict = {}
    if num_rows == 1 or rng.random() < 0.2:
        options["cache_implementation"] = "static"
    if rng.random() < 0.3:
        options["num_assistant_tokens"] = rng.randint(1, draft.config.num_draft_tokens)
    if rng.random() < 0.3 and draft.confidence_head is not None:
        options["assistant_confidence_threshold"] = rng.choice([0.0, 0.3, 0.5, 0.9, 1.0])
    return options


def teach(rng: random.Random, draft, kind: str, texts: list[list[int]]) -> None:
    """Make the draft propose the rows' texts fully, never, with gaps at random, or not at all (`"random"`)."""
    if kind == "random":
        return tiny.set_table(draft, torch.randn(tiny.V, tiny.V))
    table = torch.zeros(tiny.V, tiny.V)
    for text in rng.sample(texts, len(texts)):
        own = tiny.text_table(text)
        table = torch.where(own.any(-1, keepdim=True), own, table)
    share = {"full": 0.0, "never": 1.0}.get(kind, rng.choice([0.15, 0.3, 0.5]))
    for row in range(tiny.V):
        if rng.random() < share:
            table[row] = table[row].roll(1)
    return tiny.set_table(draft, table)


def run_case(seed: int, note: dict) -> dict:
    """One case; fills `note` with what was drawn and returns what happened, for the coverage check."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    index, num_rows = rng.randrange(len(TARGETS)), rng.randint(1, 5)
    target = target_of(index)
    rows = [[rng.randrange(1, 62) for _ in range(rng.choice([1, 2, 3, 5, 9, 14, 20]))] for _ in range(num_rows)]
    note |= {"target": TARGETS[index], "prompts": [len(row) for row in rows]}
    base = target.generate(**checks.batch(rows), max_new_tokens=LENGTH, do_sample=False, pad_token_id=0)
    texts = [[*row, *tokens] for row, tokens in zip(rows, base[:, -LENGTH:].tolist(), strict=True)]
    make = draw_options(rng, num_rows, [text[-LENGTH:] for text in texts])
    gamma, head = rng.choice([1, 2, 3, 4, 4, 7, 7]), rng.choice(list(HEADS))
    draft, lesson = draft_of(gamma, head), rng.choice(["full", "full", "never", "gaps", "gaps", "random"])
    teach(rng, draft, lesson, texts)
    assistant = draw_assistant(rng, draft, num_rows)
    draft.context_window = rng.choice([None, None, None, hf_dspark.ContextWindow(rng.randint(0, 4), rng.randint(1, 9))])
    note |= {"draft": (gamma, head, lesson), "options": make() | assistant, "window": draft.context_window}
    new, stats, _ = checks.batch_equals_plain(target, draft, rows, make, **assistant)
    if rng.random() < 0.2:  # the same pair again with other rows, fewer or one more
        note["again"] = True
        others = [*rows[1:], rows[0][:1], rows[-1][:7]][: max(2, num_rows - 1)]
        checks.batch_equals_plain(target, draft, others, max_new_tokens=rng.randint(1, LENGTH))
    return {"accepted": [r.accepted for r in stats.rounds], "rejected": stats.num_accepted < stats.num_verified,
            "cut": any(r.next_token is None for r in stats.rounds), "uneven": len(set(map(len, new))) > 1,
            "static": num_rows == 1}  # fmt: skip


RESULTS: dict[int, dict] = {}


@pytest.mark.filterwarnings("ignore:Unfeasible length")
@pytest.mark.parametrize("chunk", range(CASES // CHUNK))
def test_batches_equal_plain_generate(chunk):
    RESULTS.update(checks.run_cases(run_case, range(chunk * CHUNK, (chunk + 1) * CHUNK)))


def test_the_cases_reach_every_path():
    """The fuzz is worth nothing if drafts are never accepted, never rejected, or rows always end together."""
    if len(RESULTS) < CASES:
        pytest.skip("needs all chunks in this process")
    accepted = [a for result in RESULTS.values() for a in result["accepted"]]
    assert {0, 1, 2, 3, 4, 5, 6, 7} <= set(accepted)
    assert sum(r["rejected"] for r in RESULTS.values()) > 100
    assert sum(r["cut"] for r in RESULTS.values()) > 20
    assert sum(r["uneven"] for r in RESULTS.values()) > 40
    assert sum(r["static"] for r in RESULTS.values()) > 20
