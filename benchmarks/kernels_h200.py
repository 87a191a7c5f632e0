"""Each kernel of the fast path alone, at the shapes of Qwen3-8B, on one GPU.

    python benchmarks/kernels_h200.py [--json benchmarks/kernels_h200.json]

Per operation and shape: microseconds of the kernel, of plain torch operations that do the same without host
synchronisation, and of moving the operation's bytes once at 4.3 TB/s, the sustained bandwidth of an H200. Times are
medians of CUDA graph replays, each graph holding many calls. Caches of attention come in turn from many layers, so that
they are read from memory as in a model; what a model has just written (logits, probabilities) is warm here too.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from rich.console import Console
from rich.table import Table
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from hf_dspark import kernels
from hf_dspark.kernels import reference

BANDWIDTH = 4.3e12
HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCABULARY, RANK, GAMMA = 32, 8, 128, 5, 151_936, 256, 7
DEVICE = "cuda"


@dataclass
class Case:
    operation: str
    shape: str
    num_bytes: int
    calls: list[Callable[[], object]]  # of the kernel, one after the other in one graph
    torch_calls: list[Callable[[], object]]


@dataclass
class Result:
    operation: str
    shape: str
    kernel_us: float
    torch_us: float
    floor_us: float


def graph_microseconds(calls: list[Callable[[], object]], replays: int = 20) -> float:
    """Median time of one call when all are captured in one graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(replays + 2):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / len(calls))
    return sorted(times[2:])[replays // 2]


def bfloat16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device=DEVICE)


def attention(num_rows: int, context: int) -> Case:
    tokens, pairs = GAMMA + 1, HEADS // KV_HEADS
    shape = (num_rows, KV_HEADS, context, HEAD_DIM)
    layers = max(3, math.ceil(2.5e8 / (4 * math.prod(shape))))
    caches = [(bfloat16(*shape), bfloat16(*shape)) for _ in range(layers)]
    query = bfloat16(num_rows * tokens, HEADS, HEAD_DIM)
    starts = torch.arange(num_rows + 1, dtype=torch.int32, device=DEVICE) * tokens
    limits = torch.arange(context - tokens, context, dtype=torch.int32, device=DEVICE).repeat(num_rows)
    workspace, out = kernels.attention_workspace(query, caches[0][0], tokens), torch.empty_like(query)
    visible = (torch.arange(context, device=DEVICE) <= limits[:tokens, None]).expand(num_rows, 1, -1, -1)

    def kernel(keys, values):
        options = {"scale": HEAD_DIM**-0.5, "max_tokens_per_row": tokens, "out": out, "workspace": workspace}
        return lambda: kernels.ragged_attention(query, keys, values, starts, limits, **options)

    def sdpa(keys, values):  # as transformers calls it: KV heads expanded, a mask
        q = query.view(num_rows, tokens, HEADS, HEAD_DIM).transpose(1, 2)
        return lambda: F.scaled_dot_product_attention(
            q, keys.repeat_interleave(pairs, 1), values.repeat_interleave(pairs, 1), attn_mask=visible
        )

    num_bytes = 4 * math.prod(shape) + 4 * query.numel()
    return Case(
        "ragged_attention", f"R={num_rows} context={context}", num_bytes,
        [kernel(*cache) for cache in caches], [sdpa(*cache) for cache in caches],
    )  # fmt: skip


def markov(num_rows: int, sampled: bool) -> Case:
    w1, w2 = bfloat16(VOCABULARY, RANK), bfloat16(VOCABULARY, RANK)
    base = torch.randn(num_rows, VOCABULARY, device=DEVICE)
    prev = torch.randint(0, VOCABULARY, (num_rows,), device=DEVICE)
    seed, heat = torch.tensor([1], device=DEVICE), torch.ones(num_rows, device=DEVICE)
    out = torch.empty_like(base)

    def kernel(k):
        noise = {"noise": (seed, k), "temperature": heat} if sampled else {}
        return lambda: kernels.markov_step(prev, w1, w2, base, out=out, **noise)

    def plain():
        logits = F.linear(w1[prev], w2) + base
        if sampled:
            logits = (logits / heat[:, None]).softmax(-1) / torch.empty_like(logits).exponential_()
        return logits.argmax(-1)

    return Case(
        "markov_step", f"B={num_rows} {'T=1' if sampled else 'greedy'}", w2.nbytes + 2 * base.nbytes,
        [kernel(k) for k in range(GAMMA)] * 3, [plain] * GAMMA,
    )  # fmt: skip


def context(num_rows: int) -> Case:
    tokens, size = num_rows * (GAMMA + 1), 1024
    projected = bfloat16(tokens, LAYERS * 2 * KV_HEADS * HEAD_DIM)
    weight, cos, sin = bfloat16(LAYERS, HEAD_DIM), bfloat16(tokens, HEAD_DIM), bfloat16(tokens, HEAD_DIM)
    keys, values = bfloat16(2, LAYERS, num_rows, KV_HEADS, size, HEAD_DIM)
    rows = torch.arange(num_rows, dtype=torch.int32, device=DEVICE).repeat_interleave(GAMMA + 1)
    slots = torch.arange(500, 500 + GAMMA + 1, dtype=torch.int32, device=DEVICE).repeat(num_rows)

    def kernel():
        kernels.write_context(projected, weight, cos, sin, keys, values, rows, slots, eps=1e-6)

    def plain():  # all layers at once
        heads = projected.view(tokens, LAYERS, 2, KV_HEADS, HEAD_DIM)
        key = heads[:, :, 0].float()
        key = (key * torch.rsqrt(key.pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16() * weight[:, None]
        first, second = key.chunk(2, dim=-1)
        key = key * cos[:, None, None] + torch.cat((-second, first), dim=-1) * sin[:, None, None]
        keys[:, rows, :, slots] = key
        values[:, rows, :, slots] = heads[:, :, 1]

    return Case("write_context", f"L=5 T={tokens}", 2 * projected.nbytes, [kernel] * 20, [plain] * 20)


def truncated(num_rows: int, options: dict) -> Case:
    logits = 1.5 * torch.randn(num_rows, VOCABULARY, device=DEVICE)
    heat = torch.full((num_rows,), options["temperature"], device=DEVICE)
    columns = {
        name: torch.full((num_rows,), options[name], device=DEVICE, dtype=dtype)
        for name, dtype in (("top_k", torch.int32), ("top_p", torch.float64)) if name in options
    }  # fmt: skip
    out = torch.empty_like(logits)
    warpers = [TemperatureLogitsWarper(options["temperature"])]
    warpers += [TopKLogitsWarper(options["top_k"])] if "top_k" in options else []
    warpers += [TopPLogitsWarper(options["top_p"])]

    def plain():
        scores = logits
        for warper in warpers:
            scores = warper(None, scores)
        return scores.softmax(-1)

    name = " ".join(f"{key}={value}" for key, value in options.items())
    calls = [lambda: kernels.truncated_probabilities(logits, heat, **columns, out=out)] * 10
    return Case("truncated_probabilities", f"N={num_rows} {name}", 2 * logits.nbytes, calls, [plain] * 4)


def verification(num_rows: int, sampled: bool) -> Case:
    p = torch.randn(num_rows, GAMMA + 1, VOCABULARY, device=DEVICE).softmax(-1)
    q = p[:, :-1].roll(1, -1).contiguous() if sampled else None
    drafts = torch.randint(0, VOCABULARY, (num_rows, GAMMA), device=DEVICE)
    lengths = torch.full((num_rows,), GAMMA, dtype=torch.int32, device=DEVICE)
    seed = torch.tensor([1], device=DEVICE) if sampled else None
    calls = [lambda: kernels.accept_and_sample(drafts, q, p, lengths, seed=seed)] * 10
    plain = [lambda: reference.accept_and_sample(drafts, q, p, lengths, seed=seed)] * 4
    name = f"R={num_rows} {'sampled' if sampled else 'greedy'}"
    num_bytes = num_rows * VOCABULARY * 4 * (2 if sampled else GAMMA + 1)
    return Case("accept_and_sample", name, num_bytes, calls, plain)


def drawing(num_rows: int) -> Case:
    p = torch.randn(num_rows, VOCABULARY, device=DEVICE).softmax(-1)
    seed = torch.tensor([1], device=DEVICE)
    plain = [lambda: (p / torch.empty_like(p).exponential_()).argmax(-1)] * 10
    return Case("draw", f"N={num_rows}", p.nbytes, [lambda: kernels.draw(p, (seed, 0))] * 10, plain)


def cases() -> Iterator[Case]:
    for num_rows, length in ((1, 1024), (1, 4096), (1, 16384), (8, 1024), (32, 1024)):
        yield attention(num_rows, length)
    for num_rows in (1, 8, 32):
        yield markov(num_rows, sampled=False)
        yield markov(num_rows, sampled=True)
    for num_rows in (1, 8, 32):
        yield context(num_rows)
    for num_rows in (1, 8, 64):
        yield truncated(num_rows, {"temperature": 0.6, "top_k": 20, "top_p": 0.95})
        yield truncated(num_rows, {"temperature": 1.0, "top_p": 0.95})
    for num_rows in (1, 8, 32):
        yield verification(num_rows, sampled=False)
        yield verification(num_rows, sampled=True)
    for num_rows in (1, 8):
        yield drawing(num_rows)


def copy_bandwidth() -> float:
    """Bytes read and written per second by a large copy on the device."""
    source = torch.randn(2**28, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / graph_microseconds([lambda: target.copy_(source)] * 4) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    results = []
    table = Table("operation", "shape", "kernel µs", "torch µs", "floor µs", "of floor", "speed-up")
    for case in cases():
        result = Result(
            case.operation, case.shape,
            round(graph_microseconds(case.calls), 2), round(graph_microseconds(case.torch_calls), 2),
            round(case.num_bytes / BANDWIDTH * 1e6, 2),
        )  # fmt: skip
        results.append(result)
        share, gain = result.floor_us / result.kernel_us, result.torch_us / result.kernel_us
        times = (f"{time:.1f}" for time in (result.kernel_us, result.torch_us, result.floor_us))
        table.add_row(result.operation, result.shape, *times, f"{share:.0%}", f"{gain:.1f}x")
        del case
        torch.cuda.empty_cache()
    Console(width=120).print(table)
    environment = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "copy_bandwidth": round(copy_bandwidth() / 1e12, 2),
        "floor_bandwidth": BANDWIDTH / 1e12,
    }
    arguments.json.write_text(json.dumps(environment | {"results": [asdict(r) for r in results]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
