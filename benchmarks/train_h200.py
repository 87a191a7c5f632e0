"""Training throughput on one GPU: supervised block positions per second, peak memory, and where the time goes.

    python benchmarks/train_h200.py [--json benchmarks/train_h200.json] [--target FOLDER]

The step is that of `hf_dspark.training`: online features of a target of SmolLM2-135M's shape (30 layers, width 576,
vocabulary 49,152; random weights unless `--target` names one), draft of 2 layers, forward, backward, clipping, AdamW.
Texts of `--length` random tokens are supervised throughout, so a step has 32 × 48 × 7 positions but for the few blocks
at the end of a text. A position is counted when its slot counts in the loss (`eval_mask`).
"""

import argparse
import gc
import json
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from hf_dspark.training import TrainingConfig, forward_blocks
from hf_dspark.training.estimate import measure
from hf_dspark.training.trainer import Run

SMOLLM2 = {
    "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip
HEADS = {
    "vanilla": {"markov_rank": 64},
    "gated": {"markov_rank": 64, "markov_head_type": "gated"},
    "rnn": {"markov_rank": 64, "markov_head_type": "rnn"},
    "dflash": {"markov_rank": 0, "enable_confidence_head": False},
}


def random_target(folder: Path) -> Path:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SMOLLM2)).to(torch.bfloat16).save_pretrained(folder)
    return folder


def random_texts(path: Path, count: int, length: int) -> Path:
    stream = random.Random(0)
    with path.open("w") as file:
        for _ in range(count):
            ids = [stream.randrange(5, SMOLLM2["vocab_size"]) for _ in range(length)]
            file.write(json.dumps({"input_ids": ids, "loss_mask": [1] * length}) + "\n")
    return path


def milliseconds(call: Callable[[], object], repeats: int = 10) -> float:
    """Mean wall time of a call, the device waited for."""
    call()
    synchronize()
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    synchronize()
    return 1000 * (time.perf_counter() - started) / repeats


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def parts(run: Run) -> dict[str, float]:
    """Milliseconds of the pieces of a forward, each alone."""
    batch = run.batch(0)
    inputs = run.inputs(batch, "0")

    def backbone():
        with run.objective.autocast():
            return forward_blocks(run.draft, *inputs[1:], lazy=True)

    def with_backward():
        run.objective(*inputs).loss.backward()
        run.optimizer.zero_grad(set_to_none=False)

    found = {
        "target": milliseconds(lambda: run.teacher.read(inputs[1])),
        "draft_forward": milliseconds(backbone),
        "objective_forward_and_loss": milliseconds(lambda: run.objective(*inputs)),
        "objective_with_backward": milliseconds(with_backward),
    }
    if run.recorded is not None:
        found["objective_with_backward_recorded"] = milliseconds(lambda: run.recorded(*inputs))
    return found


def bench(name: str, folder: Path, args: argparse.Namespace) -> dict:
    config = TrainingConfig(
        data=[str(folder / "texts.jsonl")], output_dir=str(folder / name), target=args.target or str(folder / "target"),
        num_validation_texts=0, max_length=args.length, batch_size=args.batch_size, num_anchors=args.num_anchors,
        max_steps=1000, tensorboard=False, compile=args.compile, **HEADS[name],
    )  # fmt: skip
    gc.collect()  # what the head before left behind would count
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    run = Run(config)
    result = measure(run, args.warm_up, args.steps)
    return {"head": name} | asdict(result) | {"milliseconds": parts(run)}


def environment() -> dict:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"device": device, "torch": torch.__version__, "transformers": transformers.__version__}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--target", help="folder of a target with a vocabulary of 49,152")
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="compile the target's layers")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--num-anchors", type=int, default=48)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    console, table = Console(), Table("head", "positions/s", "ms/step", "peak GB", "target ms", "objective ms")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.target is None:
            random_target(folder / "target")
        random_texts(folder / "texts.jsonl", 2 * args.batch_size, args.length)
        results = [bench(head, folder, args) for head in args.heads]
    for r in results:
        numbers = (r["seconds_per_step"] * 1000, r["memory_gb"], *(r["milliseconds"][k] for k in ("target",)))
        objective = r["milliseconds"]["objective_with_backward"]
        table.add_row(r["head"], f"{r['positions_per_second']:,.0f}", *(f"{x:.1f}" for x in (*numbers, objective)))
    console.print(table)
    if args.json:
        settings = {
            "batch_size": args.batch_size,
            "num_anchors": args.num_anchors,
            "length": args.length,
            "compile": args.compile,
        }
        report = {"environment": environment(), "settings": settings, "results": results}
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
