"""The speed of tiny pairs: rows that add up, medians, the byte floor counted by hand, and a trace with its ranges."""

import json
import statistics

import pytest
import torch

import checks
import hf_dspark
import tiny
from hf_dspark.evaluation import ChatFormat, Prompt, speed
from hf_dspark.evaluation.floor import FLOOR, byte_floor, copy_bandwidth
from hf_dspark.evaluation.speed import COMPILED, STATIC, default_prompts, measure_speed
from hf_dspark.generation.engines import engine_of
from hf_dspark.generation.memory import cache_memory

PROMPTS = [Prompt("some", i, (text,)) for i, text in enumerate(("abc", "de", "f"))]
SAMPLING = {"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 0.9}


@pytest.fixture
def draft():
    """Right after even tokens, wrong after odd ones."""
    table = [tiny.NEXT[t] if t % 2 == 0 else tiny.wrong_table()[t] for t in range(tiny.V)]
    return tiny.markov_draft(tiny.one_hot_table(table))


def run(draft, prompts=PROMPTS, *, target=None, **options):
    options = {"max_new_tokens": 8, "repeats": 1} | options
    return measure_speed(target or tiny.perm_target(), draft, ChatFormat(tiny.tokenizer()), prompts, **options)


def test_rows_add_up(draft):
    report = run(draft, repeats=3, batch_sizes=(1, 2), sampling=SAMPLING, about={"target": "x"})
    assert report == json.loads(json.dumps(report, allow_nan=False)) and report["target"] == "x"
    rows = {(row["mode"], row["batch_size"], row["method"]): row for row in report["rows"]}
    of_mode = [(1, "plain"), (1, "dspark"), (1, STATIC), (2, "plain"), (2, STATIC)]
    assert list(rows) == [(mode, *rest) for mode in ("greedy", "sampling") for rest in of_mode]
    for (mode, size, method), row in rows.items():
        batches = 3 if size == 1 else 2  # the first prompt again where the last batch is not full
        assert row["batches"] == batches and row["tokens"] == 8 * size * batches
        assert row["seconds"] == statistics.median(row["seconds_of_repeats"]) and len(row["seconds_of_repeats"]) == 3
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])
        assert row["speedup"] == pytest.approx(rows[mode, size, "plain"]["seconds"] / row["seconds"])
        assert row["same_every_repeat"] and row["warm_up_seconds"] > 0 and row["speedup_over_compiled"] is None
        if method == "plain":
            assert row["ms_per_step"] == pytest.approx(1000 * row["seconds"] / (8 * batches))
        else:
            assert row["num_spec_steps"] > 0 and row["paths"] == {"ragged" if method == STATIC else "plain": batches}
        if mode == "greedy":
            assert row["identical_to_plain"] == size * batches
            assert row["output_sha256"] == rows[mode, size, "plain"]["output_sha256"]
    assert report["outputs"] == "identical" and report["warmup_seconds"] > 0
    assert report["versions"]["hf_dspark"] == hf_dspark.__version__ and report["dtype"] == "torch.float32"
    assert report["device"] == "cpu" and report["settings"]["seed"] == 0 and report["sampling"] == SAMPLING


def test_rows_of_cuda_are_left_out_with_the_reason(draft):
    report = run(draft)
    assert report["left_out"] == dict.fromkeys((COMPILED, FLOOR), "needs CUDA, the target is on cpu")


def test_a_pair_without_a_fast_path_is_measured_on_the_plain_path():
    report = run(tiny.random_draft(), target=tiny.random_target("lfm2"))
    assert "no conv layers" in report["left_out"][STATIC] and report["warmup_seconds"] is None
    assert [row["method"] for row in report["rows"]] == ["plain", "dspark"] and report["outputs"] == "identical"


def test_wrong_texts_are_found(draft, monkeypatch):
    """A method that writes something else does not pass as identical."""
    original = speed.Runner._call

    def call(self, method, *rest):
        result = original(self, method, *rest)
        if method.name == STATIC:
            result["ids"] = [[*ids[:-1], 0] for ids in result["ids"]]
        return result

    monkeypatch.setattr(speed.Runner, "_call", call)
    report = run(draft, PROMPTS[:1])
    assert report["outputs"] == "different" and report["differences"][0]["at"] == 7
    assert [row["identical_to_plain"] for row in report["rows"]] == [1, 1, 0]


def test_repeats_are_medians_and_methods_take_turns(draft, monkeypatch):
    calls = []

    def call(self, method, rows, seed, *rest):
        calls.append(method.name)
        seconds = {"plain": (9.0, 1.0, 4.0, 2.0), "dspark": (9.0, 8.0, 2.0, 1.0)}.get(method.name, (1.0,) * 4)
        rounds = {"rounds": [], "path": "plain", "captured": False, "reason": ""} if method.draft else {}
        return {"ids": [[1] * 8], "seconds": seconds[calls.count(method.name) - 1], **rounds}

    monkeypatch.setattr(speed.Runner, "_call", call)
    plain, dspark, _ = run(draft, PROMPTS[:1], repeats=3)["rows"]
    assert calls == ["plain", "dspark", STATIC] * 4  # a warm-up and three repeats
    assert (plain["warm_up_seconds"], plain["seconds"], dspark["seconds"]) == (9.0, 2.0, 2.0)
    assert dspark["speedup"] == 1.0 and dspark["ms_per_step"] == 250.0  # no round: steps are tokens


@pytest.mark.parametrize(
    "options, words",
    [
        ({"prompts": []}, "No prompts"),
        ({"batch_sizes": (0,)}, "1..64"),
        ({"batch_sizes": (65,)}, "1..64"),
        ({"batch_sizes": (2, 2)}, "different numbers"),
        ({"batch_sizes": ()}, "at least one"),
        ({"repeats": 0}, "`repeats` must be at least 1"),
        ({"max_new_tokens": 0}, "`max_new_tokens` must be at least 1"),
        ({"max_new_tokens": 510}, "Prompt some/0 is too long: 3 tokens"),
        ({"sampling": {"temperature": 0.0}}, "`temperature` must be above 0"),
        ({"sampling": {"top_p": 1.5}}, "`top_p` must be above 0"),
    ],
)
def test_wrong_options_are_refused_before_the_work(draft, options, words, monkeypatch):
    monkeypatch.setattr(speed.Runner, "_call", lambda *args: pytest.fail("something was generated"))
    with pytest.raises(ValueError, match=words):
        run(draft, **options)


def test_default_prompts():
    assert len(default_prompts()) == 3 and len(default_prompts(2)) == 2
    with pytest.raises(ValueError, match="at least 1, got 0"):
        default_prompts(0)


def test_the_trace_shows_the_ranges_of_both_paths(draft, tmp_path):
    path = tmp_path / "trace.json"
    run(draft, PROMPTS[:1], max_new_tokens=4, profile_path=path)
    names = [event.get("name") for event in json.loads(path.read_text())["traceEvents"]]
    counts = [names.count(name) for name in ("dspark_propose", "target_verify", "decode_sample")]
    with hf_dspark.record() as stats:
        inputs = checks.batch([tiny.tokenizer()("abc").input_ids])
        tiny.perm_target().generate(**inputs, assistant_model=draft, max_new_tokens=speed.PROFILED_TOKENS)
    assert counts == [2 * stats.num_rounds] * 3  # each path once


# ---- the floor


def size(*tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_the_floor_counts_every_weight_of_a_round():
    target, draft = tiny.random_target("qwen3"), tiny.random_draft(layers=2)
    floor = byte_floor(target, draft, num_rows=3, context=10)
    assert floor["target layers"] == size(*target.model.layers.parameters(), target.model.norm.weight)
    assert floor["target head"] == size(target.lm_head.weight)
    own = [draft.fc, draft.hidden_norm, draft.norm, draft.layers, draft.confidence_head]
    assert floor["draft layers"] == size(*(weight for module in own for weight in module.parameters()))
    attention = [layer.self_attn for layer in draft.layers]
    assert floor["draft context"] == size(*(w for a in attention for w in (a.k_proj.weight, a.v_proj.weight)))
    assert floor["draft head"] == size(draft.lm_head.weight)
    assert floor["Markov W2"] == 4 * size(draft.markov_head.markov_w2.weight)
    assert floor["target cache"] == 3 * 10 * 6 * 2 * (2 * 32) * 4 and floor["draft cache"] == 3 * 10 * 2 * 2 * 32 * 4


def test_the_floor_of_shared_heads_windows_and_experts():
    target, draft = tiny.random_target("qwen3_sliding"), tiny.random_draft(rank=0, confidence=None)
    floor = byte_floor(target, draft, num_rows=1, context=10)
    assert floor["Markov W2"] == 0 and floor["target cache"] == (3 * 6 + 3 * 10) * 2 * (2 * 32) * 4
    tied = tiny.random_target("qwen3", tie_word_embeddings=True)
    assert byte_floor(tied, draft, num_rows=1, context=1)["target head"] == size(tied.lm_head.weight)
    with pytest.raises(ValueError, match="mixture of experts"):
        byte_floor(tiny.random_target("qwen3_next"), draft, num_rows=1, context=1)


def test_the_floor_becomes_a_row_where_there_is_one(draft, monkeypatch):
    monkeypatch.setattr(speed, "_left_out", lambda target, compiled: {COMPILED: "switched off"})
    monkeypatch.setattr(speed, "copy_bandwidth", lambda device: 1e6)
    report = run(draft, batch_sizes=(1, 2))
    floors = [row for row in report["rows"] if row["method"] == FLOOR]
    assert [row["batch_size"] for row in floors] == [1, 2] and report["rows"][3] is floors[0]
    for row, context in zip(floors, (2 + 4, round((3 + 2 + 1 + 3) / 4 + 4)), strict=True):
        expected = byte_floor(tiny.perm_target(), draft, num_rows=row["batch_size"], context=context)
        assert row["context"] == context and row["num_bytes"] == expected
        assert row["ms_per_step"] == pytest.approx(sum(expected.values()) / 1e3)
    assert report["left_out"] == {COMPILED: "switched off"}


def test_bandwidth_is_that_of_this_machine():
    assert 1e8 < copy_bandwidth(torch.device("cpu"), 1 << 24) < 1e13


# ---- memory of the fast path


@pytest.mark.parametrize("family", ["qwen3", "qwen3_sliding", "llama", "gpt_neox", "gemma3_text"])
@pytest.mark.parametrize("rows, length", [(1, 100), (3, 1100)])
def test_memory_from_configs_is_what_an_engine_allocates(family, rows, length):
    target = tiny.random_target(family)
    draft = tiny.random_draft(target, layers=2)
    memory = cache_memory(target.config, draft.config)
    hf_dspark.warmup(target, draft, batch_size=rows, max_length=length)
    assert memory.num_bytes(rows, length) == engine_of(target, draft).num_bytes
    hf_dspark.release(target)


def test_memory_of_halves_and_of_pairs_without_a_fast_path():
    target, draft = tiny.random_target("qwen3"), tiny.random_draft()
    whole, half = (cache_memory(target.config, draft.config, dtype) for dtype in (None, torch.bfloat16))
    assert (whole.target, whole.draft) == (2 * half.target, 2 * half.draft) == (3072, 256)
    with pytest.raises(ValueError, match="no conv layers"):
        cache_memory(tiny.random_target("lfm2").config, draft.config)
    with pytest.raises(ValueError, match="width 64"):
        cache_memory(tiny.random_target("qwen3", hidden_size=32).config, draft.config)
