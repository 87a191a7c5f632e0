"""`hf-dspark eval`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..evaluation import ChatFormat, Settings, dspark_methods, evaluate, load_prompt_sets, other_methods, plain_methods
from ..evaluation import plots as evaluation_plots
from ..modeling_dspark import DSparkForCausalLM
from . import console, eval_tables
from .models import Models, check_pair_arguments, load_models
from .options import Device, DType, JsonPath, ModelDType, Target

# What the paper's Table 1 fixes: sampling from the target's own distribution, whole blocks of 7, no scheduling.
TABLE1_SAMPLING = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
TABLE1_GAMMA = 7


class Protocol(StrEnum):
    """Values of `--protocol`."""

    table1 = "table1"


class Scheduler(StrEnum):
    """Values of `--scheduler`."""

    auto = "auto"


def eval(
    prompts: Annotated[
        list[Path], typer.Option(metavar="FILE", help="JSONL or parquet file of prompts; may be given several times.")
    ],
    target: Target = None,
    draft: Annotated[
        list[str] | None,
        typer.Option(
            help="Folder or hub id of a draft; further ones are compared with the first.",
            show_default="the embedded draft",
        ),
    ] = None,
    num_prompts: Annotated[int | None, typer.Option(help="Only the first so many of each file.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer; with --batch-size the length of all.")] = 256,
    protocol: Annotated[
        Protocol | None, typer.Option(help="The paper's: table1 is T = 1, γ = 7, no scheduling, macro mean over files.")
    ] = None,
    do_sample: Annotated[
        bool, typer.Option("--do-sample", help="Sample instead of taking the likeliest token.")
    ] = False,
    temperature: Annotated[float | None, typer.Option(help="With --do-sample.")] = None,
    top_p: Annotated[float | None, typer.Option(help="With --do-sample.")] = None,
    top_k: Annotated[int | None, typer.Option(help="With --do-sample.")] = None,
    num_assistant_tokens: Annotated[
        list[int] | None, typer.Option(help="Most drafts per round; several make a sweep. Unset, all γ.")
    ] = None,
    assistant_confidence_threshold: Annotated[
        list[float] | None, typer.Option(help="Cut blocks at the first confidence below this; several make a sweep.")
    ] = None,
    scheduler: Annotated[Scheduler | None, typer.Option(help="Adds a row with this scheduler.")] = None,
    batch_size: Annotated[
        list[int] | None, typer.Option(help="Throughput run with fixed length at this batch size; may be repeated.")
    ] = None,
    cache_implementation: Annotated[
        str | None, typer.Option(help="Of DSpark's calls: static is the fast path.")
    ] = None,
    compiled: Annotated[
        bool | None, typer.Option(help="Compare with compiled plain decoding; by default on CUDA.")
    ] = None,
    prompt_lookup_num_tokens: Annotated[int | None, typer.Option(help="Adds a row for prompt lookup.")] = None,
    assistant: Annotated[
        str | None, typer.Option(help="Adds a row for assisted decoding with this small model.")
    ] = None,
    chat_template: Annotated[
        bool | None, typer.Option(help="Use the chat template; by default if there is one.")
    ] = None,
    thinking: Annotated[bool | None, typer.Option(help="Thinking mode of the chat template.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random numbers.")] = 0,
    dtype: ModelDType = DType.auto,
    device_map: Device = "auto",
    plots: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Draw the report into this folder.")] = None,
    json: JsonPath = None,
) -> None:
    """Measure acceptance and speed of a pair on prompts, against plain decoding in the same run.

    With --json, an interrupted run goes on where it ended when the command is repeated.
    """
    sampling = check_sampling(do_sample, temperature=temperature, top_k=top_k, top_p=top_p)
    tokens, thresholds = list(num_assistant_tokens or []), list(assistant_confidence_threshold or [])
    if protocol is Protocol.table1:
        check_table1(sampling, tokens, thresholds, scheduler, batch_size)
        sampling, tokens = TABLE1_SAMPLING, [TABLE1_GAMMA]
    console.check_json_path(json)
    if plots is not None:
        evaluation_plots.check_available()
    texts = load_prompt_sets(prompts, limit=num_prompts)
    models, drafts = load_all(target, list(draft or []), dtype=dtype.value, device_map=device_map)
    methods = [
        *plain_methods(compiled=check_compiled(compiled, models.target)),
        *dspark_methods(
            drafts,
            num_assistant_tokens=tokens,
            assistant_confidence_threshold=thresholds,
            schedulers=(None,) if scheduler is None else (None, scheduler.value),
            cache_implementation=cache_implementation,
        ),
        *other_methods(
            prompt_lookup_num_tokens=prompt_lookup_num_tokens, assistant=load_assistant(assistant, models.target)
        ),
    ]
    report = evaluate(
        models.target,
        ChatFormat(models.tokenizer, chat_template=chat_template, thinking=thinking),
        methods,
        texts,
        Settings(max_new_tokens, sampling, seed),
        batch_sizes=batch_size or (),
        report_path=json,
        about={
            "protocol": protocol and protocol.value,
            "target": models.target_name,
            "drafts": {name: one.config.name_or_path for name, one in drafts.items()},
            "assistant": assistant,
        },
        progress=console.progress,
    )
    eval_tables.show(report)
    if plots is not None:
        for path in evaluation_plots.plot(report, plots):
            console.note(f"drawn: {path}")
    if report["outputs"] == "different":
        console.error("Texts of DSpark differ from plain decoding's by more than a near tie: see `differences`.")
        raise typer.Exit(1)


def check_sampling(do_sample: bool, **options: Any) -> dict[str, Any]:
    """The sampling options that were given.

    Raises:
        ValueError: names an option that would have no effect.
    """
    given = {name: value for name, value in options.items() if value is not None}
    for name in given:
        if not do_sample:
            raise ValueError(f"`--{name.replace('_', '-')}` has an effect on sampling only: add `--do-sample`.")
    return {"do_sample": do_sample, **given}


def check_table1(sampling: dict[str, Any], tokens: list[int], *others: Any) -> None:
    """Refuse options that the protocol fixes.

    Raises:
        ValueError: says what it fixes.
    """
    if len(sampling) > 1 or tokens not in ([], [TABLE1_GAMMA]) or any(others):
        raise ValueError(
            "`--protocol table1` is T = 1, γ = 7, one text at a time, no threshold and no scheduler: remove the "
            "options for sampling, drafts per round, threshold, scheduler and batch size."
        )


def check_compiled(compiled: bool | None, target: PreTrainedModel) -> bool:
    """Whether plain decoding is also run compiled; by default where transformers compiles.

    Raises:
        ValueError: it is asked for elsewhere.
    """
    on_cuda = target.device.type == "cuda"
    if compiled and not on_cuda:
        raise ValueError(f"`--compiled` needs CUDA, the target is on {target.device}.")
    return on_cuda if compiled is None else compiled


def load_assistant(name: str | None, target: PreTrainedModel) -> PreTrainedModel | None:
    if name is None:
        return None
    return AutoModelForCausalLM.from_pretrained(name, dtype=target.dtype).to(target.device).eval()


def load_all(
    target: str | None, drafts: list[str], *, dtype: str, device_map: str
) -> tuple[Models, dict[str, DSparkForCausalLM]]:
    """The target with its first draft, and all drafts by the names of their rows.

    Raises:
        ValueError: for a pair that cannot work together, or a draft given twice.
    """
    if len(set(drafts)) < len(drafts):
        raise ValueError(f"A `--draft` is given twice: {', '.join(drafts)}.")
    for one in drafts[1:]:
        check_pair_arguments(target, one)
    models = load_models(target, next(iter(drafts), None), dtype=dtype, device_map=device_map, plain=False)
    assert models.draft is not None
    loaded = {"dspark": models.draft}
    for path in drafts[1:]:
        one = DSparkForCausalLM.from_pretrained(path).eval()
        name = f"draft {Path(path).name}"
        one.to(device=models.target.device, dtype=models.target.dtype).attach_target(models.target)
        loaded[f"draft {path}" if name in loaded else name] = one
    return models, loaded
