"""What once broke the ragged path, from an attempt to break it on purpose."""

import copy
import functools
import threading
from contextlib import contextmanager

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

import checks
import hf_dspark
import tiny
from hf_dspark.generation import device_round, engine, fuse, graphs, ragged_cache, rounds, timing
from hf_dspark.generation.engine import Engine, FastPath
from hf_dspark.generation.engines import engine_of
from hf_dspark.generation.graphs import Graphs, RecordingFailed, Turn

ROWS = [[5, 9, 11, 3, 8], [40, 7], [3, 30, 31, 17, 2, 12, 50]]
STATIC = {"cache_implementation": "static"}
FORMS = [(ROWS, {}), (ROWS[:1], STATIC)]


def pair(family: str = "qwen3", seed: int = 0, **settings):
    target = copy.deepcopy(tiny.random_target(family, layers=3, seed=seed, **settings))
    return target, tiny.random_draft(target, taps=(-1, 1))


def built(**settings):
    """A target of another family with random weights, and a draft."""
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**(tiny.SHAPE | {"num_hidden_layers": 3} | settings))
    )
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.0 if "embed" in name else 2.0 / parameter.shape[-1] ** 0.5)
    return target.eval(), tiny.random_draft(target, taps=(-1, 1))


def equal(target, draft, rows=ROWS, options=None, **more):
    """Text of the call equals plain generate, whatever path it takes. Returns its statistics."""
    given = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0} | checks.batch(rows) | more
    cache = {name: given.pop(name) for name in STATIC if name in given}
    expected = target.generate(**given, **(options or dict)())
    with hf_dspark.record() as stats:
        found = target.generate(assistant_model=draft, **given, **cache, **(options or dict)())
    assert found.tolist() == expected.tolist(), stats.path
    return stats


# ---- another text than plain generate


def test_biases_changed_in_place():
    target, draft = pair(attention_bias=True)
    equal(target, draft)
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.q_proj.bias.normal_(0, 3)
            layer.self_attn.v_proj.bias.normal_(0, 3)
    equal(target, draft)


def test_biases_of_the_draft_changed_in_place():
    target, config = pair()[0], tiny.draft_config(taps=(-1, 1), attention_bias=True)
    biases = {
        f"layers.0.self_attn.{name}_proj.bias": torch.randn(size)
        for name, size in zip("qkvo", (64, 32, 32, 64), strict=True)
    }
    draft = tiny.load_draft(config, tiny.draft_tensors(config) | biases)
    equal(target, draft)
    with torch.no_grad():
        draft.layers[0].self_attn.k_proj.bias.normal_(0, 4)
        draft.layers[0].self_attn.v_proj.bias.normal_(0, 4)
    proposals = [[r.draft_tokens for r in equal(target, each).rounds] for each in (draft, copy.deepcopy(draft))]
    assert proposals[0] == proposals[1]


def test_tied_projections_changed_in_place():
    target, draft = pair()
    layers = target.model.layers
    layers[2].self_attn.q_proj.weight = layers[0].self_attn.q_proj.weight
    layers[1].self_attn.v_proj.weight = layers[1].self_attn.k_proj.weight
    equal(target, draft)
    with torch.no_grad():
        layers[0].self_attn.q_proj.weight.mul_(-2)
        layers[1].self_attn.k_proj.weight.mul_(-2)
    equal(target, draft)


@pytest.mark.parametrize("name", ["self_attn.q_proj", "mlp.up_proj"])
def test_a_replaced_forward_of_a_projection_stays(name):
    target, draft = pair()
    module = target.model.layers[1].get_submodule(name)
    module.forward = lambda x: -torch.nn.functional.linear(x, module.weight)
    equal(target, draft)


@pytest.mark.parametrize("rows,more", FORMS)
def test_a_targets_own_way_to_prepare_inputs(rows, more):
    target, draft = pair()
    original = target.prepare_inputs_for_generation

    @functools.wraps(original)
    def stretched(*args, **kwargs):
        inputs = original(*args, **kwargs)
        return inputs | {"position_ids": 2 * inputs["position_ids"]}

    target.prepare_inputs_for_generation = stretched
    equal(target, draft, rows, **more)


ROPE = {
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
                "max_position_embeddings": 16},
    "longrope": {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0,
                                     "short_factor": [1.0] * 16, "long_factor": [3.0] * 16,
                                     "original_max_position_embeddings": 16}, "max_position_embeddings": 64},
    "phi3": {"model_type": "phi3", "head_dim": 16, "max_position_embeddings": 64,
             "original_max_position_embeddings": 16,
             "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "short_factor": [1.0] * 8,
                                 "long_factor": [3.0] * 8, "original_max_position_embeddings": 16}},
}  # fmt: skip


@pytest.mark.parametrize("rows,more", [*FORMS, (ROWS[:1], {})], ids=["batch", "static", "plain path"])
@pytest.mark.parametrize("kind", ROPE)
def test_rotary_tables_that_change_with_length(kind, rows, more):
    """The text crosses 16 tokens, where the tables change. The plain path has the same fault."""
    equal(*built(**ROPE[kind]), rows, max_new_tokens=24, **more)


@pytest.mark.parametrize("rows,more", FORMS)
def test_windows_that_the_attention_function_is_not_told_of(rows, more):
    """The twin is compared over 11 tokens, fewer than the window."""
    settings = {"model_type": "phimoe", "sliding_window": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
    equal(*built(**settings), rows, max_new_tokens=32, **more)


class SeesItself(LogitsProcessor):
    """A caller's processor that keeps, for each row, what it has seen there, and bans it."""

    def __init__(self):
        self.seen = [set() for _ in ROWS]

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        for row, seen in enumerate(self.seen):
            seen.add(int(input_ids[row, -1]))
            scores[row, sorted(seen)] = -torch.inf
        return scores


def test_processors_that_keep_a_state_for_each_row():
    """Grammar processors do so; plain generate shows row j in place j only."""
    equal(*pair(), options=lambda: {"logits_processor": LogitsProcessorList([SeesItself()])})


def test_allowed_tokens_of_each_row():
    """A trie of allowed texts for each row, as in constrained decoding; an empty answer is an error in transformers."""
    width, texts = max(map(len, ROWS)), [tiny.chain(row[-1], 16) for row in ROWS]

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        new = ids[width:].tolist()
        return [texts[row][len(new)]] if new == texts[row][: len(new)] else []

    equal(tiny.perm_target(), tiny.perm_draft(), max_new_tokens=14, prefix_allowed_tokens_fn=allowed)


class CommitsFail(Graphs):
    """A device on which one of the recordings does not succeed, for want of memory."""

    def run(self, key, function, static=True):
        if self.enabled and key[0] == "commit":
            raise RecordingFailed("out of memory")
        return function()


def test_a_commit_that_cannot_be_recorded(monkeypatch):
    monkeypatch.setattr(engine, "Graphs", CommitsFail)
    monkeypatch.setattr(Engine, "_why_uncaptured", lambda *pair: "")
    target, draft = pair()
    draft.fast_path = FastPath(compile=False)
    equal(target, draft, repetition_penalty=1.3)


def test_dropout_of_a_target_in_train_mode():
    target, draft = pair(attention_dropout=0.5)
    target.train()
    texts = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        texts.append(target.generate(**checks.batch(ROWS), assistant_model=draft, max_new_tokens=16, do_sample=False,
                                     pad_token_id=0).tolist())  # fmt: skip
    assert texts[0] != texts[1]


@pytest.mark.parametrize("rows,more", FORMS)
def test_dtype_of_the_result(rows, more):
    target, draft = pair()
    given = checks.batch(rows) | {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    given["input_ids"] = given["input_ids"].int()
    assert target.generate(**given, assistant_model=draft, **more).dtype == target.generate(**given).dtype


# ---- errors


@pytest.mark.parametrize("at", [1, 2])
def test_memory_that_runs_out_while_buffers_grow(at, monkeypatch):
    target, draft = pair(max_position_embeddings=4096)
    equal(target, draft)
    original, calls = ragged_cache.resized, []

    def full(*args):
        calls.append(args)
        if len(calls) == at:
            raise torch.OutOfMemoryError("full")
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(ragged_cache, "resized", full)
        with pytest.raises(torch.OutOfMemoryError):
            equal(target, draft, [row * 400 for row in ROWS], max_new_tokens=4)
    equal(target, draft, [row * 400 for row in ROWS], max_new_tokens=4)


@pytest.mark.parametrize("kind", ["forward", "layer", "hrm_text"])
def test_targets_whose_layers_cannot_be_watched(kind):
    """`target.forward = torch.compile(target.forward)` stands in transformers' own guide. A reason would do."""
    target, draft = built(model_type="hrm_text") if kind == "hrm_text" else pair()
    if kind == "forward":
        target.forward = torch.compile(target.forward, backend="eager")
    elif kind == "layer":
        target.model.layers[0] = torch.compile(target.model.layers[0], backend="eager")
    equal(target, draft)


def test_mixtures_that_report_their_router():
    """`output_router_logits` stays in the config after fine-tuning; plain generate and the plain path allow it."""
    settings = {"model_type": "mixtral", "num_local_experts": 4, "output_router_logits": True}
    equal(*built(**settings), ROWS[:1], **STATIC)


def test_another_default_dtype():
    """float64 breaks c_k; half precision rounds temperatures of sampling and calibration, for good."""
    target, draft = pair()
    for dtype in (torch.bfloat16, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            equal(target, copy.deepcopy(draft))
            rounds = engine_of(target, draft).rounds(1)
        finally:
            torch.set_default_dtype(torch.float32)
        assert rounds.warpers.temperature.dtype == rounds.temperatures.dtype == torch.float32


def test_another_default_device():
    """What goes to the device is made on the CPU first, where memory can be pinned."""
    rounds = engine_of(*pair()).rounds(4)
    rounds.ends.fill_(9)
    with torch.device("meta"):
        rounds.end([1, 2])
    assert rounds.ends.tolist() == [9, 0, 0, 9]


# ---- locks


@pytest.fixture
def own_turn(monkeypatch):
    """Threads that never end must not keep the lock of other tests."""
    lock = Turn()
    for module in (device_round, engine, graphs, rounds, timing):
        monkeypatch.setattr(module, "TURN", lock)


class Calls(StoppingCriteria):
    """A criterion that does something when the text has 12 tokens."""

    def __init__(self, action):
        self.action = action

    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] == 12:
            self.action()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def test_warmup_inside_a_call(own_turn):
    target, draft = pair()
    criteria = StoppingCriteriaList([Calls(lambda: hf_dspark.warmup(target, draft))])
    work = functools.partial(equal, target, draft, stopping_criteria=criteria)
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()


def test_calls_inside_calls_of_two_threads(own_turn, monkeypatch):
    """A's criterion generates with the second pair just when B has begun to."""
    first, second, began, held = pair(), pair(seed=3), threading.Event(), Engine.held
    equal(*first), equal(*second)

    @contextmanager
    def noted(self):
        with held(self):
            if threading.current_thread().name == "B":
                began.set()
            yield

    monkeypatch.setattr(Engine, "held", noted)
    other = threading.Thread(target=functools.partial(equal, *second), daemon=True, name="B")

    def inside():
        if not began.is_set():
            other.start()
            began.wait(5)
            equal(*second)

    criteria = StoppingCriteriaList([Calls(inside)])
    thread = threading.Thread(target=lambda: first[0].generate(
        **checks.batch(ROWS), assistant_model=first[1], stopping_criteria=criteria, max_new_tokens=16,
        do_sample=False, pad_token_id=0), daemon=True)  # fmt: skip
    thread.start()
    thread.join(6)
    assert not thread.is_alive()


def test_weights_of_a_target_are_fused_by_one_thread_at_a_time(monkeypatch):
    """Seen as "setStorage: sizes ... are out of bounds" with three drafts in three threads and a release."""
    target, draft = pair()
    other, finished, original = tiny.random_draft(target, taps=(-1, 1), seed=2), [], fuse.Fused._fuse

    def slowly(self, module, names):
        if threading.current_thread() is threading.main_thread() and not finished:
            thread = threading.Thread(target=engine_of, args=(target, other), daemon=True)
            thread.start()
            thread.join(2)
            finished.append(not thread.is_alive())
        return original(self, module, names)

    monkeypatch.setattr(fuse.Fused, "_fuse", slowly)
    equal(target, draft)
    assert finished == [False]


# ---- warmup


@pytest.mark.parametrize("batch_size", [1, 3])
def test_recordings_of_warmup_serve_the_first_call(batch_size, monkeypatch):
    cleared, clear = [], Graphs.clear
    monkeypatch.setattr(Graphs, "clear", lambda self: (cleared.append(self), clear(self)))
    target, draft = pair()
    hf_dspark.warmup(target, draft, batch_size=batch_size)
    before = len(cleared)
    equal(target, draft, ROWS[:batch_size], **(STATIC if batch_size == 1 else {}))
    assert len(cleared) == before


@pytest.mark.parametrize("what", ["graph", "weights"])
def test_warmup_of_a_caller_with_gradients(what):
    target, draft = pair()
    hf_dspark.warmup(target, draft)
    if what == "graph":
        assert not any(tensor.requires_grad for tensor in engine_of(target, draft)._cache.tensors)
        return
    with torch.no_grad():
        draft.layers[0].self_attn.k_proj.weight.mul_(-2)
        draft.layers[0].self_attn.v_proj.weight.mul_(-2)
    proposals = [[r.draft_tokens for r in equal(target, each).rounds] for each in (draft, copy.deepcopy(draft))]
    assert proposals[0] == proposals[1]
