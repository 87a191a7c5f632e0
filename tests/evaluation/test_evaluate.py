"""Whole evaluations of tiny pairs: every number against plain Python over the rounds."""

import copy
import json
import math

import pytest
import torch

import tiny
from hf_dspark.evaluation import (
    ChatFormat,
    Prompt,
    Settings,
    dspark_methods,
    evaluate,
    other_methods,
    plain_methods,
    plot,
)  # fmt: skip
from hf_dspark.evaluation import runner as runner_module
from hf_dspark.evaluation.methods import Method
from hf_dspark.evaluation.runner import Runner

TIMES = {"seconds", "tokens_per_second", "tokens_per_second_per_row", "speedup", "median_speedup"}
PROMPTS = [
    Prompt("one", 0, ("abc",), "math", {"sub_category": "sums"}),
    Prompt("one", 1, ("de", "fg", "h"), "chat"),
    Prompt("two", 0, ("xyz",), "math", {"sub_category": "roots"}),
]


@pytest.fixture(scope="module")
def draft():
    """Right after even tokens, wrong after odd ones; c says .8 and .3."""
    table = [tiny.NEXT[t] if t % 2 == 0 else tiny.wrong_table()[t] for t in range(tiny.V)]
    logits = torch.tensor([1.386 if t % 2 == 0 else -0.847 for t in range(tiny.V)])
    return tiny.markov_draft(tiny.one_hot_table(table), confidence=logits)


def run(draft, prompts=PROMPTS, *, methods=None, settings=None, target=None, **options):
    methods = methods or [*plain_methods(compiled=False), *dspark_methods({"dspark": draft})]
    settings = settings or Settings(max_new_tokens=12)
    target = target or tiny.perm_target()
    options.setdefault("progress", lambda iterable, total: iterable)
    return evaluate(target, ChatFormat(tiny.tokenizer()), methods, prompts, settings, **options)


def without_times(value):
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if k not in TIMES and k != "milliseconds"}
    return [without_times(v) for v in value] if isinstance(value, list) else value


def test_a_report_adds_up(draft, tmp_path):
    report = run(draft, report_path=tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text()) == json.loads(json.dumps(report))
    rows = report["overall"]["methods"]
    assert report["overall"]["prompts"] == 3 and report["overall"]["turns"] == 5
    assert rows["plain"]["tokens"] == rows["dspark"]["tokens"] == 60
    assert rows["plain"]["output_sha256"] == rows["dspark"]["output_sha256"]
    assert rows["plain"]["speedup"] == pytest.approx(1) and rows["plain"]["median_speedup"] == 1.0
    assert rows["dspark"]["identical_to_plain"] == 5 and report["outputs"] == "identical"
    assert math.isclose(rows["dspark"]["tokens_per_second"], 60 / rows["dspark"]["seconds"])

    lines = [json.loads(line) for line in (tmp_path / "r.records.jsonl").read_text().splitlines()]
    rounds = [r for record in lines[1:] for turn in record["turns"] for r in turn["calls"]["dspark"]["rounds"]]
    row = rows["dspark"]
    committed = sum(r["accepted"] + (r["next_token"] is not None) for r in rounds)
    assert committed == 60 - 5  # the first token of each answer comes from the prefill
    assert row["num_spec_steps"] == len(rounds) and row["num_spec_tokens"] == 4
    assert row["num_draft_tokens"] == sum(r["verified"] for r in rounds)
    assert row["num_accepted_draft_tokens"] == sum(r["accepted"] for r in rounds) > 0
    assert row["mean_acceptance_length"] == committed / len(rounds)
    assert row["draft_acceptance_rate"] == row["num_accepted_draft_tokens"] / row["num_draft_tokens"]
    for accepted, count in row["acceptance_histogram"].items():
        assert count == sum(r["accepted"] == int(accepted) for r in rounds)
    assert sum(row["acceptance_histogram"].values()) == len(rounds)
    expected = [1 + sum(r["survival"][: r["verified"]]) for r in rounds]
    assert math.isclose(row["expected_acceptance_length"], sum(expected) / len(rounds))
    for at, tried in zip(row["confidence_by_position"], row["tried_by_position"], strict=True):
        assert (at["c"]["count"] if at["c"] else 0) == tried
        if at["c"] and 0 < at["c"]["accepted"] < 1:
            assert at["c"]["auroc"] == 1.0  # c says exactly when the draft is right


def test_sets_categories_and_macro_mean(draft):
    report = run(draft)
    assert {name: group["prompts"] for name, group in report["sets"].items()} == {"one": 2, "two": 1}
    assert {name: group["prompts"] for name, group in report["categories"].items()} == {"math": 2, "chat": 1}
    assert {n: g["turns"] for n, g in report["sub_categories"].items()} == {"math / sums": 1, "math / roots": 1}
    for groups in ("sets", "categories"):
        rows = [group["methods"]["dspark"] for group in report[groups].values()]
        assert sum(row["num_spec_steps"] for row in rows) == report["overall"]["methods"]["dspark"]["num_spec_steps"]
    taus = [group["methods"]["dspark"]["mean_acceptance_length"] for group in report["sets"].values()]
    assert taus[0] != taus[1]
    assert math.isclose(report["macro_mean"]["dspark"]["mean_acceptance_length"], sum(taus) / 2)


def test_every_turn_continues_the_same_conversation(draft, monkeypatch):
    seen = []
    original = Runner._call

    def call(self, method, rows, *rest):
        seen.append((method.name, rows))
        return original(self, method, rows, *rest)

    monkeypatch.setattr(Runner, "_call", call)
    run(draft, [PROMPTS[1]])
    text, tokenizer, measured = "", tiny.tokenizer(), seen[2:]  # after the warm-up
    for turn, question in enumerate(PROMPTS[1].turns):
        text += question
        ids = tokenizer(text)["input_ids"]
        assert measured[2 * turn] == ("plain", [ids]) and measured[2 * turn + 1] == ("dspark", [ids])
        text += tokenizer.decode(tiny.chain(ids[-1], 12))
    assert len(measured) == 6


def test_sweeps_and_comparison_rows(draft):
    drafts = {"dspark": draft, "other": tiny.bad_draft()}
    methods = [
        *plain_methods(compiled=False),
        *dspark_methods(drafts, num_assistant_tokens=(1, 4), assistant_confidence_threshold=(0.0, 0.5)),
        *other_methods(prompt_lookup_num_tokens=3, assistant=copy.deepcopy(tiny.perm_target())),
    ]
    report = run(draft, PROMPTS[:1], methods=methods)
    rows = report["overall"]["methods"]
    assert len(rows) == 1 + 8 + 2 and {row["identical_to_plain"] for row in rows.values()} == {1}
    assert rows["dspark γ=1 threshold=0"]["num_spec_tokens"] == 1
    assert set(rows["dspark γ=1 threshold=0"]["acceptance_histogram"]) <= {"0", "1"}
    whole, cut = rows["dspark γ=4 threshold=0"], rows["dspark γ=4 threshold=0.5"]
    assert cut["num_draft_tokens"] < whole["num_draft_tokens"]
    assert cut["draft_acceptance_rate"] == 1.0 > whole["draft_acceptance_rate"]
    assert rows["other γ=4 threshold=0"]["mean_acceptance_length"] == 1.0
    assert rows["assistant"]["num_spec_steps"] < 12 == rows["plain"]["tokens"]
    assert rows["assistant"]["mean_acceptance_length"] == 12 / rows["assistant"]["num_spec_steps"] > 1
    assert report["methods"]["dspark γ=1 threshold=0"] == {
        "num_assistant_tokens": 1, "assistant_confidence_threshold": 0.0,
    }  # fmt: skip


def test_a_draft_without_markov_and_confidence_head():
    methods = [*plain_methods(compiled=False), *dspark_methods({"dflash": tiny.slot0_draft()})]
    row = run(None, PROMPTS[:1], methods=methods, settings=Settings(max_new_tokens=13))["overall"]["methods"]["dflash"]
    assert row["mean_acceptance_length"] == 2.0 and row["acceptance_by_position"][:2] == [1.0, 0.0]
    assert row["tried_by_position"] == [6, 5, 0, 0]  # no room for a second draft in the last round
    assert row["confidence_by_position"] is row["threshold_curve"] is row["expected_acceptance_length"] is None


def test_sampling_is_not_compared_and_is_repeatable(draft):
    settings = Settings(max_new_tokens=12, sampling={"do_sample": True, "temperature": 1.0, "top_k": 0}, seed=5)
    target = tiny.random_target()
    first, again = (run(tiny.random_draft(target), settings=settings, target=target) for _ in range(2))
    assert first["outputs"] == "not compared" and "identical_to_plain" not in first["overall"]["methods"]["dspark"]
    assert without_times(first) == without_times(again)
    hashes = [report["overall"]["methods"]["dspark"]["output_sha256"] for report in (first, again)]
    other = run(tiny.random_draft(target), settings=Settings(12, settings.sampling, 6), target=target)
    assert hashes[0] == hashes[1] != other["overall"]["methods"]["dspark"]["output_sha256"]


# ---- identity


def test_texts_that_differ_are_reported_with_their_logit_gap(draft):
    """The negative control: a method that forbids a token the target wants."""
    text = tiny.chain(tiny.tokenizer()("abc")["input_ids"][-1], 12)
    wrong = Method("wrong", {"assistant_model": draft, "suppress_tokens": [text[5]]}, draft)
    report = run(draft, PROMPTS[:1], methods=[*plain_methods(compiled=False), wrong])
    (difference,) = report["differences"]
    assert difference["prompt"] == "one/0" and difference["method"] == "wrong" and difference["at"] == 5
    logits = tiny.perm_target()(torch.tensor([tiny.tokenizer()("abc")["input_ids"] + text[:5]])).logits[0, -1].detach()
    assert difference["logit_gap"] > 1 and math.isclose(difference["logit_gap"], float(logits.max()), rel_tol=1e-4)
    assert report["outputs"] == "different"
    assert report["overall"]["methods"]["wrong"]["identical_to_plain"] == 0


def test_near_ties_of_half_precision_are_told_from_errors(draft, monkeypatch):
    target = tiny.perm_target(dtype=torch.bfloat16)
    half = tiny.perm_draft().to(torch.bfloat16)
    monkeypatch.setattr(Runner, "_logit_gap", lambda self, *_: 0.25)
    text = tiny.chain(tiny.tokenizer()("abc")["input_ids"][-1], 12)
    wrong = Method("wrong", {"assistant_model": half, "suppress_tokens": [text[5]]}, half)
    report = run(half, PROMPTS[:1], methods=[*plain_methods(compiled=False), wrong], target=target)
    assert report["outputs"] == "near ties" and report["near_tie"] == 0.5


# ---- resume


def test_an_interrupted_run_goes_on(draft, tmp_path, monkeypatch):
    whole = run(draft, report_path=tmp_path / "whole.json")
    path, played = tmp_path / "r.json", []
    original = Runner._play

    def interrupted(self, unit, seed):
        if unit.name == "one/1":
            raise KeyboardInterrupt
        return original(self, unit, seed)

    monkeypatch.setattr(Runner, "_play", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(draft, report_path=path)
    partial = tmp_path / "r.partial.jsonl"
    assert not path.exists() and len(partial.read_text().splitlines()) == 2
    with partial.open("a") as file:
        file.write('{"name": "one/1", "prom')  # a line that the interrupt cut off

    monkeypatch.setattr(
        Runner, "_play", lambda self, unit, seed: played.append(unit.name) or original(self, unit, seed)
    )
    report = run(draft, report_path=path)
    assert played == ["one/1", "two/0"]
    assert without_times(report) == without_times(whole)
    assert not partial.exists()
    records = [(tmp_path / f"{name}.records.jsonl").read_text().splitlines() for name in ("r", "whole")]
    assert [without_times(json.loads(line)) for line in records[0]] == [
        without_times(json.loads(line)) for line in records[1]
    ]
    played.clear()
    run(draft, report_path=path)
    assert played == ["one/0", "one/1", "two/0"], "a finished run begins anew"


def test_an_interrupted_run_with_other_settings_is_not_continued(draft, tmp_path, monkeypatch):
    monkeypatch.setattr(Runner, "_play", lambda self, unit, seed: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(draft, report_path=tmp_path / "r.json")
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"r\.partial\.jsonl.*\(settings\)"):
        run(draft, report_path=tmp_path / "r.json", settings=Settings(max_new_tokens=13))
    with pytest.raises(ValueError, match="prompts_sha256"):
        run(draft, PROMPTS[:2], report_path=tmp_path / "r.json")
    run(draft, report_path=tmp_path / "r.json")


# ---- throughput


def test_throughput_has_a_fixed_length(draft):
    target = tiny.perm_target()
    end = tiny.chain(tiny.tokenizer()("abc")["input_ids"][-1], 4)[-1]
    before = target.generation_config.eos_token_id
    target.generation_config.eos_token_id = end
    try:
        assert run(draft, PROMPTS[:1])["overall"]["methods"]["plain"]["tokens"] == 4
        report = run(draft, batch_sizes=(1, 2))
        assert target.generation_config.eos_token_id == end
    finally:
        target.generation_config.eos_token_id = before
    rows = {(row["batch_size"], row["method"]): row for row in report["throughput"]}
    assert set(rows) == {(1, "plain"), (1, "dspark"), (2, "plain"), (2, "dspark")}
    assert [rows[key]["tokens"] for key in rows] == [36, 36, 24, 24]
    assert rows[2, "dspark"]["batches"] == 1 and rows[2, "dspark"]["paths"] == {"ragged": 1}
    assert report["outputs"] == "identical" and rows[2, "dspark"]["identical_to_plain"] == 2
    for (size, _), row in rows.items():
        assert math.isclose(row["tokens_per_second_per_row"], row["tokens_per_second"] / size)


# ---- wrong usage


@pytest.mark.parametrize(
    "options, words",
    [
        ({"prompts": []}, "No prompts"),
        ({"batch_sizes": (4,)}, "number of prompts, 3, got 4"),
        ({"batch_sizes": (0,)}, "got 0"),
        ({"settings": Settings(max_new_tokens=0)}, "at least 1"),
        ({"settings": Settings(max_new_tokens=510)}, "Prompt one/0 is too long: 3 tokens and up to 510"),
        ({"settings": Settings(max_new_tokens=170)}, "Prompt one/1 is too long: 5 tokens and up to 510"),
        ({"prompts": [Prompt("a", 0, ("a" * 600,))]}, "too long: 600"),
    ],
)
def test_nothing_to_measure_or_too_long_is_refused_before_any_forward(draft, options, words, tmp_path, monkeypatch):
    monkeypatch.setattr(Runner, "_call", lambda *_: pytest.fail("generate() was called"))
    with pytest.raises(ValueError, match=words):
        run(draft, report_path=tmp_path / "r.json", **options)
    assert not list(tmp_path.iterdir())


def test_wrong_methods(draft):
    with pytest.raises(ValueError, match="1..4 for dspark, got 5"):
        dspark_methods({"dspark": draft}, num_assistant_tokens=(5,))
    with pytest.raises(ValueError, match=r"\[0, 1\], got 1.5"):
        dspark_methods({"dspark": draft}, assistant_confidence_threshold=(1.5,))
    with pytest.raises(ValueError, match="different names"):
        run(draft, methods=[Method("plain"), Method("plain")])


def test_the_scheduler_of_a_method_is_taken_back(draft):
    method = Method("x", {"assistant_model": draft}, draft, scheduler="auto")
    with pytest.raises(ZeroDivisionError), method.installed():
        assert draft.scheduler == "auto"
        raise ZeroDivisionError
    assert getattr(draft, "scheduler", None) is None


# ---- plots


def test_plots_are_drawn(draft, tmp_path):
    pytest.importorskip("matplotlib")
    methods = [
        *plain_methods(compiled=False),
        *dspark_methods({"dspark": draft, "headless": tiny.perm_draft()}, assistant_confidence_threshold=(0.0, 0.5)),
    ]
    paths = plot(run(draft, methods=methods), tmp_path / "new" / "folder")
    assert [path.name for path in paths] == ["acceptance_by_position.png", "reliability.png", "threshold.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    report = run(draft, methods=[*plain_methods(compiled=False), *dspark_methods({"d": tiny.perm_draft()})])
    assert [path.name for path in plot(report, tmp_path)] == ["acceptance_by_position.png"]
    assert [path.name for path in plot(run(draft, batch_sizes=(1,)), tmp_path)] == ["throughput.png"]
    assert plot(run(draft, methods=plain_methods(compiled=False)), tmp_path) == []


def test_the_target_forwards_of_a_method_are_counted():
    target = tiny.perm_target()
    with runner_module._counted_forwards(target) as calls:
        target.generate(torch.tensor([[1, 2]]), max_new_tokens=5, do_sample=False)
    target.generate(torch.tensor([[1, 2]]), max_new_tokens=5, do_sample=False)
    assert len(calls) == 5
