"""The embedded pair on a CPU: plain generate, prompt lookup and DSpark on the same prompts, in one run.

    python benchmarks/cpu_smollm2.py --prompts FOLDER

FOLDER holds gsm8k.jsonl, humaneval.jsonl and mt-bench.jsonl (one object a line, `turns`: list of user messages; the
first is used). The methods take turns on each prompt, so that a change of the machine's load meets all of them. Writes
benchmarks/cpu_smollm2.json and prints a table; `python benchmarks/write_numbers.py` turns the JSON into documentation.
"""

import argparse
import hashlib
import json
import platform
import statistics
import time
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table

import hf_dspark

SETS = ("gsm8k", "humaneval", "mt-bench")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MODES = {"greedy": {"do_sample": False}, "T=1": {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}}
SEED = 0


def read_prompts(folder: Path, name: str, count: int) -> list[str]:
    lines = (folder / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line)["turns"][0] for line in lines[:count]]


def methods(draft) -> dict[str, dict]:
    return {"plain": {}, "prompt lookup": {"prompt_lookup_num_tokens": 10}, "dspark": {"assistant_model": draft}}


def timed(target, inputs: dict, options: dict) -> tuple[list[int], float]:
    """New token ids and seconds of one call."""
    torch.manual_seed(SEED)
    started = time.perf_counter()
    output = target.generate(**inputs, **options)
    seconds = time.perf_counter() - started
    return output[0, inputs["input_ids"].shape[1] :].tolist(), seconds


def logit_gap(target, inputs: dict, plain: list[int], other: list[int]) -> float | None:
    """Distance between the two best logits of the target where two texts first differ; small means a near tie."""
    first = next((i for i, pair in enumerate(zip(plain, other, strict=False)) if pair[0] != pair[1]), None)
    if first is None:
        return None
    ids = torch.cat((inputs["input_ids"], torch.tensor([plain[:first]], dtype=torch.long)), dim=1)
    with torch.no_grad():
        best = target(ids).logits[0, -1].float().topk(2).values
    return float(best[0] - best[1])


def measure(pair, prompts: list[str], mode: dict, max_new_tokens: int, label: str) -> dict:
    """All methods over one set of prompts."""
    target, draft, tokenizer = pair
    runs: dict[str, list] = {name: [] for name in methods(draft)}
    gaps, different = [], 0
    with hf_dspark.record() as stats:
        for text in track(prompts, description=label):
            chat = [{"role": "user", "content": text}]
            inputs = dict(
                tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
            )
            for name, extra in methods(draft).items():
                options = {"max_new_tokens": max_new_tokens, **mode, **extra}
                runs[name].append(timed(target, inputs, options))
            plain, dspark = runs["plain"][-1][0], runs["dspark"][-1][0]
            if not mode["do_sample"] and plain != dspark:
                different += 1
                gaps.append(logit_gap(target, inputs, plain, dspark))
    result = {"methods": {name: summary(of_method, runs["plain"]) for name, of_method in runs.items()}}
    result["dspark"] = {
        "tau": stats.mean_acceptance_length,
        "expected_tau": stats.expected_acceptance_length,
        "acceptance_by_position": stats.acceptance_by_position,
        "rounds": stats.num_rounds,
        "acceptance_rate": stats.acceptance_rate,
    }
    if not mode["do_sample"]:
        result["different_texts"] = {"count": different, "of": len(prompts), "logit_gaps": gaps}
    return result


def summary(runs: list[tuple[list[int], float]], plain: list[tuple[list[int], float]]) -> dict:
    speeds = [len(ids) / seconds for ids, seconds in runs]
    ratios = [speed * seconds / len(ids) for speed, (ids, seconds) in zip(speeds, plain, strict=True)]
    ids = json.dumps([ids for ids, _ in runs]).encode()
    return {
        "tokens": sum(len(ids) for ids, _ in runs),
        "tokens_per_second": sum(len(ids) for ids, _ in runs) / sum(seconds for _, seconds in runs),
        "median_speedup": statistics.median(ratios),
        "identical_to_plain": [a == b for (a, _), (b, _) in zip(runs, plain, strict=True)].count(True),
        "output_sha256": hashlib.sha256(ids).hexdigest(),
    }


def environment(arguments: argparse.Namespace) -> dict:
    return {
        "versions": {
            "hf_dspark": hf_dspark.__version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "cpu": {
            "machine": platform.machine(),
            "threads": torch.get_num_threads(),
            "capability": torch.backends.cpu.get_cpu_capability(),
        },
        "seed": SEED,
        "max_new_tokens": arguments.max_new_tokens,
        "prompts_per_set": arguments.count,
        "template": "the target's chat template, one user turn",
    }


def table(results: list[dict]) -> Table:
    view = Table("dtype", "mode", "set", "method", "tok/s", "speed-up", "identical", "τ")
    for result in results:
        for name, row in result["methods"].items():
            tau = f"{result['dspark']['tau']:.2f}" if name == "dspark" else ""
            same = f"{row['identical_to_plain']}/{result['prompts']}" if result["mode"] == "greedy" else "-"
            cells = (f"{row['tokens_per_second']:.1f}", f"{row['median_speedup']:.2f}", same, tau)
            view.add_row(result["dtype"], result["mode"], result["set"], name, *cells)
    return view


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--count", type=int, default=10, help="prompts of each set")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()
    results = []
    for dtype_name, dtype in DTYPES.items():
        pair = hf_dspark.load_default_pair(dtype=dtype)
        measure(pair, ["Warm up."], MODES["greedy"], 16, "warm-up")
        for mode_name, mode in MODES.items():
            for name in SETS:
                prompts = read_prompts(arguments.prompts, name, arguments.count)
                label = f"{dtype_name} {mode_name} {name}"
                result = measure(pair, prompts, mode, arguments.max_new_tokens, label)
                results.append({"dtype": dtype_name, "mode": mode_name, "set": name, "prompts": len(prompts), **result})
    report = {"environment": environment(arguments), "results": results}
    arguments.output.write_text(json.dumps(report, indent=2) + "\n")
    Console().print(table(results))


if __name__ == "__main__":
    main()
