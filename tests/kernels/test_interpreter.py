"""The kernels in Triton's interpreter, on CPU tensors, in a process of their own."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_dspark import kernels

FOLDER = Path(__file__).parent
NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@NEEDS_TRITON
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is the interpreter's process")
def test_kernels_in_the_interpreter():
    # One thread, since NumPy rounds products of other shapes in another way with more.
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(FOLDER)]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=FOLDER.parent.parent)
    assert child.returncode == 0, child.stdout[-6000:] + child.stderr[-2000:]
    passed = int(child.stdout.split(" passed")[0].split()[-1])
    assert passed >= 40, child.stdout[-2000:]


@NEEDS_TRITON
def test_a_broken_triton_is_reported(monkeypatch, caplog):
    monkeypatch.setattr(kernels, "_kernels", False)
    monkeypatch.setattr(kernels.logger, "propagate", True)
    monkeypatch.setitem(sys.modules, "hf_dspark.kernels.attention", None)
    monkeypatch.delattr(kernels, "attention", raising=False)
    kernels._load()
    assert "Triton kernels are off" in caplog.text and "attention" in caplog.text
    assert not kernels._kernels
