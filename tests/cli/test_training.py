"""`hf-dspark synthesize` and `hf-dspark train`: flags reach the configs, results go where they belong."""

import dataclasses
import hashlib
import inspect
import json
import os

import pytest
from transformers import PreTrainedTokenizerFast

import tiny
from hf_dspark import cli, training
from hf_dspark.cli.synthesize import synthesize
from hf_dspark.cli.train import train

os.environ["ACCELERATE_USE_CPU"] = "true"  # read once a process, when the first run begins
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}U{{ m.content }}V{% else %}A{{ m.content }}W{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}A{% endif %}"
)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    model = tiny.table_target(tiny.one_hot_table(tiny.NEXT, 8.0))
    model.generation_config.eos_token_id = tiny.tokenizer().convert_tokens_to_ids("W")
    model.save_pretrained(folder)
    tokenizer = tiny.tokenizer()._tokenizer
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="W", chat_template=TEMPLATE).save_pretrained(folder)
    return folder


def run(*arguments) -> int:
    """Exit code of the command."""
    with pytest.raises(SystemExit) as exit:
        cli.main([str(argument) for argument in arguments])
    return exit.value.code or 0


def test_texts_then_a_draft(target, tmp_path, capsys):
    """The two verbs after one another, as a user would."""
    texts, out = tmp_path / "texts.jsonl", tmp_path / "run"
    small = ["--target", target, "--dtype", "float32"]
    own = [
        "--num-own",
        40,
        "--batch-size",
        20,
        "--max-length",
        96,
        "--max-user-tokens",
        5,
        "--temperatures",
        "0.5,1",
        "--user-temperature",
        4,
    ]
    assert run("synthesize", "--output", texts, *small, *own, "--device", "cpu", "--json", tmp_path / "s.json") == 0
    report = json.loads((tmp_path / "s.json").read_text())
    assert report["num_conversations"] == len(texts.read_text().splitlines()) > 10
    assert report["config"]["temperatures"] == [0.5, 1.0]
    shape = ["--num-hidden-layers", 1, "--block-size", 4, "--markov-rank", 8, "--target-layer-ids", "0,2"]
    steps = ["--max-steps", 3, "--batch-size", 4, "--num-anchors", 4, "--num-validation-texts", 4, "--no-tensorboard"]
    arguments = ["train", "--data", texts, "--output-dir", out, *small, *shape, *steps]
    assert run(*arguments, "--dry-run", "--json", tmp_path / "dry.json") == 0
    costs = json.loads((tmp_path / "dry.json").read_text())["estimate"]
    assert costs["steps"] == 3 and costs["hours"] > 0 and not out.exists()
    assert "hours" in capsys.readouterr().out
    assert run(*arguments, "--json", tmp_path / "t.json") == 0
    report = json.loads((tmp_path / "t.json").read_text())
    assert report["step"] == 3 and report["validation"]["tau"] >= 1 and report["config"]["target_layer_ids"] == [0, 2]
    assert run("inspect", report["draft"]) == 0
    assert report["data_sha256"] == {str(texts): hashlib.sha256(texts.read_bytes()).hexdigest()}
    made_of = ["--results", tmp_path / "t.json", "--results", tmp_path / "s.json"]
    assert run("card", "--draft", report["draft"], "--target", "some/target", *made_of) == 0
    card = (out / "draft" / "README.md").read_text()
    assert "`hf-dspark train`, 3 steps" in card and "at temperatures 0.5, 1; seed 0" in card
    assert f"texts.jsonl (SHA-256 {report['data_sha256'][str(texts)]})" in card
    assert str(tmp_path) not in card and "| `target_layer_ids` | [0, 2] |" in card
    assert run(*arguments) == 2
    assert "resume" in capsys.readouterr().err
    assert run(*arguments, "--resume") == 0


@pytest.mark.parametrize(("verb", "config"), [(train, training.TrainingConfig), (synthesize, training.SynthesisConfig)])
def test_flags_are_the_fields_with_their_defaults(verb, config):
    parameters = inspect.signature(verb).parameters
    fields = {f.name: f for f in dataclasses.fields(config)}
    assert parameters.keys() - fields.keys() <= {"json", "dry_run"}
    assert not fields.keys() - parameters.keys()
    for name, entry in fields.items():
        default = parameters[name].default
        if entry.default is not dataclasses.MISSING and name != "temperatures":
            assert default == entry.default, name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--data", "no.jsonl", "--output-dir", "out", "--target-layer-ids", "1,b"], "--target-layer-ids 1,b"),
        (["train", "--data", "no.jsonl", "--output-dir", "out", "--batch-size", "0"], "`batch_size`"),
        (["synthesize", "--output", "x.jsonl"], "nothing to write"),
        (["synthesize", "--output", "x.jsonl", "--num-own", "1", "--temperatures", "hot"], "--temperatures hot"),
        (["synthesize", "--output", "x.jsonl", "--prompts", "no.jsonl"], "no.jsonl"),
    ],
)
def test_mistakes_are_one_sentence(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
