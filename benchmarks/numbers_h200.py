"""The parts of README.md and docs/numbers.md that come from h200_*.json; see write_numbers.py."""

from collections.abc import Iterable, Sequence

Shapes = dict[str, dict]  # "8b" -> what h200.py wrote for it

STAGES = (
    "Milliseconds of each stage, recorded in a graph of its own and replayed ten times in a row, with its share of "
    "their sum. The sum is not the round, which is one graph and one read by the host. Backbone: the draft's layers "
    "and head. Walk: the Markov head and the choice of x_1..x_γ. Confidence: c_k and the layout of the verify tokens. "
    "Verify: the target's forward. Accept: acceptance and the target's own token. Context: the draft's keys and values "
    "of committed tokens. Launches: kernels and copies of a whole round."
)
GAMMAS = (
    "Batch 1, greedy, times as in the profile; layers in their dynamic form, which is compiled once for all numbers of "
    "tokens. The walk is the one stage that goes through the block token by token."
)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def environment(*reports: dict) -> str:
    texts = []
    for report in reports:
        env = report["environment"]
        versions = ", ".join(f"{name} {env[name]}" for name in ("hf_dspark", "transformers", "torch"))
        texts.append(f"One {env['device']}, {versions}, seed {env['seed']}")
    return "; ".join(dict.fromkeys(texts))


# ---- the embedded pair


def pair_setting(report: dict) -> str:
    result = next(iter(report["sets"].values()))
    passes = "one pass" if result["repeats"] == 1 else f"{result['repeats']} passes"
    return (
        f"{environment(report)}. Embedded pair (SmolLM2-135M-Instruct and its draft) in {report['dtype']}, batch 1, "
        f"temperature 0 (greedy), {result['prompts']} prompts of each set, the target's chat template, one user turn, "
        f"{result['new_tokens']} new tokens whether or not the text ends, {passes}, methods in turn on each prompt. "
        "Tokens/s are medians over prompts, prefill included; the ratio of ragged path to HF static compiled is one "
        "too. HF eager and the plain path run once, on the first two prompts of a set. The last column "
        "counts equal texts. In bfloat16 near ties fall either way; these differences were not looked into one by one."
        + (f" This was {report['note']}." if "note" in report else "")
    )


def pair_table(report: dict) -> str:
    methods = list(next(iter(report["sets"].values()))["tokens_per_second"])
    rows = [
        [
            name,
            *(f"{result['tokens_per_second'][method]:.0f}" for method in methods),
            f"{result['ratio_to_static']:.2f}×",
            f"{result['tau']:.2f}",
            f"{result['identical']} of {result['prompts']}",
        ]
        for name, result in report["sets"].items()
    ]
    heads = [f"{method}, tok/s" for method in methods]
    return table(["prompts", *heads, "ragged / HF static", "τ", "same text as HF static"], rows)


def pair_start(report: dict) -> str:
    warmup, calls = report["warmup_s"], report["first_calls_s"]
    return f"Before that: `hf_dspark.warmup` {warmup:.0f} s, a first call of every method {calls:.0f} s in all."


def ahead_table(report: dict) -> str:
    """Rounds that start before the last one is read, against rounds one by one."""
    kinds = list(next(iter(report["ahead"].values())))
    rows = [[name, *(f"{row[kind]:.0f}" for kind in kinds)] for name, row in report["ahead"].items()]
    return table(["streamer", *(f"{kind}, tok/s" for kind in kinds)], rows)


# ---- rounds


def rounds_setting(shapes: Shapes) -> str:
    speeds = ", ".join(f"{1e-12 * report['bandwidth']:.2f}" for report in shapes.values())
    return (
        f"{environment(*shapes.values())}. Shapes of Qwen3 {', '.join(shapes).upper()} with random weights in bfloat16 "
        "and a draft of five layers, γ = 7, whole blocks verified. No prompts: what a round costs does not depend on "
        "its text or on how much is accepted. Times are medians from call to result. The floor is the time to read "
        "every weight of target and draft, and keys and values, once, at the bandwidth of a large copy in the same run "
        f"({speeds} TB/s). It leaves out computing, of which a larger batch has more."
        + "".join(f" {name.upper()}: {report['note']}" for name, report in shapes.items() if "note" in report)
    )


def rounds_table(shapes: Shapes) -> str:
    rows = [
        [
            name.upper(),
            str(row["batch"]),
            str(row["context"]),
            row["decoding"],
            f"{row['round_ms']:.2f}",
            f"{row['floor_ms']:.2f}",
            f"{row['round_ms'] / row['floor_ms']:.2f}×",
            f"{row['first_round_s']:.1f}",
            "yes" if row["captured"] else "no",
        ]
        for name, report in shapes.items()
        for row in report["rounds"]
    ]
    heads = (
        "shape",
        "batch",
        "context",
        "decoding",
        "round, ms",
        "floor, ms",
        "round / floor",
        "first round, s",
        "captured",
    )
    return table(heads, rows)


def short_rounds_table(shapes: Shapes) -> str:
    """A row for each shape at the first context, smallest and largest batch; the ways to decode side by side."""
    kinds = list(dict.fromkeys(row["decoding"] for report in shapes.values() for row in report["rounds"]))
    rows = []
    for name, report in shapes.items():
        context = report["rounds"][0]["context"]
        at = [row for row in report["rounds"] if row["context"] == context]
        batches = [row["batch"] for row in at]
        for batch in dict.fromkeys((min(batches), max(batches))):
            found = {row["decoding"]: row for row in at if row["batch"] == batch}
            times = [
                f"{found[kind]['round_ms']:.2f} ({found[kind]['round_ms'] / found[kind]['floor_ms']:.2f}×)"
                if kind in found
                else "-"
                for kind in kinds
            ]
            floor = next(iter(found.values()))["floor_ms"]
            rows.append([name.upper(), str(batch), str(context), f"{floor:.2f}", *times])
    return table(["shape", "batch", "context", "floor, ms", *(f"{kind}, ms (× floor)" for kind in kinds)], rows)


def stages_table(shapes: Shapes) -> str:
    measured = [(name, row) for name, report in shapes.items() for row in report["rounds"] if "stages_ms" in row]
    rows = []
    for name, row in measured:
        total = sum(row["stages_ms"].values())
        cells = [f"{ms:.2f} ({100 * ms / total:.1f} %)" for ms in row["stages_ms"].values()]
        rows.append([name.upper(), str(row["batch"]), row["decoding"], *cells, str(row["launches"])])
    return table(["shape", "batch", "decoding", *measured[0][1]["stages_ms"], "launches"], rows)


def floors_setting(shapes: Shapes) -> str:
    row = next(iter(shapes.values()))["rounds"][0]
    return (
        f"Milliseconds at batch {row['batch']} and context {row['context']}. The Markov walk reads its matrix W2 for "
        "each of its γ tokens."
    )


def floors_table(shapes: Shapes) -> str:
    items = next(iter(shapes.values()))["floor_ms"]
    rows = [[item, *(f"{report['floor_ms'][item]:.2f}" for report in shapes.values())] for item in items]
    return table(["read", *map(str.upper, shapes)], rows)


def memory(shapes: Shapes) -> str:
    known = [f"{name.upper()} {r['memory_gib']:.1f} GiB" for name, r in shapes.items() if "memory_gib" in r]
    return f"Most memory allocated while these rounds were prepared and measured: {', '.join(known)}." if known else ""


# ---- whole calls, blocks of other sizes


def calls_setting(shapes: Shapes) -> str:
    part = next(iter(shapes.values()))["generate"]
    rounds = ", ".join(f"{name.upper()} {r['generate']['plain_path_round_ms']:.1f} ms" for name, r in shapes.items())
    return (
        f"The same models, batch 1, greedy, a prompt of {part['prompt']} random tokens, {part['new_tokens']} new ones, "
        "but at most 64 of HF eager, prefill included, medians of 3 calls after a first one. With random weights next "
        "to no draft is accepted, so a script says how many drafts each round keeps, while the target's verdict is "
        "computed all the same. The table shows what a τ is worth in time, not which τ a draft reaches. A round of the "
        f"plain path: {rounds}."
    )


def calls_table(shapes: Shapes) -> str:
    rows = []
    for name, report in shapes.items():
        calls = report["generate"]["calls"]
        static = calls.get("HF static compiled")
        for method, call in calls.items():
            speed = call["tokens_per_second"]
            ratio = f"{speed / static['tokens_per_second']:.2f}×" if static else "-"
            numbers = f"{call['tau']:.2f}", f"{speed:.0f}", ratio, f"{call['first_call_s']:.1f}"
            rows.append([name.upper(), method, *numbers])
    return table(["shape", "method", "τ", "tok/s", "ratio to HF static compiled", "first call, s"], rows)


def gammas_table(shapes: Shapes) -> str:
    rows = []
    for name, report in shapes.items():
        for row in report["gammas"]:
            walk, total = row["stages_ms"]["walk"], sum(row["stages_ms"].values())
            share = f"{100 * row['walk_share']:.1f} %"
            rows.append([name.upper(), str(row["gamma"]), f"{walk:.2f}", f"{total:.2f}", share])
    return table(["shape", "γ", "walk, ms", "all stages, ms", "share of the walk"], rows)


# ---- pages


def sections(pair: dict | None, shapes: Shapes) -> list[str]:
    """The part of docs/numbers.md: what was not measured has no section."""
    parts = []
    if pair:
        parts += ["## The embedded pair on a GPU", pair_setting(pair), pair_table(pair), pair_start(pair)]
        if "ahead" in pair:
            text = "The ragged path, prompts of the first set, rounds ahead or one by one; the streamer is silent."
            parts += ["### Ahead", text, ahead_table(pair)]
    if shapes:
        order = (
            "Rows of a shape stand in the order of measurement, in one process: a first round compiles and records, "
            "and reuses what earlier ones have compiled."
        )
        parts += ["## Rounds of the fast path", rounds_setting(shapes), rounds_table(shapes), order, memory(shapes)]
        if any("stages_ms" in row for report in shapes.values() for row in report["rounds"]):
            parts += ["### Profile of a round", STAGES, stages_table(shapes)]
        parts += ["### The floor by item", floors_setting(shapes), floors_table(shapes)]
    if calls := {name: report for name, report in shapes.items() if "generate" in report}:
        parts += ["### Whole calls at a given τ", calls_setting(calls), calls_table(calls)]
    if gammas := {name: report for name, report in shapes.items() if report.get("gammas")}:
        parts += ["### Blocks of other sizes", GAMMAS, gammas_table(gammas)]
    return [part for part in parts if part]


def readme_parts(pair: dict | None, shapes: Shapes) -> list[str]:
    """The part of README.md."""
    parts = []
    if pair:
        result = next(iter(pair["sets"].values()))
        setting = (
            f"The same pair on a GPU, {pair['dtype']}, batch 1, greedy, {result['prompts']} prompts of each set, chat "
            f"template, {result['new_tokens']} new tokens. {environment(pair)}."
            + (f" This was {pair['note']}." if "note" in pair else "")
        )
        parts += [setting, pair_table(pair)]
    if shapes:
        setting = (
            "A round of the fast path, which adds τ tokens, at the shapes of Qwen3 (random weights, bfloat16, γ = 7). "
            f"The floor is the time to read all weights and caches once. {environment(*shapes.values())}."
        )
        parts += [setting, short_rounds_table(shapes)]
        parts += [short_calls(name, report["generate"]) for name, report in shapes.items() if "generate" in report]
    return parts


def short_calls(shape: str, report: dict) -> str:
    """Whole calls in a sentence."""
    calls = report["calls"]
    plain = calls["HF static compiled"]["tokens_per_second"]
    drafted = sorted((row["tau"], row["tokens_per_second"]) for name, row in calls.items() if "scripted" in name)
    told = ", ".join(f"{speed:.0f} tokens/s at τ {tau:.2f} ({speed / plain:.1f}×)" for tau, speed in drafted)
    return (
        f"Whole calls at the {shape.upper()} shape, a prompt of {report['prompt']} tokens and {report['new_tokens']} "
        f"new ones, acceptance set by a script: {told}, against {plain:.0f} tokens/s of transformers with a static "
        "cache and compiled."
    )
