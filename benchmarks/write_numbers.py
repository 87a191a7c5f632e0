"""Write the measured numbers of README.md and docs/numbers.md from the JSON files of this folder.

python benchmarks/write_numbers.py            # rewrite
python benchmarks/write_numbers.py --check    # exit code 1 if they are not up to date
"""

import argparse
import json
import sys
from pathlib import Path

import numbers_h200
import numbers_training

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- numbers:begin -->", "<!-- numbers:end -->"
SHAPES = ("4b", "8b", "14b")
# Operations whose kernels are others now than when kernels_h200.json was measured; their rows are left out.
CHANGED_SINCE = ("ragged_attention", "truncated_probabilities")


def load(name: str) -> dict:
    return json.loads((ROOT / "benchmarks" / f"{name}.json").read_text())


def load_shapes() -> dict[str, dict]:
    return {name: load(f"h200_{name}") for name in SHAPES if (ROOT / "benchmarks" / f"h200_{name}.json").exists()}


def rows(results: list[dict], method: str) -> list[str]:
    lines = []
    for result in results:
        row, dspark = result["methods"][method], result["dspark"]
        greedy = result["mode"] == "greedy"
        cells = [
            result["dtype"],
            result["mode"],
            result["set"],
            f"{result['methods']['plain']['tokens_per_second']:.1f}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['median_speedup']:.2f}×",
            f"{dspark['tau']:.2f}" if method == "dspark" else "",
            f"{row['identical_to_plain']} of {result['prompts']}" if greedy else "sampled",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def cpu_table(report: dict, method: str) -> str:
    head = "| dtype | mode | prompts | plain tok/s | tok/s | speed-up (median) | τ | same text |"
    return "\n".join([head, "|---|---|---|---|---|---|---|---|", *rows(report["results"], method)])


def cpu_setting(report: dict) -> str:
    env = report["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in env["versions"].items())
    return (
        f"Embedded pair (SmolLM2-135M-Instruct and its draft) on a CPU with {env['cpu']['threads']} threads "
        f"({env['cpu']['capability']}), {env['prompts_per_set']} prompts of each set, {env['template']}, at most "
        f"{env['max_new_tokens']} new tokens, seed {env['seed']}; {versions}. "
        "Speed-ups are medians over prompts of the ratio to plain generate in the same run."
        + (f" This was {report['note']}." if "note" in report else "")
    )


def short_cpu_table(report: dict) -> str:
    """A row for each dtype and mode, a column for each prompt set: speed-up, and τ in brackets."""
    lines = {}
    for result in report["results"]:
        line = lines.setdefault((result["dtype"], result["mode"]), {"cells": [], "same": 0, "of": 0})
        row = result["methods"]["dspark"]
        line["cells"].append(f"{row['median_speedup']:.2f}× ({result['dspark']['tau']:.2f})")
        line["same"] += row["identical_to_plain"] or 0
        line["of"] += result["prompts"]
    sets = list(dict.fromkeys(result["set"] for result in report["results"]))
    rows = [
        [*kind, *line["cells"], f"{line['same']} of {line['of']}" if kind[1] == "greedy" else "sampled"]
        for kind, line in lines.items()
    ]
    return numbers_h200.table(["dtype", "mode", *sets, "same text as plain"], rows)


def near_ties(report: dict) -> str:
    lines = []
    for result in report["results"]:
        if "different_texts" not in result:
            continue
        different = result["different_texts"]
        gaps = ", ".join(f"{gap:.3f}" for gap in different["logit_gaps"] if gap is not None)
        cells = (result["dtype"], result["set"], f"{different['count']} of {different['of']}", gaps or "-")
        lines.append("| " + " | ".join(cells) + " |")
    head = ["| dtype | prompts | different greedy texts | gap of the two best logits at the first difference |"]
    return "\n".join([*head, "|---|---|---|---|", *lines])


def positions(report: dict) -> str:
    lines = []
    for result in report["results"]:
        rates = result["dspark"]["acceptance_by_position"]
        cells = [f"{rate:.2f}" if rate is not None else "-" for rate in rates]
        lines.append(f"| {result['dtype']} | {result['mode']} | {result['set']} | " + " | ".join(cells) + " |")
    slots = len(report["results"][0]["dspark"]["acceptance_by_position"])
    head = "| dtype | mode | prompts | " + " | ".join(f"k={k + 1}" for k in range(slots)) + " |"
    return "\n".join([head, "|" + "---|" * (slots + 3), *lines])


def kernels_table(report: dict) -> str:
    lines = []
    for row in report["results"]:
        if row["operation"] in CHANGED_SINCE:
            continue
        share = f"{100 * row['floor_us'] / row['kernel_us']:.0f} %"
        times = [f"{row[name]:.1f}" for name in ("kernel_us", "torch_us", "floor_us")]
        lines.append("| " + " | ".join([row["operation"], row["shape"], *times, share]) + " |")
    head = "| operation | shape | kernel µs | torch µs | byte floor µs | floor / kernel |"
    return "\n".join([head, "|---|---|---|---|---|---|", *lines])


def kernels_setting(report: dict) -> str:
    return (
        f"One {report['device']}, torch {report['torch']}, triton {report['triton']}, shapes of Qwen3-8B, times by "
        f"replay of a CUDA graph; the floor counts the bytes once at {report['floor_bandwidth']} TB/s. Measured before "
        "the rounds above: the kernels of attention and truncation have changed since and are left out."
    )


def soak_section(report: dict) -> list[str]:
    """`benchmarks/soak.py`: what ran, and how memory moved."""
    env, samples = report["environment"], report["samples"]
    device = "a CPU" if env["device"] == "cpu" else f"one {env['device']}"
    versions = ", ".join(f"{name} {env[name]}" for name in ("hf_dspark", "transformers", "torch"))
    paths = ", ".join(f"{count} on the {path} path" for path, count in sorted(report["paths"].items()))
    names = {"rss_mb": "resident memory, MB", "device_mb": "memory on the device, MB", "tensors": "living tensors"}
    lines = []
    for name, growth in report["growth"].items():
        values = [samples[i * (len(samples) - 1) // 4][name] for i in range(5)]
        cells = [names[name], *(f"{value:.0f}" for value in values), f"{100 * growth:+.1f} %"]
        lines.append("| " + " | ".join(cells) + " |")
    return [
        "## Soak",
        f"{report['minutes']:g} minutes of calls on a small random pair, float32, on {device}: batches, single "
        "sequences and sessions of random lengths, greedy and sampled, some from two threads "
        f"({versions}, python {env['python']}, seed {env['seed']}). "
        f"{report['calls']} calls ({paths}), {report['tokens']} new tokens, {report['mean_accepted']:.2f} drafts "
        f"accepted a round, {report['reused']} prompt tokens reused by sessions; {report['interrupts']} calls were "
        f"interrupted. {report['compared']} greedy texts were compared with plain generate(), {report['wrong']} were "
        "wrong. The last column is the change of the mean from the second quarter of the run to the last.",
        "\n".join(["| | start | 1/4 | 1/2 | 3/4 | end | change |", "|---|---|---|---|---|---|---|", *lines]),
    ]


def two_gpus_section() -> list[str]:
    """`benchmarks/two_gpus.py`: one device, two by `device_map`, two by tensor parallelism; none before it was run."""
    if not (ROOT / "benchmarks" / "two_gpus.json").exists():
        return []
    report = load("two_gpus")
    lines = ["| form | tok/s | path | τ |", "|---|---|---|---|"]
    for row in report["rows"]:
        if "tokens_per_s" in row:
            cells = [row["form"], f"{row['tokens_per_s']:.1f}", row.get("path", ""), f"{row.get('tau', '')}"]
            lines.append("| " + " | ".join(cells) + " |")
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return [
        "## Two GPUs",
        f"A random Qwen3 pair ({report['shape']}) in {report['dtype']}, greedy, {report['prompt_tokens']} prompt "
        f"tokens, {report['new_tokens']} new ones, on {report['device']} ({versions}). Every form gave the tokens "
        "of one device, on all ranks. τ is that of a draft that was given the text, so speeds compare the forms.",
        "\n".join(lines),
    ]


def readme_block(report: dict, pair: dict, shapes: dict[str, dict]) -> str:
    setting = f"{cpu_setting(report)} In brackets τ. Below 1.00× drafts cost time."
    return "\n\n".join([setting, short_cpu_table(report), *numbers_h200.readme_parts(pair, shapes)])


def numbers_page(report: dict, pair: dict, shapes: dict[str, dict], kernels: dict, soak: dict) -> str:
    parts = [
        "# Numbers",
        "Generated by `python benchmarks/write_numbers.py` from the JSON files in `benchmarks/`; do not edit.",
        "## The embedded pair on a CPU",
        cpu_setting(report),
        "### DSpark",
        cpu_table(report, "dspark"),
        "### Prompt lookup, for comparison",
        cpu_table(report, "prompt lookup"),
        "### Conditional acceptance by position",
        positions(report),
        "### Near ties",
        "In float32 greedy text equals plain generate. In bfloat16 a block and a single token may run through "
        "different kernels, and where two tokens are nearly tied the choice can flip.",
        near_ties(report),
        *numbers_h200.sections(pair, shapes),
        *numbers_training.drafts(load("embedded_draft")),
        *numbers_training.calibration(load("calibrate_smollm2")),
        *numbers_training.throughput(load("train_h200")),
        *numbers_training.schedulers(load("scheduler_h200_8b"), load("scheduler_h200_smollm2")),
        *numbers_training.simulation(load("scheduler_sim")),
        "## Kernels of the fast path",
        kernels_setting(kernels),
        kernels_table(kernels),
        *soak_section(soak),
        *two_gpus_section(),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    report, pair, shapes = load("cpu_smollm2"), load("h200_smollm2"), load_shapes()
    readme = ROOT / "README.md"
    text = readme.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    pages = {
        readme: f"{before}{BEGIN}\n{readme_block(report, pair, shapes)}\n{END}{after}",
        ROOT / "docs" / "numbers.md": numbers_page(report, pair, shapes, load("kernels_h200"), load("soak")),
    }
    stale = [page for page, content in pages.items() if not page.exists() or page.read_text() != content]
    if check:
        sys.exit(f"Run `python benchmarks/write_numbers.py`: {[page.name for page in stale]}" if stale else 0)
    for page, content in pages.items():
        page.write_text(content)


if __name__ == "__main__":
    main()
