"""`hf-dspark inspect`."""

import math
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table
from transformers import AutoConfig

from .. import formats
from ..configuration_dspark import DSparkConfig
from ..diagnosis import check_configs
from ..generation.memory import cache_memory
from . import console
from .models import check_pair_arguments
from .options import JsonPath

SIZES = ((1, 4096), (8, 4096), (32, 4096))  # rows, tokens of each


def inspect(
    path: Annotated[str, typer.Argument(help="Folder or hub id of a DSpark draft.")],
    target: Annotated[
        str | None, typer.Option(help="Folder or hub id of its target: adds whether they fit, and memory.")
    ] = None,
    json: JsonPath = None,
) -> None:
    """Show what the loader decides about a draft, and why. No weight is loaded."""
    console.check_json_path(json)
    result = describe(path)
    memory = None if target is None else describe_memory(path, target)
    table = Table(title=f"{path}", title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in result.items():
        if name != "resolution":
            table.add_row(name, _shown(value))
    console.out.print(table)
    console.out.print("\n[bold]Decided, and why[/bold]")
    for what, why in result["resolution"].items():
        console.out.print(f"  {what}: {why}", markup=False)
    if target is not None:
        result |= describe_pair(path, target)
        console.out.print(f"\n[bold]With {target}[/bold]")
        for finding in result["pairing"]:
            console.out.print(f"  {finding['level']}: {finding['seen']}", markup=False)
    if memory is not None:
        show_memory(memory)
        result["memory"] = memory
    console.write_json(json, result)


def _shown(value: Any) -> str:
    if value is None:
        return "not stated"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def describe(path: str) -> dict[str, Any]:
    """The facts of a checkpoint as plain Python values."""
    checkpoint = formats.open_checkpoint(path)
    config = checkpoint.config
    tensors = [checkpoint.tensors[name] for name in checkpoint.renames]
    owner = {True: "the draft's own, in the file", False: "shared with the target"}
    return {
        "folder": str(checkpoint.folder),
        "family": config.source_format,
        "layout": "anchor-first" if config.sample_from_anchor else "1+N",
        "block_size": config.block_size,
        "num_draft_tokens": config.num_draft_tokens,
        "target_layer_ids": config.target_layer_ids,
        "hidden_states_indices": [i + 1 for i in config.target_layer_ids],
        "target_hidden_size": config.target_hidden_size,
        "num_target_layers": config.num_target_layers,
        "target_name_or_path": config.target_name_or_path,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "mask_token_id": config.mask_token_id,
        "embeddings": owner[config.has_embed_tokens],
        "head": owner[config.has_lm_head],
        "markov_head": f"{config.markov_head_type}, rank {config.markov_rank}" if config.markov_rank else "none",
        "confidence_head": _confidence_head(config),
        "confidence_temperatures": config.confidence_temperatures,
        "num_hidden_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "attention": f"{config.num_attention_heads} heads and {config.num_key_value_heads} key-value heads of "
        f"{config.head_dim}",
        "rope_parameters": config.rope_parameters,
        "dtype": sorted({tensor.dtype for tensor in tensors}),
        "num_parameters": sum(math.prod(tensor.shape) for tensor in tensors),
        "resolution": config.resolution,
    }


def describe_pair(path: str, target: str) -> dict[str, Any]:
    """How draft and target fit; from the config files alone."""
    findings = check_configs(AutoConfig.from_pretrained(target), formats.open_checkpoint(path).config)
    return {"pairing": [asdict(finding) for finding in findings]}


def describe_memory(path: str, target: str) -> dict[str, Any]:
    """What the caches of the fast path take, in bytes; from the config files alone."""
    check_pair_arguments(target, None)
    memory = cache_memory(AutoConfig.from_pretrained(target), formats.open_checkpoint(path).config)
    return {
        "target": target,
        "dtype": str(memory.dtype),
        "target_bytes_per_token": memory.target,
        "draft_bytes_per_token": memory.draft,
        "totals": [{"rows": rows, "tokens": tokens, "bytes": memory.num_bytes(rows, tokens)} for rows, tokens in SIZES],
    }


def show_memory(memory: dict[str, Any]) -> None:
    console.out.print(f"\n[bold]Memory of the fast path's caches[/bold], {memory['dtype']}")
    for part in ("target", "draft"):
        console.out.print(f"  {part}: {memory[f'{part}_bytes_per_token']:,} bytes a token and row")
    for total in memory["totals"]:
        size = f"{total['rows']} x {total['tokens']}"
        console.out.print(f"  {size}: {total['bytes'] / 2**30:.2f} GiB, one spare row included")


def _confidence_head(config: DSparkConfig) -> str:
    if not config.enable_confidence_head:
        return "none"
    return "hidden state and Markov embedding" if config.confidence_head_with_markov else "hidden state alone"
