"""`evaluate`: from prompts to a report."""

import hashlib
import json
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.utils import logging

import hf_dspark

from .chat import ChatFormat
from .methods import Method
from .prompts import Prompt
from .records import Records
from .report import quality_report, throughput_report
from .runner import Runner, Settings, plan_batches, plan_prompts

Progress = Callable[[Iterable[Any], int], Iterable[Any]]


def evaluate(
    target: PreTrainedModel,
    chat: ChatFormat,
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    settings: Settings,
    *,
    batch_sizes: Sequence[int] = (),
    report_path: Path | None = None,
    about: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Play prompts with every method and report what happened.

    Without `batch_sizes`, each prompt is played alone with all its turns. With them it is a throughput run: batches of
    first turns whose answers all have `max_new_tokens` tokens, whatever would end them.

    Args:
        target: the target model.
        chat: how conversations are written for it.
        methods: from `plain_methods`, `dspark_methods` and `other_methods`. Identity and speed-ups need "plain".
        prompts: from `load_prompts` or `load_prompt_sets`.
        settings: shared by the methods.
        report_path: where the report will be written. Finished prompts are kept in a file beside it: an interrupted run
            goes on there, and a finished one leaves every round in `<report>.records.jsonl`.
        about: what else the result depends on (names of models, ...), JSON values; part of the report.
        progress: wraps an iterable of known length, by default a tqdm bar.

    Returns:
        The report as plain Python values; with `report_path` it is there already.

    Raises:
        ValueError: no prompts, a prompt that is too long, options that the models refuse, or an interrupted run with
            other settings beside `report_path`.
    """
    units = plan_batches(prompts, batch_sizes) if batch_sizes else plan_prompts(prompts)
    runner = Runner(target, chat, methods, settings)
    runner.check_lengths(units)
    head = (about or {}) | measurement(target, chat, methods, prompts, settings, batch_sizes)
    records = Records(report_path, head)
    progress = progress or _tqdm
    measured = list(progress(runner.run(units, records), len(units)))
    if batch_sizes:
        report = head | throughput_report(measured, methods, str(target.dtype))
    else:
        report = head | quality_report(measured, prompts, methods, str(target.dtype))
    if report_path is not None:
        text = json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False)
        report_path.write_text(text + "\n", encoding="utf-8")
    records.finish()
    return report


def _tqdm(iterable: Iterable[Any], total: int) -> Iterable[Any]:
    return logging.tqdm(iterable, total=total)


def measurement(
    target: PreTrainedModel,
    chat: ChatFormat,
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    settings: Settings,
    batch_sizes: Sequence[int],
) -> dict[str, Any]:
    """What the numbers depend on: the head of a report, and what an interrupted run must share to be continued."""
    on_gpu = target.device.type == "cuda"
    texts = json.dumps([[prompt.name, prompt.turns] for prompt in prompts]).encode()
    temperatures = {m.name: m.draft.config.confidence_temperatures for m in methods if m.draft is not None}
    return {
        "methods": {method.name: method.describe() for method in methods},
        "settings": asdict(settings),
        "batch_sizes": list(batch_sizes),
        "template": str(chat),
        "dtype": str(target.dtype),
        "device": torch.cuda.get_device_name(target.device) if on_gpu else str(target.device),
        "threads": torch.get_num_threads(),
        "attention": target.config._attn_implementation,
        "confidence_temperatures": temperatures,
        "prompts_sha256": hashlib.sha256(texts).hexdigest(),
        "versions": {
            "hf_dspark": hf_dspark.__version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
