"""Targets that are quantised, offloaded, split over devices, or somewhere else than their draft."""

import copy
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import accelerate
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import checks
import hf_dspark
import tiny

ROWS = [[7, 21, 40], [1, 2, 3, 4, 5, 6, 40], [9]]
STATIC = {"cache_implementation": "static"}
BATCHES = [(ROWS, {}), (ROWS[:1], STATIC), (ROWS[:1], {})]
SHARED = ("embed_tokens.weight", "lm_head.weight")


def led(target, slim: bool):
    text = checks.plain(target, ROWS[0])[0].tolist()
    config, tensors = tiny.guided_files(tiny.text_table(text), taps=(0, 1))
    return tiny.load_draft(config, {n: t for n, t in tensors.items() if not (slim and n in SHARED)})


def equals_plain(target, draft, rows, more):
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, **checks.batch(rows)}
    expected = target.generate(**options)
    with hf_dspark.record() as stats:
        found = target.generate(assistant_model=draft, **options, **more)
    assert found.tolist() == expected.tolist() and stats.reason
    return stats


# ---- offloaded by accelerate


def offloaded(how: str, folder):
    target = copy.deepcopy(tiny.random_target(layers=3))
    if how == "cpu_offload":
        return accelerate.cpu_offload(target, execution_device=torch.device("cpu"))
    if how == "disk_offload":
        return accelerate.disk_offload(target, str(folder), execution_device=torch.device("cpu"))
    parts = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    parts |= {f"model.layers.{i}": "disk" if i == 1 else "cpu" for i in range(3)}
    return accelerate.dispatch_model(target, parts, main_device="cpu", offload_dir=str(folder), force_hooks=True)


@pytest.mark.parametrize("rows,more", BATCHES)
@pytest.mark.parametrize("slim", [False, True])
@pytest.mark.parametrize("how", ["cpu_offload", "disk_offload", "device_map"])
def test_offloaded_targets(how, slim, rows, more, tmp_path):
    """Drafts for one sequence; the fast path holds on to weights, so a batch is decoded without drafts, and says so."""
    draft = led(tiny.random_target(layers=3), slim)
    target = offloaded(how, tmp_path)
    stats = equals_plain(target, draft, rows, more)
    assert stats.path == ("target_only" if len(rows) > 1 else "plain")
    assert stats.path == "plain" or "device" in stats.reason or "replaced" in stats.reason
    assert len(rows) > 1 or stats.num_accepted > 0


@pytest.mark.parametrize("device_map", [{"": "cpu"}, "cpu", "auto"])
def test_device_maps_of_from_pretrained(device_map, tmp_path):
    """Target and draft as people load them; on one device nothing is in the way of the fast path."""
    tiny.random_target(layers=3).save_pretrained(tmp_path / "target")
    config, tensors = tiny.guided_files(torch.randn(tiny.V, tiny.V), taps=(0, 1))
    folder = tiny.write_draft(tmp_path / "draft", config, tensors)
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "target", device_map=device_map, dtype="auto")
    draft = hf_dspark.DSparkForCausalLM.from_pretrained(folder, device_map=device_map, dtype="auto")
    for rows, more in BATCHES:
        stats = equals_plain(target, draft, rows, more)
        assert stats.num_rounds > 0
        assert stats.path == ("plain" if rows == ROWS[:1] and not more else "ragged"), stats.reason


# ---- tensor parallel


@pytest.mark.slow
def test_tensor_parallel_over_two_processes(tmp_path):
    """The script for two GPUs, on the CPU: every form gives the tokens of one device, on all ranks."""
    script, result = Path(__file__).parents[2] / "benchmarks" / "two_gpus.py", tmp_path / "result.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    command += ["--shape", "tiny", "--device", "cpu", "--tokens", "24", "--json", str(result)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stderr[-3000:]
    rows = {row["form"]: row for row in json.loads(result.read_text())["rows"]}
    assert rows["tensor parallel, drafts"]["path"] == "plain" and rows["tensor parallel, drafts"]["tau"] > 1.2
    assert "torch.manual_seed" in rows["tensor parallel, sampled, ranks seeded differently"]["refused"]


# ---- quantised


class Int8Linear(nn.Module):
    """Weights kept as int8 with a scale for each row, made whole in each forward: as quantisation libraries do."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("scale", linear.weight.detach().abs().amax(-1, keepdim=True) / 127)
        self.register_buffer("weight", (linear.weight.detach() / self.scale).round().to(torch.int8))
        self.bias = linear.bias

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype), self.bias)


@pytest.mark.parametrize("rows,more", BATCHES)
@pytest.mark.parametrize("slim", [False, True])
def test_weights_that_are_not_floats(slim, rows, more):
    target = copy.deepcopy(tiny.random_target(layers=3))
    for module in list(target.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                setattr(module, name, Int8Linear(child))
    stats = equals_plain(target, led(target, slim), rows, more)
    assert stats.num_accepted > 0 and stats.path == ("plain" if rows == ROWS[:1] and not more else "ragged")


@pytest.mark.parametrize("rows,more", BATCHES)
def test_gguf_blocks_that_stay_packed(rows, more, monkeypatch):
    """transformers' own layer over raw Q4_1 blocks, without its compiled kernel for few rows."""
    packed = pytest.importorskip("transformers.integrations.gguf.utils", reason="this transformers unpacks GGUF files")
    gguf = pytest.importorskip("gguf")
    if not hasattr(packed, "GgufLinear"):
        pytest.skip("this transformers unpacks GGUF files")
    kind = gguf.GGMLQuantizationType.Q4_1
    monkeypatch.setattr(packed, "MAX_GEMV_ROWS", 0)
    target = copy.deepcopy(tiny.random_target(layers=3))
    for module in list(target.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                layer = packed.GgufLinear(child.in_features, child.out_features, int(kind))
                layer.weight.data = torch.from_numpy(gguf.quants.quantize(child.weight.detach().numpy(), kind))
                setattr(module, name, layer)
    for slim in (False, True):
        stats = equals_plain(target, led(target, slim), rows, more)
        assert stats.num_accepted > 0 and stats.path == ("plain" if rows == ROWS[:1] and not more else "ragged")


def installed(name: str):
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")


@pytest.mark.parametrize("rows,more", BATCHES)
@pytest.mark.parametrize("kind", ["int8 weights", "int4 weights"])
@installed("torchao")
def test_torchao(kind, rows, more, tmp_path):
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig
    from transformers import TorchAoConfig

    tiny.random_target(layers=3).save_pretrained(tmp_path)
    quantization = Int8WeightOnlyConfig() if kind == "int8 weights" else IntxWeightOnlyConfig(weight_dtype=torch.int4)
    target = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=TorchAoConfig(quantization)).eval()
    assert type(target.model.layers[0].mlp.up_proj.weight) is not nn.Parameter
    for slim in (False, True):
        stats = equals_plain(target, led(target, slim), rows, more)
        assert stats.num_rounds > 0


@pytest.mark.parametrize("rows,more", BATCHES)
@pytest.mark.parametrize("bits", [8, 4])
@installed("bitsandbytes")
def test_bitsandbytes(bits, rows, more, tmp_path):
    from transformers import BitsAndBytesConfig

    tiny.random_target(layers=3, intermediate_size=64).save_pretrained(tmp_path)
    quantization = BitsAndBytesConfig(load_in_8bit=bits == 8, load_in_4bit=bits == 4, llm_int8_threshold=0.0)
    target = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=quantization, device_map="cpu").eval()
    for slim in (False, True):
        stats = equals_plain(target, led(target, slim), rows, more)
        assert stats.num_rounds > 0
