"""The examples run, and show what they say they show."""

import importlib.util
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


@pytest.fixture(scope="module")
def quickstart():
    spec = importlib.util.spec_from_file_location("quickstart", EXAMPLES / "quickstart.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
