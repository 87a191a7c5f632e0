"""The embedded pair on one GPU, bfloat16, greedy: whole calls on real prompts, methods in turn on each prompt.

    python benchmarks/h200_smollm2.py --prompts FOLDER --json benchmarks/h200_smollm2.json

FOLDER holds gsm8k.jsonl, humaneval.jsonl and mt-bench.jsonl, as for cpu_smollm2.py. Every answer has the same number of
tokens. HF's static cache gets one size for all calls, so that it compiles once.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from cpu_smollm2 import SETS, read_prompts
from h200 import environment, synchronize
from scheduler_h200 import chat_batch
from transformers import TextStreamer

import hf_dspark

NEW = 128


def methods(draft) -> dict[str, tuple[dict, bool]]:
    """Options of each method, and whether it is slow: then it runs once, on few prompts of a set."""
    static = {"cache_implementation": "static"}
    return {
        "HF eager": ({}, True),
        "HF static compiled": (static | {"max_cache_len": 1024}, False),
        "DSpark plain path": ({"assistant_model": draft}, True),
        "DSpark ragged path": (static | {"assistant_model": draft}, False),
    }


def call(target, inputs: dict, options: dict) -> tuple[float, list[int]]:
    synchronize()
    started = time.perf_counter()
    output = target.generate(
        **inputs, **options, max_new_tokens=NEW, min_new_tokens=None, do_sample=False, eos_token_id=None
    )
    synchronize()
    return time.perf_counter() - started, output[0, inputs["input_ids"].shape[1] :].tolist()


def measure(target, draft, tokenizer, prompts: list[str], repeats: int) -> dict:
    times: dict[str, list[float]] = {name: [] for name in methods(draft)}
    same, taus = [], []
    for i, prompt in enumerate(prompts):
        inputs = chat_batch(tokenizer, [prompt], target.device)
        texts: dict[str, list[int]] = {}
        for repeat in range(repeats):
            for name, (options, slow) in methods(draft).items():
                if slow and (i >= 2 or repeat):
                    continue
                with hf_dspark.record() as stats:
                    seconds, texts[name] = call(target, inputs, options)
                times[name].append(NEW / seconds)
                if name == "DSpark ragged path":
                    taus.append(stats.mean_acceptance_length)
        same.append(texts["DSpark ragged path"] == texts["HF static compiled"])
    speeds = {name: statistics.median(values) for name, values in times.items()}
    pairs = zip(times["DSpark ragged path"], times["HF static compiled"], strict=True)
    ratio = statistics.median(mine / other for mine, other in pairs)
    result = {"tokens_per_second": speeds, "ratio_to_static": ratio, "tau": statistics.mean(taus)}
    return result | {"identical": sum(same), "prompts": len(prompts), "new_tokens": NEW, "repeats": repeats}


class Printer(TextStreamer):
    """Decodes as it would print, to nobody."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        pass


def measure_ahead(target, draft, tokenizer, prompts: list[str], repeats: int) -> dict[str, dict[str, float]]:
    """Tokens a second with rounds ahead and one by one, with and without a streamer; medians over prompts and calls."""
    speeds: dict[str, dict[str, list[float]]] = {"no streamer": {}, "TextStreamer": {}}
    for kind in ("ahead", "one by one"):
        draft.fast_path = hf_dspark.FastPath(ahead=kind == "ahead")
        for repeat in range(repeats + 1):
            for prompt in prompts:
                inputs = chat_batch(tokenizer, [prompt], target.device)
                for name, found in speeds.items():
                    streamer = None if name == "no streamer" else Printer(tokenizer, skip_prompt=True)
                    given = {"assistant_model": draft, "cache_implementation": "static", "streamer": streamer}
                    seconds, _ = call(target, inputs, given)
                    if repeat:  # the first one compiles
                        found.setdefault(kind, []).append(NEW / seconds)
    draft.fast_path = None
    return {name: {kind: statistics.median(values) for kind, values in row.items()} for name, row in speeds.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--num-prompts", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target, draft, tokenizer = hf_dspark.load_default_pair(dtype=torch.bfloat16, device=device)
    result = {"environment": environment(), "dtype": "bfloat16", "sets": {}}
    result["warmup_s"] = hf_dspark.warmup(target, draft, max_length=1024)
    inputs = tokenizer("One two three", return_tensors="pt").to(device)
    started = time.perf_counter()
    for options, _ in methods(draft).values():
        call(target, inputs, options)
    result["first_calls_s"] = time.perf_counter() - started
    print(result, flush=True)
    for name in SETS:
        prompts = read_prompts(arguments.prompts, name, arguments.num_prompts)
        result["sets"][name] = measure(target, draft, tokenizer, prompts, arguments.repeats)
        print(name, result["sets"][name], flush=True)
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    prompts = read_prompts(arguments.prompts, SETS[0], arguments.num_prompts)
    result["ahead"] = measure_ahead(target, draft, tokenizer, prompts, arguments.repeats)
    print(result["ahead"], flush=True)
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
