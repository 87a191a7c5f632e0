"""`hf-dspark bench` in-process, on a tiny pair in temporary folders."""

import json

import pytest
from command import refused, run

import hf_dspark
import tiny
from hf_dspark.cli import bench as bench_module


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    tiny.perm_target().save_pretrained(root / "target")
    tiny.tokenizer().save_pretrained(root / "target")
    config = tiny.draft_config(vocab=tiny.V, rank=tiny.V, confidence=None)
    tiny.write_draft(root / "draft", config, tiny.markov_tensors(config, tiny.one_hot_table(tiny.NEXT)))
    return ["--target", str(root / "target"), "--draft", str(root / "draft")]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "some.jsonl"
    path.write_text("".join(json.dumps({"turns": turns}) + "\n" for turns in (["abc"], ["de", "f"], ["gh"])))
    return str(path)


def test_bench_measures_and_shows(pair, prompts, tmp_path, capsys):
    path, trace = tmp_path / "r.json", tmp_path / "trace.json"
    sizes = ["--batch-size", "1", "--batch-size", "2", "--temperature", "0.5", "--repeats", "2", "--seed", "3"]
    more = ["--num-prompts", "2", "--max-new-tokens", "6", "--json", str(path), "--profile", str(trace)]
    code, out, err = run(["bench", *pair, "--prompts", prompts, *sizes, *more, "--device", "cpu"], capsys)
    assert code == 0, err
    assert "Greedy, median of 2" in out and "Sampling, median of 2" in out and "measuring" in err and "…" not in out
    assert "plain, compiled: left out, needs CUDA" in out and "byte floor: left out, needs CUDA" in out
    assert "no CUDA graphs on cpu" in out and "Texts against plain decoding: identical" in out
    report = json.loads(path.read_text())
    assert len(report["rows"]) == 10 and report["repeats"] == 2 and report["settings"]["seed"] == 3
    assert report["sampling"] == {"do_sample": True, "top_k": 0, "temperature": 0.5, "top_p": 1.0}
    assert report["target"] == pair[1] and report["draft"] == pair[3] and report["device"] == "cpu"
    assert report["versions"]["hf_dspark"] == hf_dspark.__version__ and report["dtype"] == "torch.float32"
    assert all(len(row["output_sha256"]) == 64 for row in report["rows"])
    static = report["rows"][2]
    assert static["method"] == "dspark, static" and f"{static['mean_acceptance_length']:.2f}" in out
    assert json.loads(trace.read_text())["traceEvents"]


def test_the_built_in_questions(pair, capsys):
    """What is asked without a file; of a tokenizer without spaces every letter is a token."""
    code, out, err = run(["bench", *pair, "--max-new-tokens", "4", "--repeats", "1"], capsys)
    assert code == 0 and "3/3" in out, err


def test_no_compile_reaches_the_measurement(pair, prompts, capsys, monkeypatch):
    seen = []

    def measure_speed(*args, **options):
        seen.append(options)
        raise ValueError("enough")

    monkeypatch.setattr(bench_module, "measure_speed", measure_speed)
    refused(["bench", *pair, "--prompts", prompts], capsys)
    refused(["bench", *pair, "--prompts", prompts, "--no-compile", "--top-p", "0.9"], capsys)
    assert [options["compiled"] for options in seen] == [True, False] and seen[0]["repeats"] == 5
    assert [options["sampling"] is None for options in seen] == [True, False] and seen[1]["sampling"]["top_p"] == 0.9


def test_different_texts_end_with_exit_code_1(pair, prompts, capsys, monkeypatch):
    original = bench_module.measure_speed
    monkeypatch.setattr(bench_module, "measure_speed", lambda *a, **o: original(*a, **o) | {"outputs": "different"})
    code, out, err = run(["bench", *pair, "--prompts", prompts, "--repeats", "1", "--max-new-tokens", "4"], capsys)
    assert code == 1 and "different" in out and "more than a near tie" in err


# ---- BATCH-4: nothing to measure is an error


def test_wrong_prompts_are_refused(pair, prompts, tmp_path, capsys):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    assert "holds no prompts" in refused(["bench", *pair, "--prompts", str(empty)], capsys)
    assert "no such file" in refused(["bench", *pair, "--prompts", str(tmp_path / "nowhere.jsonl")], capsys)
    assert "at least 1" in refused(["bench", *pair, "--num-prompts", "0"], capsys)
    assert "at least 1" in refused(["bench", *pair, "--prompts", prompts, "--num-prompts", "0"], capsys)
    too_long = refused(["bench", *pair, "--prompts", prompts, "--max-new-tokens", "1000"], capsys)
    assert "Prompt some/0 is too long" in too_long and "512" in too_long


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--batch-size", "65"], "1..64"),
        (["--repeats", "0"], "`repeats`"),
        (["--temperature", "0"], "`temperature` must be above 0"),
        (["--json", "/no/such/folder/x.json"], "`--json /no/such/folder/x.json`"),
        (["--profile", "/no/such/folder/x.json"], "`--profile /no/such/folder/x.json`"),
        (["--draft", "/no/such/draft"], "no such folder"),
    ],
)
def test_wrong_options_are_refused(pair, prompts, arguments, words, capsys):
    assert words in refused(["bench", *pair, "--prompts", prompts, *arguments], capsys)
