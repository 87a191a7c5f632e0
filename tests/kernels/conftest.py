"""Where the kernel tests run.

Triton decides at its first import whether kernels are compiled or interpreted, so the interpreter needs a process of
its own: `test_interpreter.py` starts one, `TRITON_INTERPRET=1 pytest tests/kernels` is one. On a machine with CUDA the
same tests run on the GPU, in the ordinary process.
"""

import importlib.util
import os

import pytest
import torch

from hf_dspark import kernels

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = torch.cuda.is_available() and not INTERPRETED
collect_ignore = []
if not (INTERPRETED or CUDA) or importlib.util.find_spec("triton") is None:
    collect_ignore += [
        f"test_{name}.py" for name in ("attention", "context", "linear", "markov", "truncation", "verify")
    ]
if INTERPRETED or CUDA:  # compiles for a device that is not there
    collect_ignore += ["test_compile.py"]

if INTERPRETED:
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_for_numpy(tensor, scope):
        """numpy >= 2.4 no longer converts arrays of one element by itself, which range() over tensors needs."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor_for_numpy


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu) if CUDA else "cpu"])
def device(request) -> str:
    assert kernels.use_kernels(torch.empty(1, device=request.param)), "the test would compare the reference to itself"
    return request.param


@pytest.fixture
def cuda(device) -> str:
    """For tests of what only the GPU has: graphs, torch.compile, large tensors, bfloat16."""
    if device != "cuda":
        pytest.skip("no CUDA device")
    return device
