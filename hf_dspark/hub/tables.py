"""Markdown tables of a model card."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..formats import Checkpoint
from .results import VERSIONS, Report

# Arguments of a training run that say nothing about the draft, or name files of one machine.
UNTOLD = (
    "output_dir", "resume", "log_every", "validate_every", "save_every", "keep_checkpoints", "tensorboard", "compile",
    "data", "validation_data", "init_from", "target",
)  # fmt: skip


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in lines)


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def facts(checkpoint: Checkpoint) -> str:
    """What a draft is, from its config and the headers of its files."""
    config, tensors = checkpoint.config, [checkpoint.tensors[name] for name in checkpoint.renames]
    own = {"embeddings": config.has_embed_tokens, "output head": config.has_lm_head}
    shared = " and ".join(name for name, stored in own.items() if not stored)
    size = f"{sum(math.prod(tensor.shape) for tensor in tensors) / 1e6:,.1f} M"
    layout = "all of them read (anchor-first)" if config.sample_from_anchor else "the first not read (1+N)"
    rows = [
        ("form", f"{config.source_format}, {', '.join(sorted({tensor.dtype for tensor in tensors}))}"),
        ("parameters", f"{size}; {shared} shared with the target" if shared else f"{size}, none shared"),
        (
            "backbone",
            f"{config.num_hidden_layers} layers, width {config.hidden_size}, {config.num_attention_heads} attention "
            f"heads, {config.num_key_value_heads} key-value heads",
        ),
        ("block", f"{config.block_size} slots, {layout}: γ = {config.num_draft_tokens}"),
        (
            "target layers read",
            f"outputs of layers {', '.join(map(str, config.target_layer_ids))} (−1 would be the embeddings)",
        ),
        ("Markov head", f"{config.markov_head_type}, rank {config.markov_rank}" if config.markov_rank else "none"),
        ("confidence head", _confidence(config)),
        ("mask token", f"id {config.mask_token_id}"),
    ]  # fmt: skip
    return table(["", ""], rows)


def _confidence(config: Any) -> str:
    if not config.enable_confidence_head:
        return "none"
    reads = "the hidden state and the Markov embedding of the token before" if config.confidence_head_with_markov else (
        "the hidden state"
    )  # fmt: skip
    temperatures = config.confidence_temperatures
    stored = "no temperatures" if temperatures is None else f"temperatures {' '.join(f'{t:.3g}' for t in temperatures)}"
    return f"reads {reads}; {stored}"


def report(report: Report) -> str:
    """Speed and acceptance under one setting."""
    head = ["prompts", "mode", "method", "τ", "plain tok/s", "compiled tok/s", "tok/s", "× plain", "× compiled",
            "same text"]  # fmt: skip
    rows = []
    for row in report.rows:
        prompts = row.set if row.prompts is None else f"{row.set} ({row.prompts})"
        speeds = [number(speed, 1) for speed in (row.plain, row.compiled, row.dspark)]
        ratios = [number(ratio, 2, "×") for ratio in (row.speedup, row.speedup_over_compiled)]
        rows.append([prompts, row.mode, row.method, number(row.tau), *speeds, *ratios, row.same_text])
    shown = [i for i in range(len(head)) if any(row[i] != "-" for row in rows)]
    cells = [[row[i] for i in shown] for row in (head, *rows)]
    return f"**{report.dtype}.** {report.setting}\n\n{table(cells[0], cells[1:])}"


def acceptance(reports: Iterable[Report]) -> str | None:
    """Conditional acceptance by position of every row that has it."""
    rows = [
        [report.dtype, row.set, row.mode, row.method, *(number(rate) for rate in row.acceptance)]
        for report in reports
        for row in report.rows
        if row.acceptance is not None
    ]
    if not rows:
        return None
    slots = max(map(len, rows)) - 4
    head = ["dtype", "prompts", "mode", "method", *(f"k={k + 1}" for k in range(slots))]
    return table(head, [row + ["-"] * (len(head) - len(row)) for row in rows])


def calibration(values: Mapping[str, Any]) -> str:
    """What `hf-dspark calibrate` found: errors of a_j, and temperatures."""
    gamma = len(values["temperatures"])
    rows = [
        ["temperature T_j", *(number(t) for t in values["temperatures"]), ""],
        ["ECE without", *(number(e, 4) for e in values["ece_by_position_before"]), number(values["ece_before"], 4)],
        ["ECE with", *(number(e, 4) for e in values["ece_by_position"]), number(values["ece_after"], 4)],
    ]
    lines = [
        "Expected calibration error of a_j, the predicted chance that the first j drafts are accepted, at temperature "
        f"1 on texts held out ({values['num_rounds']:,} rounds, {values['dataset']}):",
        table(["", *(f"j={j + 1}" for j in range(gamma)), "mean"], rows),
        *(f"{note[:1].upper()}{note[1:]}." for note in values["notes"]),
    ]
    return "\n\n".join(lines)


def training(run: Mapping[str, Any] | None, texts: Mapping[str, Any] | None) -> str | None:
    """Where the weights come from: what `hf-dspark train` and `synthesize` wrote."""
    parts = []
    if texts is not None:
        config = texts["config"]
        parts.append(
            f"Texts: {texts['num_conversations']:,} conversations of {texts['num_tokens']:,} tokens "
            f"({texts['num_supervised_tokens']:,} supervised) that the target wrote at temperatures "
            f"{', '.join(f'{t:g}' for t in config['temperatures'])}; seed {config['seed']}{_with_versions(texts)}."
        )
    if run is not None:
        config = run["config"]
        parts.append(f"`hf-dspark train`, {run['step']:,} steps{_with_versions(run)}. Arguments:")
        told = [(f"`{name}`", value) for name, value in config.items() if name not in UNTOLD and value is not None]
        parts.append(table(["argument", "value"], [("`data`", _files(config["data"], run)), *told]))
        if (found := run.get("validation")) is not None:
            rates = " ".join(number(rate, 3) for rate in found["acceptance_by_position"])
            parts.append(
                f"On texts held out, along the text (not by generating): τ {found['tau']:.2f} when sampling, "
                f"{found['tau_greedy']:.2f} when greedy; acceptance by position {rates}."
            )
    return "\n\n".join(parts) or None


def _files(paths: Sequence[str], run: Mapping[str, Any]) -> str:
    """Names of the data, with their hashes where the run recorded them."""
    hashes = run.get("data_sha256", {})
    return ", ".join(f"{Path(path).name}{f' (SHA-256 {hashes[path]})' if path in hashes else ''}" for path in paths)


def _with_versions(values: Mapping[str, Any]) -> str:
    known = values.get("versions", {})
    found = ", ".join(f"{name} {known[name]}" for name in VERSIONS if name in known)
    return f" ({found})" if found else ""
