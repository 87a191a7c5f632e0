"""The ragged path on a CUDA device: recorded rounds give the tokens of the uncaptured ones and of plain generate."""

import copy
import random
import threading
import time

import pytest
import torch
from family_files import some_ids, speculators_files
from transformers.generation.streamers import BaseStreamer

import checks
import hf_dspark
import tiny
from hf_dspark.generation.device_round import DeviceRounds
from hf_dspark.generation.engine import FastPath

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
SLIDING = {"layer_types": ["sliding_attention"], "sliding_window": 5, "use_sliding_window": True}


def guided(**settings):
    return tiny.guided_files(tiny.one_hot_table(tiny.NEXT, 3.0), **settings)


DRAFTS = {
    "full": lambda target: tiny.perm_draft(),
    "never": lambda target: tiny.bad_draft(),
    "scripted": lambda target: tiny.scripted_draft([0, 1, 2, 3, 4], 5),
    "random": tiny.random_draft,
    "rnn": lambda target: tiny.random_draft(target, head="rnn"),
    "reduced vocabulary": lambda target: tiny.load_draft(*speculators_files(*guided(), some_ids(40))),
    "windows": lambda target: tiny.load_draft(*speculators_files(*guided(), layers=SLIDING)),
    "windows, both ways": lambda target: tiny.load_draft(
        *speculators_files(*guided(), layers=SLIDING, sliding_window_non_causal=True)
    ),
    "interleaved": lambda target: tiny.load_draft(*guided(rope_is_neox_style=False)),
}
FAST_PATHS = {
    "whole": FastPath(),
    "eager layers": FastPath(compile=False, fuse_projections=False),
    "uncaptured": FastPath(capture=False),
    "one by one": FastPath(compile=False, fuse_projections=False, ahead=False),
}


def padded_batch(rng: random.Random, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    width = rng.randint(2, 40)
    ids = torch.tensor([[rng.randint(1, 60) for _ in range(width)] for _ in range(rows)])
    mask = torch.ones_like(ids)
    for row in range(rows if rows > 1 else 0):
        padding = rng.randint(0, width - 1)
        ids[row, :padding] = mask[row, :padding] = 0
    return ids.cuda(), mask.cuda()


def pair(family: str, draft: str):
    target = tiny.perm_target() if family == "perm" else tiny.random_target(family)
    return copy.deepcopy(target).cuda(), copy.deepcopy(DRAFTS[draft](target)).cuda()


@pytest.mark.parametrize("fast_path", FAST_PATHS)
@pytest.mark.parametrize("family", ["perm", "qwen3", "mistral", "gemma2"])
def test_greedy_tokens_equal_plain(family, fast_path):
    rng = random.Random(family)
    for name in ("scripted", "random") if fast_path == "whole" else DRAFTS:
        target, draft = pair(family, name)
        draft.fast_path = FAST_PATHS[fast_path]
        for rows in (1, 3, 1, 5) if name == "scripted" else (2,):
            ids, mask = padded_batch(rng, rows)
            options = {"attention_mask": mask, "max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
            plain = target.generate(ids, **options)
            output = target.generate(
                ids, assistant_model=draft, cache_implementation="static", return_dict_in_generate=True, **options
            )
            assert torch.equal(output.sequences, plain), (name, rows)
            assert output.speculation.path == "ragged"
            assert output.speculation.captured == (fast_path != "uncaptured"), output.speculation.reason


@pytest.mark.parametrize("options", [{"top_p": 0.9}, {"top_k": 5, "temperature": 0.7}, {"min_p": 0.1}, {}])
@pytest.mark.parametrize("name", ["random", "reduced vocabulary", "windows"])
def test_recorded_samples_equal_uncaptured_ones(options, name):
    target, draft = pair("qwen3", name)
    ids, mask = padded_batch(random.Random(0), 3)
    texts = []
    for fast_path in FAST_PATHS.values():
        draft.fast_path = fast_path
        torch.manual_seed(3)
        texts.append(
            target.generate(
                ids, attention_mask=mask, assistant_model=draft, do_sample=True, max_new_tokens=30, pad_token_id=0,
                **({"top_k": 0} | options),
            )
        )  # fmt: skip
    assert torch.equal(texts[1], texts[2]) and torch.equal(texts[1], texts[3])
    assert texts[0].shape == texts[1].shape


@pytest.mark.parametrize("scheduled", [False, True])
def test_rounds_that_run_ahead_equal_plain(scheduled):
    """Rows end at different times, by end-of-text ids that the device does not know; calls follow each other."""
    target, draft = pair("qwen3", "scripted")
    if scheduled:
        draft = copy.deepcopy(tiny.random_draft(tiny.random_target("qwen3"), confidence="markov")).cuda()
        draft.scheduler = "auto"
    draft.fast_path = FAST_PATHS["eager layers"]
    for rows, end in ((16, None), (5, 17), (64, 23), (7, 40), (2, 9)):
        ids, mask = padded_batch(random.Random(rows), rows)
        options = {"max_new_tokens": 60, "do_sample": False, "pad_token_id": 0, "eos_token_id": end}
        plain = target.generate(ids, attention_mask=mask, **options)
        output = target.generate(
            ids, attention_mask=mask, assistant_model=draft, return_dict_in_generate=True, **options
        )
        assert torch.equal(output.sequences, plain), (rows, end)
        assert output.speculation.captured, output.speculation.reason


class Slow(BaseStreamer):
    """Keeps what it is given, longer than a round takes."""

    def __init__(self):
        self.ids = []

    def put(self, value):
        self.ids += value.flatten().tolist()
        time.sleep(0.003)

    def end(self):
        pass


def test_a_lone_row_runs_ahead_of_its_streamer(monkeypatch):
    """The streamer sees the text of plain generate, with end-of-text ids that the device does not know, twice over."""
    target, draft = pair("qwen3", "scripted")
    draft.fast_path = FAST_PATHS["eager layers"]
    followed, follow = [], DeviceRounds._follow
    monkeypatch.setattr(DeviceRounds, "_follow", lambda *args: followed.append(follow(*args)) or followed[-1])
    for seed, end in ((0, None), (1, 17), (2, 23), (3, 40), (0, None)):
        ids, _ = padded_batch(random.Random(seed), 1)
        options = {"max_new_tokens": 80, "do_sample": False, "pad_token_id": 0, "eos_token_id": end}
        plain = target.generate(ids, **options)
        streamer = Slow()
        found = target.generate(ids, assistant_model=draft, cache_implementation="static", streamer=streamer, **options)
        assert torch.equal(found, plain) and streamer.ids == plain[0].tolist()
    assert sum(f is not None for f in followed) > 20


def test_threads_on_streams_of_their_own():
    """Each waits on the device for what the other has left there; recordings come in between."""
    found, errors = {}, []

    def work(name: str, target, draft, batches: list) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for i, (ids, mask) in enumerate(batches):
                    found[name, i] = target.generate(
                        ids, attention_mask=mask, assistant_model=draft, max_new_tokens=60, do_sample=False,
                        pad_token_id=0,
                    )  # fmt: skip
                torch.cuda.current_stream().synchronize()
        except Exception as error:
            errors.append(error)

    threads, expected = [], {}
    for name, draft_name in (("a", "scripted"), ("b", "random")):
        target, draft = pair("qwen3", draft_name)
        draft.fast_path = FAST_PATHS["eager layers"]
        batches = [padded_batch(random.Random(f"{name}{i}"), rows) for i, rows in enumerate((3, 6, 2, 3))]
        for i, (ids, mask) in enumerate(batches):
            expected[name, i] = target.generate(
                ids, attention_mask=mask, max_new_tokens=60, do_sample=False, pad_token_id=0
            )
        threads.append(threading.Thread(target=work, args=(name, target, draft, batches)))
    torch.cuda.synchronize()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert not errors, errors
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in found)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_pair_on_another_device_than_the_current_one():
    target, draft = (model.to("cuda:1") for model in pair("qwen3", "scripted"))
    ids, mask = (tensor.to("cuda:1") for tensor in padded_batch(random.Random(2), 3))
    options = {"attention_mask": mask, "max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    plain = target.generate(ids, **options)
    for fast_path in FAST_PATHS.values():
        draft.fast_path = fast_path
        output = target.generate(ids, assistant_model=draft, return_dict_in_generate=True, **options)
        assert torch.equal(output.sequences, plain) and output.speculation.path == "ragged"
    assert torch.cuda.current_device() == 0


def test_processors_between_the_graphs():
    target, draft = pair("qwen3", "scripted")
    ids, mask = padded_batch(random.Random(1), 3)
    options = {"attention_mask": mask, "max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    options |= {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}
    plain = target.generate(ids, **options)
    assert torch.equal(target.generate(ids, assistant_model=draft, **options), plain)


def test_caches_grow_in_the_middle_of_a_text():
    target, draft = pair("perm", "full")
    ids = torch.tensor([[5, 17]], device="cuda")
    options = {"max_new_tokens": 1500, "do_sample": False}
    output = target.generate(ids, assistant_model=draft, cache_implementation="static", **options)
    assert output[0, 2:].tolist() == tiny.chain(17, 1500)


@pytest.mark.parametrize("window", [(0, 3), (4, 9), (4, 60)])
def test_a_context_window_in_recorded_rounds(window):
    """What the draft proposes over the ring is what it proposes over the plain path's context."""
    target, draft = pair("qwen3", "random")
    draft.context_window = hf_dspark.ContextWindow(*window)
    ids = torch.randint(1, 60, (1, 20), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    traces = []
    for options in ({}, {"cache_implementation": "static"}):
        with hf_dspark.record() as stats:
            target.generate(ids, assistant_model=draft, max_new_tokens=40, do_sample=False, **options)
        traces.append([(r.position, r.confidence) for r in stats.rounds])
    assert [position for position, _ in traces[0]] == [position for position, _ in traces[1]]
    for (_, one), (_, other) in zip(*traces, strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), atol=2e-2, rtol=2e-2)


def test_a_session_on_the_recorded_path():
    target, draft = pair("qwen3", "random")
    session = hf_dspark.Session(target, draft)
    text = torch.tensor([[5, 17, 3]], device="cuda")
    for i in range(4):
        options = {"max_new_tokens": 12, "do_sample": False}
        expected = target.generate(text, **options)
        with hf_dspark.record() as stats:
            text = session.generate(text, cache_implementation="static", **options)
        assert torch.equal(text, expected) and stats.path == "ragged" and (stats.num_reused > 0) == (i > 0)
        text = torch.cat((text, text[:, :1]), dim=1)


def test_captures_do_not_grow_with_prompts():
    target, draft = pair("perm", "scripted")
    draft.fast_path = FastPath(compile=False)  # layers are compiled by other tests
    for length in (*range(2, 14), 60, 64):
        ids = torch.randint(1, 60, (1, length), device="cuda")
        target.generate(ids, assistant_model=draft, cache_implementation="static", max_new_tokens=20, do_sample=False)
    (engine,) = draft._engines.of_target.values()
    assert len(engine._graphs) == 2, "a round and a prompt"


@pytest.mark.parametrize("family", ["perm", "qwen3", "mistral", "gemma2"])
def test_recorded_prompts_equal_plain_ones(family):
    """Lengths around the recorded sizes, alone and in batches; texts that the caches hold in part."""
    target, draft = pair(family, "scripted")
    draft.fast_path = FastPath(compile=False)  # layers are compiled by other tests
    sizes = {(63,): 64, (64,): 64, (65,): 128, (3, 150, 40): 256, (200, 190): 512, (300, 290): None, (31, 2, 450): 512}
    for lengths, size in sizes.items():
        rows = [[(7 * i + n) % 50 + 1 for i in range(n)] for n in lengths]
        inputs = {name: tensor.to("cuda") for name, tensor in checks.batch(rows).items()}
        options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
        expected = target.generate(**inputs, **options)
        more = {} if len(rows) > 1 else {"cache_implementation": "static"}
        with hf_dspark.record() as stats:
            found = target.generate(**inputs, **options, assistant_model=draft, **more)
        assert stats.captured and "prompts" not in stats.reason
        assert torch.equal(found, expected), lengths
        (engine,) = draft._engines.of_target.values()
        recorded = {key[2] for key in engine._graphs._recorded if key[0] == "prompt"}  # caches that grow forget them
        assert size is None or size in recorded, (lengths, recorded)


def test_a_recording_that_fails_leaves_others_their_graphs():
    """A prompt that looks at the device while it is recorded runs as it is; rounds are recorded all the same."""
    target, draft = pair("perm", "scripted")
    draft.fast_path = FastPath(compile=False)  # layers are compiled by other tests
    layer = target.model.layers[0].mlp
    forward = type(layer).forward

    def looks(self, hidden):
        if hidden.shape[1] == 64 and not torch.compiler.is_compiling():
            hidden.sum().item()
        return forward(self, hidden)

    type(layer).forward = looks
    try:
        ids = torch.arange(1, 41, device="cuda")[None]
        expected = target.generate(ids, max_new_tokens=12, do_sample=False)
        with hf_dspark.record() as stats:
            found = target.generate(
                ids, assistant_model=draft, cache_implementation="static", max_new_tokens=12, do_sample=False
            )
    finally:
        type(layer).forward = forward
    assert torch.equal(found, expected)
    assert stats.captured and "prompts could not be recorded" in stats.reason
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
