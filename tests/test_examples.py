"""The examples run, and show what they say they show."""

import copy
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hf_dspark
import tiny
from hf_dspark import default_pair

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}U{{ m.content }}V{% else %}A{{ m.content }}W{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}A{% endif %}"
)


def load(name: str):
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def quickstart():
    return load("quickstart")


def tokenizer():
    one = copy.deepcopy(tiny.tokenizer())
    one.chat_template, one.pad_token = TEMPLATE, "_"
    return one


@pytest.fixture
def pair(monkeypatch):
    """A tiny pair in place of the embedded one: its draft is right at every other token, and knows it."""
    table = [tiny.NEXT[t] if t % 2 == 0 else tiny.wrong_table()[t] for t in range(tiny.V)]
    confidence = torch.tensor([2.0 if t % 2 == 0 else -2.0 for t in range(tiny.V)])
    draft = tiny.markov_draft(tiny.one_hot_table(table), confidence=confidence)
    target = copy.deepcopy(tiny.perm_target())

    def load_default_pair(dtype=torch.float32):
        return target.to(dtype), draft.to(dtype).attach_target(target), tokenizer()

    monkeypatch.setattr(hf_dspark, "load_default_pair", load_default_pair)


def test_every_example_is_tested_and_listed():
    names = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")}
    readme, here = (EXAMPLES.parent / "README.md").read_text(), Path(__file__).read_text()
    assert len(names) == 8
    for name in names:
        assert f"(examples/{name})" in readme, name
        assert name in here or f'"{name.removesuffix(".py")}"' in here, name


def test_streaming(pair, capsys):
    load("streaming").main()
    text, summary = capsys.readouterr().out.strip().rsplit("\n", 1)
    assert len(text) >= 64 and re.fullmatch(r"64 tokens in \d+ rounds, τ [\d.]+", summary)


def test_batch(pair, capsys):
    load("batch").main()
    out = capsys.readouterr().out
    assert len(re.findall(r"^> .*\[\d+ rounds, [\d.]+ drafts accepted in each\]$", out, re.MULTILINE)) == 3
    assert "path: ragged" in out


def test_confidence_sweep(pair, capsys):
    load("confidence_sweep").main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:-1]]
    verified = [float(row[2]) for row in rows]
    assert [row[0] for row in rows] == ["0.0", "0.2", "0.4", "0.6", "0.8"]
    assert verified == sorted(verified, reverse=True) and verified[0] > verified[2]
    assert float(rows[4][3].rstrip("%")) > float(rows[0][3].rstrip("%"))


def test_calibrate(pair, tmp_path, capsys):
    load("calibrate").main(tmp_path / "draft")
    out = capsys.readouterr().out
    assert re.search(r"^temperatures: [\d.]+ [\d.]+ [\d.]+ [\d.]+$", out, re.MULTILINE)
    assert re.search(r"[\d.]+ before, [\d.]+ after", out) and "saved with its temperatures" in out
    assert (tmp_path / "draft" / "model.safetensors").exists()


def test_train_your_own(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    target = tiny.table_target(tiny.one_hot_table(tiny.NEXT, 8.0))
    target.generation_config.eos_token_id = tiny.tokenizer().convert_tokens_to_ids("W")
    target.save_pretrained(tmp_path / "target")
    tokenizer().save_pretrained(tmp_path / "target")
    arguments = [str(tmp_path / "mine"), "--target", str(tmp_path / "target"), "--texts", "40", "--steps", "60"]
    monkeypatch.setattr(sys, "argv", ["train_your_own.py", *arguments])
    example = load("train_your_own")
    varied = {"temperatures": [0.5, 1.0], "user_temperature": 4.0, "max_user_tokens": 5}  # or all texts are the same
    monkeypatch.setattr(example, "SynthesisConfig", functools.partial(example.SynthesisConfig, **varied))
    example.main()
    out = capsys.readouterr().out
    assert float(re.search(r"expected τ on held-out texts: ([\d.]+)", out)[1]) > 1.5
    assert re.search(r"used: \d+ rounds for 32 tokens", out)


def test_export_to_vllm(pair, tmp_path, capsys):
    load("export_to_vllm").main(str(tmp_path / "served"))
    out = capsys.readouterr().out
    assert f'"model": "{tmp_path}/served", "num_speculative_tokens": 4' in out
    assert "python -m sglang.launch_server" in out and "proposes the same tokens" in out


def test_notebook(pair, capsys):
    """Every code cell of quickstart.ipynb, one after the other; committed without outputs."""
    notebook = json.loads((EXAMPLES / "quickstart.ipynb").read_text())
    names: dict = {}
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            assert not cell["outputs"] and cell["execution_count"] is None
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    out = capsys.readouterr().out
    assert re.search(r"64 tokens in \d+ rounds: τ = [\d.]+", out) and "target's own" in out and "c_k:" in out
    verified = [int(count) for count in re.findall(r"(\d+) drafts verified", out)]
    assert len(verified) == 3 and verified[0] > verified[2]


def test_the_origin_of_every_token(quickstart):
    """The first token, then rounds that accept 4, 0 and 2 of 4 drafts."""
    draft = tiny.scripted_draft([4, 0, 2], anchor=tiny.NEXT[40])
    with hf_dspark.record() as stats:
        output = tiny.perm_target().generate(
            torch.tensor([[40]]), assistant_model=draft, do_sample=False, max_new_tokens=20
        )
    kinds = quickstart.origins(stats.rounds, output.shape[1] - 1)
    blocks = ["first", *["accepted"] * 4, "bonus", "corrected", *["accepted"] * 2, "corrected"]
    assert kinds[: len(blocks)] == blocks and len(kinds) == 20
    text = quickstart.coloured(tiny.tokenizer(), output[0, 1:].tolist(), kinds)
    assert text.plain == tiny.tokenizer().decode(output[0, 1:])
    assert [str(span.style) for span in text.spans] == [quickstart.COLOURS[kind] for kind in kinds]


@pytest.mark.slow
def test_quickstart():
    if not default_pair.is_prepared():
        pytest.skip("the embedded target is not prepared: run `hf-dspark setup-demo`")
    environment = os.environ | {"PYTHONIOENCODING": "utf-8"}
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / "quickstart.py")], capture_output=True, text=True, env=environment
    )
    assert result.returncode == 0, result.stderr
    assert "identical: yes" in result.stdout
    assert float(re.search(r"τ: ([\d.]+)", result.stdout)[1]) > 1.5
    assert re.search(r"speed-up: [\d.]+", result.stdout)
