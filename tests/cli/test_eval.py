"""`hf-dspark eval` and `calibrate` in-process, on a tiny pair in temporary folders."""

import json
import shutil
import subprocess
import sys
import time

import pytest
import torch
from command import refused, run

import hf_dspark
import tiny
from hf_dspark.cli import calibrate as calibrate_module

MAIN = [sys.executable, "-c", "from hf_dspark.cli import main; main()"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of T-perm, of a draft with γ = 7 that is right half of the time, and of one that is never right."""
    root = tmp_path_factory.mktemp("models")
    tiny.perm_target().save_pretrained(root / "target")
    tokenizer = tiny.tokenizer()
    tokenizer.save_pretrained(root / "target")
    config = tiny.draft_config(gamma=7, vocab=tiny.V, rank=tiny.V, confidence="markov")
    table = [tiny.NEXT[t] if t % 2 == 0 else tiny.wrong_table()[t] for t in range(tiny.V)]
    confidence = torch.tensor([1.0 if t % 2 == 0 else -1.0 for t in range(tiny.V)])
    tiny.write_draft(root / "draft", config, tiny.markov_tensors(config, tiny.one_hot_table(table), confidence))
    bad = tiny.draft_config(vocab=tiny.V, rank=tiny.V, confidence=None)
    tiny.write_draft(root / "bad", bad, tiny.markov_tensors(bad, tiny.one_hot_table(tiny.wrong_table())))
    return {name: str(root / name) for name in ("target", "draft", "bad")}


@pytest.fixture
def pair(folders):
    return ["--target", folders["target"], "--draft", folders["draft"]]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "some.jsonl"
    rows = [{"turns": ["abc"], "category": "x"}, {"turns": ["de", "f"], "category": "y"}, {"turns": ["gh"]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def no_loading(monkeypatch):
    def load(*args, **kwargs):
        raise AssertionError("a model was loaded")

    for owner in (hf_dspark.cli.models.AutoModelForCausalLM, hf_dspark.cli.models.DSparkForCausalLM):
        monkeypatch.setattr(owner, "from_pretrained", load)


def test_eval_measures_and_shows(pair, folders, prompts, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path, plots = tmp_path / "r.json", tmp_path / "plots"
    more = ["--draft", folders["bad"], "--prompt-lookup-num-tokens", "3", "--json", str(path), "--plots", str(plots)]
    code, out, err = run(["eval", "--prompts", prompts, *pair, *more, "--max-new-tokens", "8"], capsys)
    assert code == 0, err
    assert "Texts against plain decoding: identical" in out and "dspark: by position" in out and "τ" in out
    assert "Categories" in out and "Mean over sets" not in out and "measuring" in err and "threshold.png" in err
    assert "identical" in out and "…" not in out and "prompt lookup" in out, "no column is cut"
    report = json.loads(path.read_text())
    rows = report["overall"]["methods"]
    assert list(rows) == ["plain", "dspark", "draft bad", "prompt lookup"]
    assert [row["tokens"] for row in rows.values()] == [32] * 4 and report["overall"]["turns"] == 4
    assert report["target"] == folders["target"] and report["drafts"]["draft bad"] == folders["bad"]
    assert report["versions"]["hf_dspark"] == hf_dspark.__version__ and report["template"] == "none"
    assert report["protocol"] is None and report["settings"]["max_new_tokens"] == 8
    assert {file.name for file in plots.iterdir()} == {"acceptance_by_position.png", "reliability.png", "threshold.png"}


def test_table1(pair, prompts, tmp_path, capsys):
    other = tmp_path / "other.jsonl"
    other.write_text('{"turns": ["zz"]}\n')
    path = tmp_path / "r.json"
    files = ["--prompts", prompts, "--prompts", str(other)]
    arguments = ["eval", *files, *pair, "--protocol", "table1", "--max-new-tokens", "8", "--json", str(path)]
    code, out, _ = run(arguments, capsys)
    assert code == 0 and "Mean over sets" in out and "not compared" in out
    report = json.loads(path.read_text())
    assert report["protocol"] == "table1" and report["methods"]["dspark γ=7"] == {"num_assistant_tokens": 7}
    assert report["settings"]["sampling"] == {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    taus = [group["methods"]["dspark γ=7"]["mean_acceptance_length"] for group in report["sets"].values()]
    assert report["macro_mean"]["dspark γ=7"]["mean_acceptance_length"] == pytest.approx(sum(taus) / 2)


def test_sweeps_and_throughput(pair, prompts, tmp_path, capsys):
    path = tmp_path / "r.json"
    sweep = ["--num-assistant-tokens", "1", "--num-assistant-tokens", "3", "--assistant-confidence-threshold", "0.5"]
    arguments = ["eval", "--prompts", prompts, *pair, "--max-new-tokens", "6", "--json", str(path)]
    assert run([*arguments, *sweep, "--num-prompts", "1"], capsys)[0] == 0
    assert set(json.loads(path.read_text())["methods"]) == {
        "plain", "dspark γ=1 threshold=0.5", "dspark γ=3 threshold=0.5",
    }  # fmt: skip
    code, out, _ = run([*arguments, "--batch-size", "1", "--batch-size", "3"], capsys)
    assert code == 0 and "Throughput" in out
    rows = json.loads(path.read_text())["throughput"]
    assert [(row["batch_size"], row["method"]) for row in rows] == [
        (1, "plain"), (1, "dspark"), (3, "plain"), (3, "dspark"),
    ]  # fmt: skip
    assert all(row["tokens"] == 18 for row in rows)


def test_different_texts_fail_the_check(pair, prompts, capsys, monkeypatch):
    original = hf_dspark.evaluation.report._differences
    monkeypatch.setattr(
        hf_dspark.evaluation.report,
        "_differences",
        lambda *arguments: original(*arguments) | {"outputs": "different"},
    )
    code, out, err = run(["eval", "--prompts", prompts, *pair, "--max-new-tokens", "4"], capsys)
    assert code == 1 and "more than a near tie" in err and "All prompts" in out


# ---- wrong usage and nothing to measure: a sentence and a code, never an empty table


@pytest.mark.parametrize(
    "content, words", [("", "holds no prompts"), ('{"turns": []}\n', "`turns` must be"), ("{}\n", "with `turns`")]
)
def test_no_prompts(pair, tmp_path, content, words, capsys, no_loading):
    path = tmp_path / "empty.jsonl"
    path.write_text(content)
    assert words in refused(["eval", "--prompts", str(path), *pair], capsys)


def test_missing_prompts(pair, tmp_path, capsys, no_loading):
    assert "no such file" in refused(["eval", "--prompts", str(tmp_path / "none.jsonl"), *pair], capsys)
    assert run(["eval", *pair], capsys)[0] == 2


def test_one_prompt(pair, prompts, capsys):
    code, out, _ = run(["eval", "--prompts", prompts, "--num-prompts", "1", *pair, "--max-new-tokens", "4"], capsys)
    assert code == 0 and "1/1" in out


def test_a_prompt_that_is_too_long(pair, tmp_path, capsys):
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"turns": ["abc"]}) + "\n" + json.dumps({"turns": ["a" * 600]}) + "\n")
    message = refused(["eval", "--prompts", str(path), *pair, "--max-new-tokens", "4"], capsys)
    assert "Prompt long/1 is too long: 600 tokens" in message and "512" in message


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--temperature", "0.5"], "add `--do-sample`"),
        (["--protocol", "table1", "--assistant-confidence-threshold", "0.5"], "T = 1, γ = 7"),
        (["--protocol", "table1", "--do-sample", "--top-p", "0.5"], "T = 1, γ = 7"),
        (["--protocol", "table1", "--num-assistant-tokens", "3"], "T = 1, γ = 7"),
        (["--protocol", "table1", "--batch-size", "2"], "T = 1, γ = 7"),
        (["--num-prompts", "0"], "at least 1"),
        (["--json", "/no/such/folder/x.json"], "`--json /no/such/folder/x.json`"),
    ],
)
def test_wrong_usage_is_found_before_loading(pair, prompts, arguments, words, capsys, no_loading):
    assert words in refused(["eval", "--prompts", prompts, *pair, *arguments], capsys)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--num-assistant-tokens", "8"], "1..7"),
        (["--assistant-confidence-threshold", "1.5"], "[0, 1]"),
        (["--batch-size", "4"], "number of prompts, 3, got 4"),
        (["--compiled"], "needs CUDA"),
        (["--thinking"], "no effect"),
        (["--chat-template"], "no chat template"),
        (["--max-new-tokens", "0"], "at least 1"),
    ],
)
def test_wrong_usage_of_this_pair(pair, prompts, arguments, words, capsys):
    assert words in refused(["eval", "--prompts", prompts, *pair, "--device-map", "cpu", *arguments], capsys)


def test_wrong_drafts(pair, folders, prompts, capsys, no_loading):
    arguments = ["eval", "--prompts", prompts, *pair, "--draft"]
    assert "is given twice" in refused([*arguments, folders["draft"]], capsys)
    assert "both" in refused([*arguments, folders["target"]], capsys)


# ---- interrupt


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_report(pair, tmp_path, capsys):
    prompts = tmp_path / "many.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [chr(97 + i) * 3]}) + "\n" for i in range(8)))
    path, whole, partial = tmp_path / "r.json", tmp_path / "whole.json", tmp_path / "r.partial.jsonl"
    arguments = ["eval", "--prompts", str(prompts), *pair, "--max-new-tokens", "60", "--json"]
    process = subprocess.Popen([*MAIN, *arguments, str(path)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while not partial.exists() or partial.read_bytes().count(b"\n") < 2:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.communicate(timeout=60)
    done = partial.read_text().splitlines()
    assert not path.exists() and 2 <= len(done) < 9
    assert run([*arguments, str(path)], capsys)[0] == 0 and run([*arguments, str(whole)], capsys)[0] == 0
    records = (tmp_path / "r.records.jsonl").read_text().splitlines()
    assert len(records) == 9 and records[1] == done[1], "what was measured is kept"
    first, second = (json.loads(file.read_text())["overall"]["methods"] for file in (path, whole))
    for method in ("plain", "dspark"):
        times = {"seconds", "tokens_per_second", "speedup", "median_speedup"}
        assert {k: v for k, v in first[method].items() if k not in times} == {
            k: v for k, v in second[method].items() if k not in times
        }


# ---- calibrate


@pytest.fixture
def calibrated(monkeypatch):
    """Stands in for the fit; keeps what it was called with."""
    calls = []

    def calibrate(target, draft, prompts, **options):
        calls.append((prompts, options))
        gamma = draft.config.num_draft_tokens
        draft.config.confidence_temperatures = [1.5] * gamma
        lists = {
            name: [0.1] * gamma
            for name in ("ece_by_position", "ece_by_position_before", "auroc_c", "auroc_a", "auroc_a_before")
        }
        numbers = {"ece_before": 0.2, "ece_after": 0.1, "ece_sampled_before": 0.2, "ece_sampled_after": 0.1}
        return calibrate_module.calibration.CalibrationReport(
            temperatures=[1.5] * gamma, num_rounds=300, num_samples=200, notes=["something"], **lists, **numbers
        )

    monkeypatch.setattr(calibrate_module.calibration, "calibrate", calibrate)
    return calls


def test_calibrate_saves_the_temperatures(pair, prompts, tmp_path, capsys, calibrated):
    path, folder = tmp_path / "c.json", tmp_path / "draft"
    options = ["--max-new-tokens", "9", "--holdout", "0.4", "--seed", "3", "--output", str(folder), "--json", str(path)]
    code, out, err = run(["calibrate", *pair, "--prompts", prompts, *options], capsys)
    assert code == 0 and "0.2000" in out and "1.500" in out and "something" in err and "saved" in err
    texts, given = calibrated[0]
    assert texts == ["abc", "de", "gh"] and given.pop("tokenizer") is not None
    assert given == {"max_new_tokens": 9, "holdout": 0.4, "seed": 3}
    result = json.loads(path.read_text())
    assert result["temperatures"] == [1.5] * 7 and result["dataset"] == "some" and result["num_samples"] == 200
    assert (result["ece_before"], result["ece_after"]) == (0.2, 0.1)
    assert hf_dspark.DSparkForCausalLM.from_pretrained(folder).config.confidence_temperatures == [1.5] * 7


def test_a_card_shows_what_eval_bench_and_calibrate_wrote(pair, folders, prompts, tmp_path, capsys, calibrated):
    pytest.importorskip("matplotlib")
    files = [tmp_path / f"{verb}.json" for verb in ("eval", "bench", "calibrate")]
    short = [*pair, "--prompts", prompts, "--max-new-tokens", "6"]
    for path in files:
        more = ["--repeats", "1"] if path.stem == "bench" else []
        code, _, err = run([path.stem, *short, *more, "--json", str(path)], capsys)
        assert code == 0, err
    folder = shutil.copytree(folders["draft"], tmp_path / "draft")
    results = [word for path in files for word in ("--results", str(path))]
    code, out, err = run(["card", "--draft", str(folder), "--target", "a/b", *results], capsys)
    assert code == 0 and f"hf upload USER/NAME {folder}" in out, err
    text = (folder / "README.md").read_text()
    report = json.loads(files[0].read_text())
    row = report["overall"]["methods"]["dspark"]
    assert f"| some (3) | greedy | dspark | {row['mean_acceptance_length']:.2f} |" in text
    assert "| batch 1 | greedy | dspark, static |" in text and "300 rounds, some" in text
    assert str(tmp_path) not in text.replace(str(folder), "") and text.count("![") == 2


def test_calibrate_on_questions_of_the_target(pair, prompts, capsys, calibrated, monkeypatch):
    assert "no chat template" in refused(["calibrate", *pair], capsys)
    tokenizer = tiny.tokenizer()
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages[0]['content'] }}", raising=False)
    monkeypatch.setattr(hf_dspark.cli.models.AutoTokenizer, "from_pretrained", lambda name: tokenizer)
    written = []

    def write_questions(target, tokenizer, count, **options):
        written.append((count, options))
        return [f"q{i}" for i in range(count)]

    monkeypatch.setattr(calibrate_module, "write_questions", write_questions)
    code, out, err = run(["calibrate", *pair, "--num-prompts", "3", "--seed", "4"], capsys)
    assert code == 0 and written == [(3, {"seed": 4})] and "not stored" in err
    assert "3 questions written by the target" in out
    assert calibrated[0][0] == [[{"role": "user", "content": f"q{i}"}] for i in range(3)]


def test_calibrate_refuses_a_folder_that_exists(pair, folders, capsys, no_loading):
    assert "exists" in refused(["calibrate", *pair, "--output", folders["draft"]], capsys)


def test_calibrate_refuses_a_draft_without_head(folders, prompts, capsys):
    arguments = ["calibrate", "--target", folders["target"], "--draft", folders["bad"], "--prompts", prompts]
    assert "no confidence head" in refused(arguments, capsys)
