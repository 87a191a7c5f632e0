"""The trainer on a CUDA device, in a process of its own (skipped without one)."""

import json
import os
import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
MAIN = "from hf_dspark.cli import main; main()"


def train(toy, folder, *more: str) -> dict:
    arguments = (
        f"train --data {toy}/texts.jsonl --output-dir {folder} --target {toy}/target --num-validation-texts 16 "
        f"--num-hidden-layers 1 --block-size 4 --markov-rank 16 --batch-size 8 --num-anchors 6 --max-steps 150 "
        f"--learning-rate 0.003 --json {folder}.json"
    )
    environment = {name: value for name, value in os.environ.items() if name != "ACCELERATE_USE_CPU"}
    subprocess.run([sys.executable, "-c", MAIN, *arguments.split(), *more], check=True, env=environment)
    return json.loads((folder.parent / f"{folder.name}.json").read_text())


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_learns_a_toy_target(toy, tmp_path, head):
    assert train(toy, tmp_path / "run", "--markov-head-type", head)["validation"]["tau"] > 2.5


def test_dry_run_reports_device_memory(toy, tmp_path):
    assert train(toy, tmp_path / "run", "--dry-run")["estimate"]["memory_gb"] > 0
