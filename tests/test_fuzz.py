"""Invariants 1, 5 and 9 on hundreds of seeded cases: option × prompt × draft quality × path to a stop, in float32.

Each case draws its own target, prompt, options, draft and way to end, runs plain generate, teaches the draft that text
(fully, not at all, in a pattern, or not: a random draft), and compares ids, streamed tokens and every returned tensor.
"""

import functools
import random

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

import checks
import hf_dspark
import tiny
from hf_dspark._compat import CACHE_KEY

CASES, CHUNK = 320, 20
LENGTH = 16
TARGETS = (
    ("qwen3", {}), ("qwen3_sliding", {"sliding_window": 3}), ("mistral", {"sliding_window": 5}), ("llama", {}),
    ("gemma3_text", {"sliding_window": 4}), ("gemma2", {"sliding_window": 9}), ("gpt2", {}), ("gpt_neox", {}),
    ("perm", {}), ("perm", {}),
)  # fmt: skip


class BanRecent(LogitsProcessor):
    """A caller's processor with state: bans the last `since` tokens; each call must extend the text by one."""

    def __init__(self, since: int):
        self.since, self.history = since, []

    def __call__(self, input_ids, scores):
        ids = input_ids[0].tolist()
        assert not self.history or ids[:-1] == self.history[-1], "not the committed text plus one token"
        self.history.append(ids)
        recent = [h[-1] for h in self.history[-self.since :] if h]
        return scores.index_fill(-1, torch.tensor(recent, dtype=torch.long), -torch.inf)


@functools.cache
def target_of(index: int, attention: str | None):
    family, settings = TARGETS[index]
    if family == "perm":
        return tiny.perm_target(layers=2)
    return tiny.random_target(family, layers=2, attention=attention, **settings)


@functools.cache
def draft_of(gamma: int, kind: str):
    """Templates whose Markov table is rewritten for each case."""
    head, confidence = ("vanilla", None) if kind == "silent" else (kind, "markov")
    settings = {"gamma": gamma, "taps": (-1, 0), "head": head, "confidence": confidence}
    config, tensors = tiny.guided_files(torch.randn(tiny.V, tiny.V), **settings)
    if head == "gated":  # gates wide open, so that the table still leads
        tensors["markov_head.gate_proj.bias"] += 8
    if head == "rnn":  # the output part of the recurrent state reads W1[x_{k-1}]
        tensors["markov_head.joint_proj.weight"][2 * tiny.V :, tiny.V : 2 * tiny.V] += 8 * torch.eye(tiny.V)
    return tiny.load_draft(config, tensors)


def draw_options(rng: random.Random, text: list[int]):
    """Processors of transformers and of the caller, as keyword arguments made anew for each run."""
    pick = lambda n: rng.sample(text, min(n, len(text)))  # noqa: E731
    pool = {
        "repetition_penalty": lambda: rng.choice([0.7, 1.3, 2.5]),
        "no_repeat_ngram_size": lambda: rng.choice([1, 2, 3]),
        "min_new_tokens": lambda: rng.randint(1, LENGTH),
        "bad_words_ids": lambda: [[t] for t in pick(2)] + [pick(2)],
        "suppress_tokens": lambda: pick(2),
        "begin_suppress_tokens": lambda: pick(1),
        "forced_eos_token_id": lambda: rng.choice(text),
        "sequence_bias": lambda: [[pick(1), rng.choice([-9.0, 5.0])]],
        "encoder_repetition_penalty": lambda: 1.4,
        "renormalize_logits": lambda: True,
    }
    chosen = {name: pool[name]() for name in rng.sample(sorted(pool), rng.choice([0, 0, 0, 1, 2, 3]))}
    if "forced_eos_token_id" in chosen:  # transformers refuses to force what is suppressed
        chosen.pop("suppress_tokens", None)
    since = rng.choice([0, 0, 0, 0, 1, 4])

    def make():
        custom = {"logits_processor": LogitsProcessorList([BanRecent(since)])} if since else {}
        return chosen | custom

    return make


def draw_stop(rng: random.Random, new: list[int]):
    """A way to end the text, most of them somewhere inside `new`."""
    at = rng.randrange(len(new))
    strings = tiny.tokenizer().convert_ids_to_tokens(new[at : at + rng.randint(1, 2)])
    stops = {
        "length": lambda: {"max_new_tokens": rng.randint(1, LENGTH)},
        "eos": lambda: {"eos_token_id": new[at]},
        "eos list": lambda: {"eos_token_id": [new[at], rng.randrange(tiny.V), 62]},
        "criterion": lambda: {"stopping_criteria": ("at", at + 1)},
        "stop string": lambda: {"stop_strings": ["".join(strings), "never"], "tokenizer": tiny.tokenizer()},
        "two": lambda: {"eos_token_id": new[at], "stopping_criteria": ("at", rng.randint(1, LENGTH))},
    }
    return rng.choice(list(stops.values()))()


def draw_prompt(rng: random.Random, prompt: list[int], target, options: dict):
    """(ids, function that makes its keyword arguments): how the prompt reaches generate()."""
    way = rng.choice(["ids", "ids", "padded", "embeds", "cache"])
    ids, common = checks.tensor(prompt), {}
    if way == "padded" or (way == "embeds" and rng.random() < 0.3):
        pad = rng.randint(1, 4)
        common["attention_mask"] = torch.tensor([[0] * pad + [1] * len(prompt)])
        ids = torch.cat((torch.full((1, pad), 5), ids), -1)
    if way == "embeds" and "encoder_repetition_penalty" not in options:
        embeds = target.get_input_embeddings()(ids).detach()
        return None, lambda: {"inputs_embeds": embeds, **common}
    if rng.random() < 0.3 and way != "cache":  # transformers 5.18 feeds a cached prompt again when it goes by chunks
        common["prefill_chunk_size"] = rng.randint(1, 5)
    if way == "cache" and len(prompt) > 1:
        filled = rng.randrange(1, len(prompt))

        def make():
            cache = DynamicCache(config=target.config)
            with torch.no_grad():
                target(ids[:, :filled], use_cache=True, **{CACHE_KEY: cache})
            return {CACHE_KEY: cache, **common}

        return ids, make
    return ids, lambda: common


def teach(rng: random.Random, draft, kind: str, text: list[int], prompt: int, gamma: int) -> None:
    """Make the draft propose `text` fully, never, or along a pattern of accepted counts."""
    if kind == "random":
        return tiny.set_table(draft, torch.randn(tiny.V, tiny.V))
    table, anchor = tiny.text_table(text), prompt
    for _ in range(len(text)):
        accepted = {"full": gamma, "never": 0}.get(kind, rng.randint(0, gamma))
        if accepted < gamma and anchor + accepted < len(text):
            row = text[anchor + accepted]
            table[row] = table[row].roll(1)
        anchor += accepted + 1
    return tiny.set_table(draft, table)


def run_case(seed: int, note: dict | None = None) -> dict:
    """One case; fills `note` with what was drawn and returns what happened, for the coverage check."""
    rng, note = random.Random(seed), {} if note is None else note
    torch.manual_seed(seed)
    as_dict = rng.random() < 0.3
    index = rng.randrange(len(TARGETS))
    target = target_of(index, "eager" if as_dict or rng.random() < 0.3 else None)
    prompt = [rng.randrange(1, 62) for _ in range(rng.choice([1, 2, 3, 5, 9, 12]))]
    base = checks.plain(target, prompt, max_new_tokens=LENGTH)[0].tolist()
    processors, stop = draw_options(rng, base[len(prompt) :]), draw_stop(rng, base[len(prompt) :])
    ids, way = draw_prompt(rng, prompt, target, processors())
    outputs = ["output_scores", "output_logits", "output_hidden_states", "output_attentions"]
    wanted = dict.fromkeys(rng.sample(outputs, rng.randint(0, 4)), True) | {"return_dict_in_generate": True}
    start = 0 if ids is None else ids.shape[1]
    streamers = []

    def make():
        streamers.append(checks.ListStreamer())
        options = {"max_new_tokens": LENGTH, "streamer": streamers[-1], **processors(), **stop, **way()}
        if isinstance(options.get("stopping_criteria"), tuple):
            length = start + options["stopping_criteria"][1]
            options["stopping_criteria"] = StoppingCriteriaList([checks.StopAt(length)])
        return options | (wanted if as_dict else {})

    expected = checks.plain(target, ids, **make())
    text = prompt + checks.sequences(expected)[0, start:].tolist()
    gamma = rng.choice([1, 2, 4, 7, 7])
    kind = rng.choice(["full", "full", "full", "pattern", "pattern", "pattern", "never", "random"])
    draft = draft_of(gamma, rng.choice(["vanilla", "vanilla", "silent", "gated", "rnn"]))
    teach(rng, draft, kind, text, len(prompt), gamma)
    draft_options = {}
    if rng.random() < 0.3:
        draft_options["num_assistant_tokens"] = rng.randint(1, gamma)
    if rng.random() < 0.3 and draft.confidence_head is not None:
        draft_options["assistant_confidence_threshold"] = rng.choice([0.0, 0.3, 0.5, 0.9, 1.0])
    draft.context_window = rng.choice([None, None, None, hf_dspark.ContextWindow(rng.randint(0, 4), rng.randint(1, 9))])
    note |= {
        "target": TARGETS[index],
        "prompt": prompt,
        "stop": stop,
        "processors": processors(),
        "draft": (gamma, kind),
    }
    note |= {"draft options": draft_options, "window": draft.context_window, "as dict": as_dict}
    found, stats = checks.generate(target, draft, ids, **make(), **draft_options)

    assert checks.sequences(found).tolist() == checks.sequences(expected).tolist()
    assert streamers[1].puts == streamers[0].puts and streamers[1].ends == 1
    checks.adds_up(stats, len(text) - len(prompt), gamma)
    if stats.rounds:
        assert stats.rounds[0].position == len(prompt)
    if as_dict:
        checks.same_outputs(found, expected)
    return {"accepted": [r.accepted for r in stats.rounds], "rejected": stats.num_accepted < stats.num_verified,
            "cut": any(r.next_token is None for r in stats.rounds)}  # fmt: skip


RESULTS: dict[int, dict] = {}


@pytest.mark.parametrize("chunk", range(CASES // CHUNK))
def test_equal_to_plain_generate(chunk):
    RESULTS.update(checks.run_cases(run_case, range(chunk * CHUNK, (chunk + 1) * CHUNK)))


def test_the_cases_reach_every_path():
    """The fuzz is worth nothing if drafts are never accepted, never rejected, or never cut inside a block."""
    if len(RESULTS) < CASES:
        pytest.skip("needs all chunks in this process")
    accepted = [a for result in RESULTS.values() for a in result["accepted"]]
    assert {0, 1, 2, 3, 4, 5, 6, 7} <= set(accepted)
    assert sum(r["rejected"] for r in RESULTS.values()) > 80
    assert sum(r["cut"] for r in RESULTS.values()) > 30
