"""Recorded rounds, rehearsed on the CPU: fixed widths and sizes, compiled forms, idle runs before the real one.

On a GPU a round is recorded once and replayed. Here `Rehearsal` runs it as a recording would: twice with no row at
work, then for real, padded to its bucket, through the compiled layers (backend aot_eager, which needs no compiler).
What a recording could not do shows as another text, another draw or an output of another shape.
"""

import contextlib
import copy
import dataclasses
import functools

import pytest
import torch

import checks
import hf_dspark
import tiny
from hf_dspark.generation import engine, rounds
from hf_dspark.generation.engine import Engine, FastPath
from hf_dspark.generation.engines import engine_of
from hf_dspark.generation.graphs import Graphs, RecordingFailed
from hf_dspark.generation.layout import Lanes, share
from hf_dspark.scheduling.scheduler import PrefixScheduler

ROWS = [[5, 9, 11, 3, 8], [40, 7], [3, 30, 31, 17, 2, 12, 50]]
FAMILIES = ["perm", "qwen3", "mistral", "gemma2"]


def shapes_of(outputs) -> list:
    if isinstance(outputs, torch.Tensor):
        return [(tuple(outputs.shape), outputs.dtype)]
    if dataclasses.is_dataclass(outputs):
        outputs = tuple(vars(outputs).values())
    return [shape for part in outputs for shape in shapes_of(part)] if isinstance(outputs, tuple) else [outputs]


class Rehearsal(Graphs):
    """Runs what would be recorded; `shapes` are those of each key's outputs, which a graph cannot change."""

    shapes: dict = {}

    def run(self, key, function, static=True):
        if not self.enabled:
            return function()
        with self._idle(), self._prepared(static):
            function()
            function()
        with self._prepared(static):
            outputs = function()
        if outputs is not None:
            found = shapes_of(outputs)
            assert self.shapes.setdefault((id(self), key), found) == found, key
        return outputs


@pytest.fixture(scope="module", autouse=True)
def recording():
    """Engines of this module record; those of drafts with `capture=False` do not."""
    torch.compiler.reset()  # what other tests compiled until torch gave up on a layer
    compile_ = torch.compile

    def without_a_compiler(function, **options):
        return compile_(function, **{"backend": "aot_eager"} | options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", without_a_compiler)
        patch.setattr(engine, "Graphs", Rehearsal)
        patch.setattr(Engine, "_why_uncaptured", lambda self, *pair: "" if self._options.capture else "as asked")
        rounds.compiled.cache_clear()
        yield
    rounds.compiled.cache_clear()
    Rehearsal.shapes.clear()
    pair.cache_clear()
    hf_dspark.release()


@functools.cache
def pair(family: str):
    """A target and a draft that is right about part of its text, so that rows accept different lengths."""
    target = tiny.perm_target(layers=2) if family == "perm" else tiny.random_target(family, layers=2)
    target, table = copy.deepcopy(target), torch.zeros(tiny.V, tiny.V)
    for row in ROWS:
        text = checks.plain(target, row)[0].tolist()
        own = tiny.text_table(text)
        for token in text[len(row) + 3 :: 4]:
            own[token] = own[token].roll(1)
        table = torch.where(own.any(-1, keepdim=True), own, table)
    return target, tiny.load_draft(*tiny.guided_files(table, taps=(-1, 0)))


def unrecorded(draft):
    other = copy.deepcopy(draft)
    other.fast_path = FastPath(capture=False, compile=False)
    return other


def run(target, draft, rows=ROWS, **options):
    """Text, and the decisions of every round."""
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0} | options
    if len(rows) == 1:
        options["cache_implementation"] = "static"
    torch.manual_seed(5)
    with hf_dspark.record() as stats:
        ids = target.generate(**checks.batch(rows), assistant_model=draft, **options)
    assert (stats.path, stats.captured) == ("ragged", (draft.fast_path or FastPath()).capture), stats.reason
    return ids.tolist(), [(r.row, r.position, r.draft_tokens, r.verified, r.accepted) for r in stats.rounds]


def equals_plain(target, draft, rows=ROWS, **options):
    """Recorded text is that of plain generate and every decision that of uncaptured rounds."""
    text, decisions = run(target, draft, rows, **options)
    given = {name: value for name, value in options.items() if "assistant" not in name}
    plain = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0} | given
    assert text == target.generate(**checks.batch(rows), **plain).tolist()
    assert (text, decisions) == run(target, unrecorded(draft), rows, **options)
    return decisions


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_rounds_give_the_text_of_plain_generate(family):
    """A batch whose rows end one by one through three widths, then one row."""
    target, draft = pair(family)
    texts = [checks.plain(target, row)[0, len(row) :].tolist() for row in ROWS]
    early = {token for text in texts for token in text[:3]}
    ends = [next(token for token in text if token not in early) for text in texts[:2]]
    decisions = equals_plain(target, draft, eos_token_id=ends)
    assert {row for row, *_ in decisions} == {0, 1, 2}
    assert len({accepted for *_, accepted in decisions}) > 1
    equals_plain(target, draft, ROWS[:1])


def prompt(length: int) -> list[int]:
    return [(7 * i + length) % 50 + 1 for i in range(length)]


@pytest.fixture
def recorded_sizes(monkeypatch):
    """Sizes of the prompts that were recorded."""
    sizes, run = [], Rehearsal.run

    def note(self, key, *args, **more):
        if self.enabled and key[0] == "prompt":
            sizes.append(key[2])
        return run(self, key, *args, **more)

    monkeypatch.setattr(Rehearsal, "run", note)
    return sizes


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_prompts_give_the_text_of_plain_generate(family, recorded_sizes):
    """Lengths around the recorded sizes, alone and together; what is longer runs as it is."""
    target, draft = pair(family)
    for lengths, size in (((64,), 64), ((65,), 128), ((3, 150, 40), 256), ((31, 2, 450), 512), ((400, 113), None)):
        recorded_sizes.clear()
        equals_plain(target, draft, [prompt(n) for n in lengths], max_new_tokens=5)
        assert recorded_sizes == [size] * (size is not None)


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_prompts_in_chunks_and_behind_what_the_caches_hold(family, recorded_sizes):
    target, draft = pair(family)
    equals_plain(target, draft, [prompt(150), prompt(3)], max_new_tokens=5, prefill_chunk_size=60)
    assert recorded_sizes == [64, 64, 64]
    session, text = hf_dspark.Session(target, draft), torch.tensor([prompt(40)])
    for _ in range(3):
        options = {"max_new_tokens": 9, "do_sample": False}
        expected = target.generate(text, **options)
        text = session.generate(text, **options, cache_implementation="static")
        assert torch.equal(text, expected)
        text = torch.cat((text, text[:, :70]), dim=1)
    assert recorded_sizes[3:] == [64, 64, 128]


def test_recorded_prompts_forget_the_one_before():
    """Fewer rows or chunks after a longer prompt, in the same buffers."""
    target, draft = pair("qwen3")
    equals_plain(target, draft, [prompt(100)] * 4, max_new_tokens=3)
    equals_plain(target, draft, [prompt(10)] * 3, max_new_tokens=3)
    equals_plain(target, draft, [prompt(300)], max_new_tokens=3)
    equals_plain(target, draft, [prompt(290)], max_new_tokens=3, prefill_chunk_size=32)


@pytest.mark.parametrize("window", [None, hf_dspark.ContextWindow(4, 9)])
def test_warmup_records_prompts_without_room_for_them(window, recorded_sizes):
    target, draft = pair("qwen3")
    draft = copy.deepcopy(draft)
    draft.context_window = window
    equals_plain(target, draft, ROWS[:1])
    recorded_sizes.clear()
    hf_dspark.warmup(target, draft, batch_size=4, max_length=20)
    assert recorded_sizes == ([] if window else [64, 128, 192, 256, 384, 512])
    equals_plain(target, draft)


def test_prompts_are_not_recorded_where_a_context_window_moves_on(recorded_sizes):
    target, draft = pair("qwen3")
    draft = copy.deepcopy(draft)
    draft.context_window = hf_dspark.ContextWindow(4, 9)
    equals_plain(target, draft, [prompt(50)], max_new_tokens=5)
    assert not recorded_sizes


def test_prompts_that_cannot_be_recorded_run_as_they_are(monkeypatch):
    """Said in the statistics of every call, tried once."""
    target, draft = pair("qwen3")
    draft, failed, run = copy.deepcopy(draft), [], Rehearsal.run

    def fails(self, key, *args, **more):
        if self.enabled and key[0] == "prompt":
            failed.append(key)
            raise RecordingFailed("no graphs")
        return run(self, key, *args, **more)

    monkeypatch.setattr(Rehearsal, "run", fails)
    for _ in range(2):
        _, stats = checks.generate(target, draft, prompt(50), max_new_tokens=5, cache_implementation="static")
        assert stats.captured and "prompts could not be recorded (no graphs)" in stats.reason
    assert len(failed) == 1


def test_recorded_rounds_with_decisions_on_the_host():
    """A processor stands between the draft's and the target's recording."""
    target, draft = pair("qwen3")
    equals_plain(target, draft, repetition_penalty=1.3)
    equals_plain(target, draft, ROWS[:1], repetition_penalty=1.3)


@pytest.mark.parametrize("options", [{"assistant_confidence_threshold": 0.5}, {"num_assistant_tokens": 2}])
def test_recorded_rounds_that_verify_less(options):
    """What is left out of a round is padding of its recording."""
    target, draft = pair("qwen3")
    decisions = equals_plain(target, draft, **options)
    assert min(verified for *_, verified, _ in decisions) < 3


class Dear:
    """Costs under which a part of the drafts is worth verifying."""

    def steps_per_second(self, batch_tokens, num_rows):
        return 1 / (1 + 0.2 * batch_tokens / num_rows)


def test_compiled_rounds_that_run_ahead():
    target, draft = pair("qwen3")
    expected = run(target, draft)
    draft = copy.deepcopy(draft)
    draft.fast_path = FastPath(ahead=True)
    text, decisions = run(target, draft)
    assert (text, sorted(decisions)) == (expected[0], sorted(expected[1]))


def test_recorded_rounds_share_a_budget_out():
    """In lagged mode the number of tokens is known before the round, and the recording is as large as they need."""
    target = copy.deepcopy(tiny.random_target("qwen3", layers=2))
    draft = tiny.random_draft(target, taps=(-1, 0), confidence="markov")
    draft.scheduler = PrefixScheduler(Dear(), lagged=True)
    plain = target.generate(**checks.batch(ROWS), max_new_tokens=16, do_sample=False, pad_token_id=0)
    for model in (draft, unrecorded(draft)):
        text, decisions = run(target, model)
        assert text == plain.tolist()
        assert len({verified for *_, verified, _ in decisions}) > 1


def test_what_is_left_beside_the_anchors_is_shared_by_survival():
    """As the scheduler shares it on the host, ties too; lanes without a row and rows at their end get nothing."""
    torch.manual_seed(0)
    scheduler = PrefixScheduler(Dear(), lagged=True)
    limits = torch.tensor([3, 1, -1, 3])
    active = limits >= 0
    lanes = Lanes(*[torch.arange(4)] * 5, torch.zeros(5))._replace(active=active)
    for size in range(3, 12):
        c = torch.rand(4, 3).mul(4).ceil().div(4)
        shared = share(lanes, c, limits, 3, size)
        a = torch.where(torch.arange(3) < limits[:, None], c.cumprod(-1), 0)
        planned = torch.tensor(scheduler.schedule(a.double(), budget=size - 3))
        assert shared.tolist() == torch.minimum(planned, limits).tolist()
        assert int(shared[active].sum()) == min(size - 3, 7)
        assert share(lanes, None, limits, 3, size)[active].sum() == min(size - 3, 7)


def test_a_single_row_gets_its_first_drafts():
    scheduler = PrefixScheduler(Dear(), lagged=True)
    for limit, active in ((3, True), (1, True), (-1, False)):
        lanes = Lanes(*[torch.arange(1)] * 5, torch.zeros(2))._replace(active=torch.tensor([active]))
        for size in range(1, 5):
            c = torch.rand(1, 3)
            (planned,) = scheduler.schedule(c.cumprod(-1).double(), budget=size - 1)
            assert share(lanes, c, torch.tensor([limit]), 3, size).tolist() == [min(planned, limit)]


def test_what_is_shared_fits_whatever_the_confidence_is():
    """NaN is refused a round later, where it comes to the host."""
    limits = torch.full((2,), 3)
    lanes = Lanes(*[torch.arange(2)] * 5, torch.zeros(3))._replace(active=torch.ones(2, dtype=torch.bool))
    c = torch.tensor([[float("nan")] * 3, [0.5] * 3])
    for size in range(2, 8):
        assert int((share(lanes, c, limits, 3, size) + 1).sum()) == size


WARPERS = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02}


@pytest.mark.parametrize("method,options", [("probabilistic", {}), ("probabilistic", WARPERS), ("greedy", WARPERS)])
def test_recorded_rounds_draw_what_uncaptured_rounds_draw(method, options, monkeypatch):
    """The same seed gives the same draws, whatever the padding; idle runs do not move the streams on."""
    target, draft = pair("qwen3")
    monkeypatch.setattr(draft, "draft_sample_method", method)
    for rows in (ROWS, ROWS[:1]):
        given = {"do_sample": True, "eos_token_id": [3, 9, 17, 30], **options}
        recorded = run(target, draft, rows, **given)
        assert recorded == run(target, unrecorded(draft), rows, **given)
        assert recorded == run(target, draft, rows, **given)


def test_recorded_host_sampling_draws_what_uncaptured_rounds_draw():
    target, draft = pair("qwen3")
    given = {"do_sample": True, "typical_p": 0.8, "eos_token_id": [3, 9]}
    assert run(target, draft, **given) == run(target, unrecorded(draft), **given)


def test_recordings_survive_growth_in_the_middle_of_a_call(monkeypatch):
    """Larger caches mean new recordings; what the rows hold is kept. More rows than before mean more of them."""
    monkeypatch.setattr(engine, "FIRST_SLOTS", 64)
    target, draft = pair("perm")
    equals_plain(target, draft)
    equals_plain(target, draft, [tiny.chain(3, 60), ROWS[1]], max_new_tokens=40)
    equals_plain(target, draft, [*ROWS, ROWS[0][:3], ROWS[2][:1]], max_new_tokens=9)


def test_a_layer_that_cannot_be_compiled_is_recorded_uncompiled(monkeypatch):
    """torch gives up on code that was compiled too often anywhere in the process; the rest of the fast path stays."""
    target = copy.deepcopy(tiny.random_target("qwen3", layers=2))
    draft = tiny.random_draft(target, taps=(-1, 0))
    failed = []

    def run(self, key, function, static=True):
        compiles = static is not None and engine_of(target, draft)._compiled is not None
        if self.enabled and compiles:
            failed.append(key)
            raise RecordingFailed("recompile limit")
        return function()

    monkeypatch.setattr(Rehearsal, "run", run)
    ids = torch.tensor([ROWS[0]])
    plain = target.generate(ids, max_new_tokens=16, do_sample=False)
    output, stats = checks.generate(
        target, draft, ids, max_new_tokens=16, cache_implementation="static", return_dict_in_generate=True
    )
    assert torch.equal(output.sequences, plain)
    assert len(failed) == 1 and stats.captured and "layers run uncompiled (recompile limit)" in stats.reason


def test_a_cost_that_cannot_be_recorded(monkeypatch):
    """What fails while "auto" measures gives way as it does in rounds."""
    target = copy.deepcopy(tiny.random_target("qwen3", layers=2))
    draft = tiny.random_draft(target, taps=(-1, 0), confidence="markov")
    draft.scheduler, run_, failed = "auto", Rehearsal.run, []

    def run_later(self, key, function, static=True):
        if key[0] == "propose" and not failed:
            failed.append(key)
            raise RecordingFailed("no memory")
        return run_(self, key, function, static)

    monkeypatch.setattr(Rehearsal, "run", run_later)
    plain = target.generate(**checks.batch(ROWS), max_new_tokens=16, do_sample=False, pad_token_id=0)
    with hf_dspark.record() as stats:
        text = target.generate(
            **checks.batch(ROWS), assistant_model=draft, max_new_tokens=16, do_sample=False, pad_token_id=0
        )
    assert torch.equal(text, plain)
    assert len(failed) == 1 and stats.captured and "layers run uncompiled (no memory)" in stats.reason


def test_an_error_without_words_is_a_failed_recording():
    def wordless():
        raise AssertionError

    graphs = Graphs(contextlib.nullcontext, lambda static: contextlib.nullcontext())
    graphs.enabled = True
    with pytest.raises(RecordingFailed, match="AssertionError"):
        graphs.run("key", wordless)
