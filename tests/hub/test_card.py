"""Model cards: every number comes from a file of measurements, and the folder is ready for the hub."""

import json
import re

import pytest
from command import refused, run
from huggingface_hub import ModelCard

import tiny
from hf_dspark import DSparkForCausalLM
from hf_dspark.evaluation import plots
from hf_dspark.hub import write_card

TARGET = "someone/a-target"
PLAIN = {"tokens": 96, "seconds": 4.8, "tokens_per_second": 20.0, "output_sha256": "0"}
ROW = PLAIN | {
    "tokens_per_second": 50.0, "speedup": 2.5, "median_speedup": 2.6, "identical_to_plain": 3, "num_spec_steps": 40,
    "mean_acceptance_length": 2.345, "expected_acceptance_length": 2.5, "acceptance_by_position": [0.81, 0.72, None],
    "tried_by_position": [40, 30, 0],
}  # fmt: skip
BINS = {"c": [{"predicted": 0.5, "accepted": 0.6, "count": 9}], "a": [{"predicted": 0.4, "accepted": 0.3, "count": 9}]}
GROUP = {"prompts": 3, "turns": 4, "methods": {"plain": PLAIN, "plain, compiled": PLAIN | {"tokens_per_second": 40.0}}}
VERSIONS = {"hf_dspark": "0.1.0", "transformers": "5.24.0", "torch": "2.13.0", "python": "3.11.7"}
HEAD = {
    "settings": {"max_new_tokens": 24, "sampling": {"do_sample": False}, "seed": 5}, "dtype": "torch.bfloat16",
    "device": "NVIDIA H200", "threads": 1, "template": "chat template", "versions": VERSIONS,
}  # fmt: skip
EVAL = HEAD | {
    "sets": {"gsm8k": GROUP | {"methods": GROUP["methods"] | {"dspark": ROW}}},
    "overall": GROUP | {"methods": {"dspark": ROW | {"reliability": BINS, "confidence_by_position": [{"c": {}}]}}},
}
BENCH = HEAD | {
    "repeats": 5, "sampling": {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 0},
    "left_out": {}, "rows": [
        PLAIN | {"mode": "sampling", "batch_size": 8, "method": "plain"},
        ROW | {"mode": "sampling", "batch_size": 8, "method": "dspark, static", "batches": 2,
               "speedup_over_compiled": None},
    ],
}  # fmt: skip
CALIBRATION = {
    "temperatures": [1.5, 0.9, 1.0], "ece_before": 0.0812, "ece_after": 0.0123, "num_rounds": 4157, "num_samples": 2000,
    "ece_by_position": [0.011, 0.012, 0.013], "ece_by_position_before": [0.08, 0.09, 0.07], "notes": ["one thing"],
    "dataset": "64 questions written by the target",
}  # fmt: skip
TRAIN = {
    "config": {"data": ["/home/me/texts.jsonl"], "target": "/home/me/target", "output_dir": "/home/me/run", "seed": 3,
               "learning_rate": 0.001, "max_steps": None},
    "data_sha256": {"/home/me/texts.jsonl": "f00d"}, "draft": "/home/me/run/draft", "step": 2475, "versions": VERSIONS,
    "validation": {"tau": 3.28, "tau_greedy": 3.57, "acceptance_by_position": [0.679, 0.62, 0.579]},
}  # fmt: skip
TEXTS = {
    "config": {"temperatures": [0.0, 0.7], "seed": 4}, "num_conversations": 20000, "num_tokens": 5900000,
    "num_supervised_tokens": 4000000, "versions": VERSIONS,
}  # fmt: skip
ALL = {"eval": EVAL, "bench": BENCH, "calibrate": CALIBRATION, "train": TRAIN, "synthesize": TEXTS}


@pytest.fixture
def folder(tmp_path):
    config = tiny.draft_config(gamma=3)
    return tiny.write_draft(tmp_path / "my-draft", config, tiny.draft_tensors(config))


@pytest.fixture
def files(tmp_path):
    """A file of every kind."""
    for name, values in ALL.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(values))
    return [tmp_path / f"{name}.json" for name in ALL]


def test_metadata_is_what_the_hub_reads(folder, files):
    pytest.importorskip("matplotlib")
    more = {"license": "apache-2.0", "language": ["en"], "datasets": ["a/b"], "tags": ["mine"]}
    data = ModelCard.load(write_card(folder, files, target=TARGET, **more)).data
    assert (data.base_model, data.license, data.language, data.datasets) == (TARGET, "apache-2.0", ["en"], ["a/b"])
    assert data.library_name == "hf-dspark" and data.pipeline_tag == "text-generation"
    assert {"dspark", "speculative-decoding", "mine"} <= set(data.tags) and data.model_name == "my-draft"
    (result,) = data.eval_results
    assert (result.dataset_name, result.metric_type, result.metric_value) == ("gsm8k", "mean_acceptance_length", 2.35)
    assert result.metric_name == "τ (greedy, bfloat16, dspark, 3 prompts)"


def test_numbers_of_every_file_are_shown(folder, files):
    pytest.importorskip("matplotlib")
    text = write_card(folder, files, target=TARGET, notes="## Limits\n\nEnglish only.").read_text()
    assert "| gsm8k (3) | greedy | dspark | 2.35 | 20.0 | 40.0 | 50.0 | 2.60× | 1.25× | 3 of 4 |" in text
    assert "| batch 8 | T=0.7, top-p 0.9 | dspark, static | 2.35 | 20.0 | 50.0 | 2.50× | sampled |" in text
    assert "| bfloat16 | gsm8k | greedy | dspark | 0.81 | 0.72 | - |" in text
    assert "One NVIDIA H200, at most 24 new tokens, chat template, seed 5; hf_dspark 0.1.0, transformers 5.24.0" in text
    assert "| temperature T_j | 1.50 | 0.90 | 1.00 |" in text and "4,157 rounds" in text and "One thing." in text
    assert "| ECE without | 0.0800 | 0.0900 | 0.0700 | 0.0812 |" in text
    assert "2,475 steps" in text and "τ 3.28 when sampling, 3.57 when greedy" in text and "| `seed` | 3 |" in text
    assert "20,000 conversations of 5,900,000 tokens" in text and "temperatures 0, 0.7; seed 4" in text
    assert "| `data` | texts.jsonl (SHA-256 f00d) |" in text and "## Limits\n\nEnglish only.\n" in text
    assert "/home/me" not in text  # no paths of the machine it was made on
    assert "\n\n\n" not in text and "None" not in text


def test_a_comparison_of_drafts_shows_all_and_claims_none(folder, tmp_path):
    """What `benchmarks/embedded_draft/measure.py` writes; columns that nobody measured are left out."""
    sets = {"gsm8k": {"tau": 2.7, "acceptance_by_position": [0.6, None, None], "rounds": 9}, "mean_tau": 2.7}
    environment = {"device": "NVIDIA H200", "cuda": "13.0", "seed": 0, "torch": "2.11.0", "hf_dspark": "0.1.0"}
    drafts = {name: {"greedy": sets, "T=1": sets, "bytes": 1, "layers": 2} for name in ("new", "old")}
    path = tmp_path / "x.json"
    path.write_text(
        json.dumps({"environment": environment, "new_tokens": 128, "prompts_per_set": 20, "drafts": drafts})
    )
    text = write_card(folder, [path], target=TARGET).read_text()
    assert "| prompts | mode | method | τ |" in text and "| gsm8k (20) | T=1 | old | 2.70 |" in text
    assert "model-index" not in text and "128 new tokens" in text


def test_several_sets_also_have_a_row_of_all(folder, tmp_path):
    methods = EVAL["sets"]["gsm8k"]["methods"] | {"draft other": ROW}
    both = dict.fromkeys(("gsm8k", "mt-bench"), GROUP | {"methods": methods})
    path = tmp_path / "x.json"
    path.write_text(json.dumps(EVAL | {"sets": both, "overall": GROUP | {"methods": {"plain": PLAIN, "dspark": ROW}}}))
    card = ModelCard.load(write_card(folder, [path], target=TARGET))
    assert "| all sets (3) | greedy | dspark | 2.35 |" in card.text
    assert "| gsm8k (3) | greedy | draft other | 2.35 |" in card.text
    assert [result.dataset_name for result in card.data.eval_results] == ["gsm8k", "mt-bench"]


def test_provenance_has_hashes_of_weights_and_measurements(folder, files):
    import hashlib

    pytest.importorskip("matplotlib")
    text = write_card(folder, files, target=TARGET).read_text()
    for path in (folder / "model.safetensors", *files):
        assert f"| {path.name} | {hashlib.sha256(path.read_bytes()).hexdigest()} |" in text


def test_pictures_are_drawn_beside_the_card(folder, files):
    pytest.importorskip("matplotlib")
    text = write_card(folder, files, target=TARGET).read_text()
    for name in re.findall(r"!\[.*?\]\((.*?)\)", text):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    assert text.count("![") == 2


def test_calibration_is_drawn_with_the_bins_of_its_report(tmp_path):
    pytest.importorskip("matplotlib")
    bins = [{"predicted": 0.2, "accepted": 0.1, "count": 5}, {"predicted": 0.8, "accepted": 0.7, "count": 5}]
    assert len(plots.calibration(CALIBRATION).axes) == 1
    errors, reliability = plots.calibration(CALIBRATION | {"reliability_before": bins, "reliability": bins}).axes
    assert [bar.get_height() for bar in errors.patches] == [0.08, 0.09, 0.07, 0.011, 0.012, 0.013]
    assert [line.get_ydata().tolist() for line in reliability.lines[1:]] == [[0.1, 0.7]] * 2


def test_a_card_without_measurements_has_no_numbers_but_what_the_files_say(folder):
    path = write_card(folder, target=TARGET, repo_id="user/named")
    text = path.read_text()
    assert "# named\n" in text and 'AutoModel.from_pretrained("user/named"' in text
    assert not re.search(r"## (Measured|Calibration|Training)|!\[|model-index", text)
    assert "γ = 3" in text and "outputs of layers 0, 2, 4" in text and "\n\n\n" not in text
    assert {p.name for p in folder.iterdir()} == {"README.md", "config.json", "model.safetensors", "modeling_dspark.py"}
    DSparkForCausalLM.from_pretrained(folder)


def test_writing_again_gives_the_same_card(folder, files):
    pytest.importorskip("matplotlib")
    once = write_card(folder, files, target=TARGET).read_text()
    assert write_card(folder, files, target=TARGET).read_text() == once


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "is no measurement"),
        ("[1]", "is no measurement"),
        ("nope", "is not JSON"),
    ],
)
def test_other_files_are_refused(content, message, tmp_path, folder):
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        write_card(folder, [path], target=TARGET)


def test_two_calibrations_and_two_files_of_a_name_are_refused(folder, files, tmp_path):
    other, same = tmp_path / "other.json", tmp_path / "more" / "eval.json"
    same.parent.mkdir()
    other.write_text(files[2].read_text())
    same.write_text(files[0].read_text())
    with pytest.raises(ValueError, match="second file about calibration"):
        write_card(folder, [files[2], other], target=TARGET)
    with pytest.raises(ValueError, match="Two files are called eval.json"):
        write_card(folder, [files[0], same], target=TARGET)


@pytest.mark.parametrize(
    ("sampling", "mode"),
    [
        ({"do_sample": False}, "greedy"),
        ({"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}, "T=1"),
        ({"do_sample": True, "temperature": 0.7, "top_k": 20}, "T=0.7, top-k 20, default top-p"),
        ({"do_sample": True}, "default T and top-p and top-k"),
    ],
)
def test_how_tokens_were_chosen_is_told(sampling, mode, folder, tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps(EVAL | {"settings": EVAL["settings"] | {"sampling": sampling}}))
    assert f"| gsm8k (3) | {mode} | dspark |" in write_card(folder, [path], target=TARGET).read_text()


@pytest.mark.parametrize("target", ["gpt2", "/models/target", "tests/hub"])
def test_the_target_must_be_a_hub_id(folder, target):
    with pytest.raises(ValueError, match="must be the hub id"):
        write_card(folder, target=target)


def test_command(folder, files, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    notes = tmp_path / "notes.md"
    notes.write_text("Hello.")
    arguments = [word for path in files for word in ("--results", str(path))]
    arguments += ["--draft", str(folder), "--target", TARGET, "--notes", str(notes), "--repo-id", "me/it"]
    code, out, err = run(["card", *arguments], capsys)
    assert code == 0 and out == f"To publish:\n  hf upload me/it {folder}\n" and "written: " in err
    text = (folder / "README.md").read_text()
    assert "Hello." in text and "τ" in text and 'from_pretrained("me/it"' in text


def test_command_refuses_what_is_not_local(capsys):
    message = refused(["card", "--draft", "user/draft", "--target", TARGET], capsys)
    assert "`--draft user/draft` must be a local folder" in message
