"""STS of the embedded pair: temperatures fitted on texts the target writes, reported on held-out ones, with a plot.

    python benchmarks/calibrate_smollm2.py --json benchmarks/calibrate_smollm2.json

The target writes its own questions from the chat template and answers them at temperature 1. Writes the report as JSON
and, beside it, the reliability of a_j without and with the temperatures (png).
"""

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path

import torch
from h200 import environment
from matplotlib.figure import Figure

import hf_dspark
from hf_dspark import confidence
from hf_dspark.evaluation.questions import write_questions
from hf_dspark.scheduling.calibration import Recording, fit, record_rounds

BINS = 10


def reliability(recording: Recording, temperatures: list[float]) -> Figure:
    """Mean outcome against mean a_j in bins, per position, without and with the temperatures."""
    gamma = len(temperatures)
    figure = Figure(figsize=(12, 5.5), layout="constrained")
    axes = figure.subplots(2, (gamma + 1) // 2, sharex=True, sharey=True).flatten()
    for j in range(gamma):
        for label, scale in (("T_k = 1", [1.0] * gamma), ("STS", temperatures)):
            c = confidence.conditional(recording.confidence_logits, scale)
            a, seen = confidence.survival(c)[:, j], recording.survival[:, j]
            bins = (a * BINS).long().clamp(max=BINS - 1)
            points = [
                (float(a[bins == b].mean()), float(seen[bins == b].mean()))
                for b in range(BINS)
                if (bins == b).sum() > 30
            ]
            axes[j].plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
        axes[j].plot([0, 1], [0, 1], color="gray", linewidth=0.8)
        axes[j].set(title=f"a_{j + 1}")
    axes[0].legend()
    for axis in axes[gamma:]:
        axis.set_axis_off()
    figure.supxlabel("predicted")
    figure.supylabel("share that got this far")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=192)
    parser.add_argument("--holdout", type=float, default=0.4)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target, draft, tokenizer = hf_dspark.load_default_pair(dtype=torch.bfloat16, device=device)
    questions = write_questions(target, tokenizer, arguments.num_prompts)
    chats = [[{"role": "user", "content": question}] for question in questions]
    ids = [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=True)["input_ids"] for c in chats]
    recording = record_rounds(target, draft, ids, max_new_tokens=arguments.max_new_tokens)
    report = fit(recording, arguments.holdout)
    report = replace(report, dataset=f"{len(ids)} questions and answers written by the target")
    result = asdict(report) | {"environment": environment(), "dtype": "bfloat16", "holdout": arguments.holdout}
    arguments.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    reliability(recording, report.temperatures).savefig(arguments.json.with_suffix(".png"), dpi=120)
    print(json.dumps(result, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
