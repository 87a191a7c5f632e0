"""The parts of docs/numbers.md about drafts and their training; see write_numbers.py."""

from numbers_h200 import environment, table

TRAINED = (
    "`dspark` is the embedded draft, `dflash` the same without Markov head, trained for as many steps on the same "
    "texts (`benchmarks/embedded_draft/recipe.sh`); `previous` is the draft that the embedded one replaced (3,200 "
    "steps from random weights), `start` the first of all. τ is committed tokens over rounds of all prompts of a set."
)


def drafts(report: dict) -> list[str]:
    """τ of the embedded draft beside others, from embedded_draft.json."""
    rows, means = [], {}
    for mode in ("greedy", "T=1"):
        for name, draft in report["drafts"].items():
            taus = {key: value["tau"] for key, value in draft[mode].items() if isinstance(value, dict)}
            shape = f"{draft['layers']} layers, rank {draft['markov_rank']}, {draft['bytes'] / 2**20:.1f} MiB"
            means[mode, name] = draft[mode]["mean_tau"]
            rows.append([mode, name, shape, *(f"{tau:.2f}" for tau in taus.values()), f"{means[mode, name]:.2f}"])
    gains = ", ".join(
        f"{100 * (means[mode, 'dspark'] / means[mode, 'dflash'] - 1):+.1f} % ({mode})" for mode in ("greedy", "T=1")
    )
    setting = (
        f"{environment(report)}, bfloat16, {report['prompts_per_set']} prompts of each set, first turns, the target's "
        f"chat template, {report['new_tokens']} new tokens. {TRAINED} Mean τ with the Markov head against without: "
        f"{gains}."
    )
    return ["## Drafts of the embedded target", setting, table(["mode", "draft", "shape", *taus, "mean"], rows)]


def throughput(report: dict) -> list[str]:
    """Speed of training by head, from train_h200.json."""
    env, given = report["environment"], report["settings"]
    rows = [
        [
            result["head"],
            f"{result['positions_per_second']:,.0f}",
            f"{1000 * result['seconds_per_step']:.1f}",
            f"{result['memory_gb']:.1f}",
            f"{result['milliseconds']['target']:.1f}",
            f"{result['milliseconds']['objective_with_backward']:.1f}",
            f"{result['milliseconds']['objective_with_backward_recorded']:.1f}",
        ]
        for result in report["results"]
    ]
    heads = ["head", "supervised block positions/s", "step, ms", "peak memory, GB", "target, ms", "objective, ms"]
    heads += ["objective recorded, ms"]
    return [
        "## Training",
        f"One {env['device']}, transformers {env['transformers']}, torch {env['torch']}. Target of SmolLM2-135M's "
        f"shape with random weights, draft of 2 layers, {given['batch_size']} texts of {given['length']} tokens, "
        f"{given['num_anchors']} blocks of 7 each; target's forward, draft, loss, backward, AdamW. The step replays a "
        "recorded objective; target and objective (draft, loss, backward) are timed alone."
        + (f" Measured: {report['note']}." if "note" in report else ""),
        table(heads, rows),
    ]


def schedulers(random_pair: dict, embedded_pair: dict) -> list[str]:
    """Fixed numbers of drafts against the scheduler, from scheduler_h200_*.json."""
    return [
        "## Scheduler",
        f"{environment(random_pair)}. bfloat16, greedy, prefill included, medians of calls, methods in "
        'turn. `auto` is `draft.scheduler = "auto"`; "verifies" counts drafts a row and round.',
        f"Qwen3-8B's shape with random weights, 512 prompt tokens and {random_pair['new_tokens']} new ones a row, "
        f"{random_pair['repeats']} calls. Confidence is drawn from four levels and drafts are accepted with that "
        "probability, so it is calibrated." + (f" {random_pair['note']}." if "note" in random_pair else ""),
        scheduler_table(random_pair),
        f"The embedded pair on chat prompts, {embedded_pair['new_tokens']} new tokens in each row, "
        f"{embedded_pair['repeats']} calls; a ratio is the median over repeats.",
        scheduler_table(embedded_pair),
    ]


def scheduler_table(report: dict) -> str:
    lines = []
    for result in report["batches"]:
        of = result["methods"]
        auto = of["auto"]
        lines.append(
            [
                str(result["batch"]),
                *(f"{row['tokens_per_second']:,.0f}" for name, row in of.items() if name != "auto"),
                f"{auto['tokens_per_second']:,.0f}",
                f"{auto['verified_per_row']:.1f}",
                f"{100 * (result['auto_over_best_fixed'] - 1):+.1f} %",
            ]
        )
    fixed = [name for name in report["batches"][0]["methods"] if name != "auto"]
    return table(
        ["batch", *(f"{name}, tok/s" for name in fixed), "auto, tok/s", "auto verifies", "auto against best fixed"],
        lines,
    )


def simulation(report: dict) -> list[str]:
    """Ways to choose verify lengths under measured costs and confidences, from scheduler_sim.json."""
    results = report["results"]
    fixed = [f"fixed {n}" for n in range(1, report["gamma"] + 1)]
    others = [name for name in dict.fromkeys(r["policy"] for r in results) if name not in fixed[:-1]]
    lines = []
    for rows in dict.fromkeys(r["rows"] for r in results):
        of = {r["policy"]: r for r in results if r["rows"] == rows}
        best = max(fixed, key=lambda name: of[name]["tokens_per_second"])
        cells = (f"{of[name]['tokens_per_second']:,.0f} ({of[name]['drafts_per_row']:.1f})" for name in others)
        lines.append([str(rows), f"{of[best]['tokens_per_second']:,.0f} ({best})", *cells])
    return [
        "### Simulated",
        "`benchmarks/scheduler_sim.py`: tokens a second, and in brackets drafts verified a row and round, with the "
        f"costs of {report['environment']['target']} measured on one {report['environment']['device']} "
        f"(`benchmarks/{report['costs']}`) and a_j and acceptance of the embedded pair (15 prompts each of gsm8k, "
        f"humaneval and mt-bench, T=1, bfloat16), {report['steps']:,} rounds, least gain {report['min_gain']}.",
        table(["rows", "best fixed", *others], lines),
        "![Throughput and verify budget by concurrent rows](../benchmarks/scheduler_sim.png)",
    ]


def calibration(report: dict) -> list[str]:
    """ECE and AUROC of the embedded draft's confidence by position, from calibrate_smollm2.json."""
    env, gamma = report["environment"], len(report["temperatures"])
    device = "a CPU" if env["device"] == "cpu" else f"one {env['device']}"
    percent = ("ECE of a_j, T_k = 1", "ece_by_position_before"), ("ECE of a_j, with the chosen T_k", "ece_by_position")
    lines = [[label, *(f"{100 * x:.1f} %" for x in report[name])] for label, name in percent]
    auroc = ("AUROC of c_k", "auroc_c"), ("AUROC of a_j", "auroc_a")
    lines += [[label, *(f"{x:.3f}" for x in report[name])] for label, name in auroc]
    return [
        "## Confidence of the embedded draft",
        f"On {device}, hf_dspark {env['hf_dspark']}, transformers {env['transformers']}, torch {env['torch']}, seed "
        f"{env['seed']}, {report['dtype']}: {report['dataset']}, {report['num_rounds']:,} rounds at T=1, "
        f"{100 * report['holdout']:.0f} % of the texts held out for these numbers. Against the probability that the "
        f"first j drafts pass, which is known. {' '.join(note[0].upper() + note[1:] for note in report['notes'])}.",
        table(["", *(f"{j + 1}" for j in range(gamma))], lines),
        "![Reliability of a_j by position](../benchmarks/calibrate_smollm2.png)",
    ]
