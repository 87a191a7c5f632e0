"""Folders that vLLM and SGLang serve, and the commands that serve them."""

import json
import shlex
from pathlib import Path
from typing import NamedTuple

from ..configuration_dspark import DSparkConfig
from ..modeling_dspark import DSparkForCausalLM

FORMATS = ("deepspec", "speculators")


class Exported(NamedTuple):
    """`commands`: engine → how it serves the pair. `refusals`: engine → why it cannot."""

    folder: Path
    commands: dict[str, str]
    refusals: dict[str, str]


def export(
    draft: DSparkForCausalLM, output: str | Path, *, format: str, target: str, include_shared: bool = True
) -> Exported:
    """Write a draft as production engines read it.

    Args:
        draft: attached to its target, unless it has embeddings and head of its own.
        output: a new folder.
        format: `"deepspec"` (vLLM, SGLang) or `"speculators"` (vLLM).
        target: hub id or folder of the target, for the commands.
        include_shared: also write embeddings and head. Every engine reads such a folder; without them it is smaller,
            and engines take the target's.

    Raises:
        ValueError: `output` exists, an unknown format, or a draft that it cannot hold.
    """
    folder = Path(output)
    if format not in FORMATS:
        raise ValueError(f"`format` must be one of {', '.join(FORMATS)}, got {format!r}.")
    if folder.exists():
        raise ValueError(f"`output` {folder} exists: give a new folder.")
    before, draft.config.target_name_or_path = draft.config.target_name_or_path, target  # speculators' verifier
    try:
        draft.save_pretrained(folder, format=format, include_shared=include_shared)
    finally:
        draft.config.target_name_or_path = before
    return Exported(folder, *serving(draft.config, format, str(folder), target))


def serving(config: DSparkConfig, format: str, folder: str, target: str) -> tuple[dict[str, str], dict[str, str]]:
    """Commands of the engines that serve an exported draft, and why others do not.

    As their loaders were in late 2026: vLLM's `qwen3_dspark.py` reads both forms with vanilla Markov heads, SGLang's
    `dspark.py` DeepSpec's form alone, anchor-first, with any Markov head.
    """
    speculative = {"method": "dspark", "model": folder, "num_speculative_tokens": config.num_draft_tokens}
    commands = {
        "vLLM": f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(json.dumps(speculative))}",
        "SGLang": f"python -m sglang.launch_server --model-path {shlex.quote(target)} --speculative-algorithm DSPARK "
        f"--speculative-draft-model-path {shlex.quote(folder)} "
        f"--speculative-dspark-block-size {config.num_draft_tokens}",
    }
    refusals = {}
    if not config.markov_rank:
        refusals = dict.fromkeys(commands, "a draft without Markov head (DFlash) is no DSpark draft to it")
    elif config.markov_head_type != "vanilla":
        refusals["vLLM"] = f"it has no {config.markov_head_type} Markov heads, only vanilla ones"
    if config.sandwich_norms:
        refusals.setdefault("SGLang", "it has no Gemma4-style drafts")
    if format == "speculators":
        refusals.setdefault("SGLang", "it does not read speculators' form: export as deepspec")
    elif not config.sample_from_anchor:
        refusals.setdefault("SGLang", "it takes DeepSpec's form for anchor-first, and this draft is 1+N")
    return {name: line for name, line in commands.items() if name not in refusals}, refusals
