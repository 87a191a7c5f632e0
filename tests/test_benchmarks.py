"""Benchmarks for a GPU run at a tiny shape anywhere, so that they follow the code they measure."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
RUNS = {
    "h200.py": (["--shape", "tiny", "--settings", "1x24", "--taus", "2", "--new-tokens", "8"], "rounds"),
    "scheduler_h200.py": (
        ["--pair", "tiny", "--batches", "1,3", "--lengths", "2,7", "--new-tokens", "8", "--repeats", "1"],
        "batches",
    ),
}


@pytest.mark.parametrize("script", RUNS)
def test_it_runs_at_a_tiny_shape(script, tmp_path):
    (options, rows), path = RUNS[script], tmp_path / "result.json"
    command = [sys.executable, str(BENCHMARKS / script), *options, "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    assert len(result[rows]) == 2 and result["environment"]["hf_dspark"]
