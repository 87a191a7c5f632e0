"""A toy target and its texts, small enough to train for in seconds."""

import json
import os
import random

import pytest
import torch

import tiny
from hf_dspark import training

# Runs that must agree bit for bit are on the CPU, also where there is a GPU (tests marked gpu start their own process).
os.environ["ACCELERATE_USE_CPU"] = "true"


def write_texts(path, count: int, *, length: int = 32, seed: int = 0, prompt: int = 4):
    """JSONL of texts that T-perm writes: any token, then what follows it; the first `prompt` are not supervised."""
    stream = random.Random(seed)
    with path.open("w") as file:
        for _ in range(count):
            first = stream.randrange(1, 63)
            ids = [first, *tiny.chain(first, length - 1)]
            file.write(json.dumps({"input_ids": ids, "loss_mask": [0] * prompt + [1] * (length - prompt)}) + "\n")
    return path


@pytest.fixture(scope="session")
def toy(tmp_path_factory):
    """Folder with `target/` (T-perm) and `texts.jsonl`."""
    folder = tmp_path_factory.mktemp("toy")
    tiny.perm_target().save_pretrained(folder / "target")
    write_texts(folder / "texts.jsonl", 128)
    return folder


@pytest.fixture
def config(toy, tmp_path):
    """Makes a `TrainingConfig` of a run of a few seconds in `tmp_path / "run"`."""

    def make(**changes):
        values = {
            "data": [str(toy / "texts.jsonl")], "output_dir": str(tmp_path / "run"), "target": str(toy / "target"),
            "num_validation_texts": 16, "num_hidden_layers": 1, "block_size": 4, "markov_rank": 16, "batch_size": 8,
            "num_anchors": 6, "max_steps": 12, "learning_rate": 3e-3, "dtype": "float32", "save_every": 4,
            "validate_every": 6, "log_every": 2, "tensorboard": False,
        }  # fmt: skip
        return training.TrainingConfig(**(values | changes))

    return make


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
