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
SETTINGS = """
import sys
import torch
from safetensors.torch import load_file
from hf_dspark.training import TrainingConfig, train
from hf_dspark.training.trainer import Run

def config(name, **changes):
    values = {
        "data": [sys.argv[1] + "/texts.jsonl"], "output_dir": sys.argv[2] + "/" + name, "num_hidden_layers": 1,
        "target": sys.argv[1] + "/target", "num_validation_texts": 16, "block_size": 4, "markov_rank": 16,
        "batch_size": 8, "num_anchors": 6, "max_steps": 12, "dtype": "float32", "save_every": 4, "tensorboard": False,
    }
    return TrainingConfig(**(values | changes))
"""
RECORDED = """
def gradients(compile):
    options = {"compile": compile, "mixed_precision": "no", "gradient_accumulation_steps": 2}
    run = Run(config("run", **options))
    assert (run.recorded is not None) == compile
    for forward in (0, 1, 2):  # the first one is recorded, the others replayed
        run._add_gradients(run.inputs(run.batch(forward), str(forward)))
    assert (run.recorded is not None) == compile
    return {name: p.grad for name, p in run.draft.named_parameters() if p.requires_grad}

expected, found = gradients(False), gradients(True)
for name, gradient in expected.items():
    torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-3 * float(gradient.abs().max()), msg=name)
"""
RESUMED = """
class Killed(BaseException):
    pass

train(config("whole"))
step = Run.take_step
def killed(run):
    if run.step == 6:
        raise Killed
    return step(run)
Run.take_step = killed
try:
    train(config("resumed"))
except Killed:
    Run.take_step = step
train(config("resumed", resume=True))
whole, resumed = (load_file(sys.argv[2] + f"/{name}/draft/model.safetensors") for name in ("whole", "resumed"))
assert all(torch.equal(whole[name], resumed[name]) for name in whole)
"""


def run_code(toy, folder, code: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "ACCELERATE_USE_CPU"}
    subprocess.run([sys.executable, "-c", SETTINGS + code, str(toy), str(folder)], check=True, env=environment)


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


def test_recorded_gradients_equal_plain_ones(toy, tmp_path):
    run_code(toy, tmp_path, RECORDED)


def test_resumed_run_equals_the_uninterrupted_one(toy, tmp_path):
    run_code(toy, tmp_path, RESUMED)
