"""`hf-dspark generate`."""

import sys
import time
from typing import Annotated, Any

import typer
from transformers import TextStreamer, set_seed

from ..generation.record import SpeculationStats, record
from ..session import Session
from . import console
from .models import Models, load_models
from .options import Device, Draft, DType, JsonPath, ModelDType, Target


def generate(
    prompt: Annotated[str | None, typer.Argument(help="What to ask; with --chat the first question.")] = None,
    target: Target = None,
    draft: Draft = None,
    chat: Annotated[bool, typer.Option("--chat", help="Go on asking; an empty line or Ctrl-D ends.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Generate without a draft, for comparison.")] = False,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 256,
    do_sample: Annotated[
        bool, typer.Option("--do-sample", help="Sample instead of taking the likeliest token.")
    ] = False,
    temperature: Annotated[float | None, typer.Option(help="With --do-sample.")] = None,
    top_p: Annotated[float | None, typer.Option(help="With --do-sample.")] = None,
    top_k: Annotated[int | None, typer.Option(help="With --do-sample.")] = None,
    num_assistant_tokens: Annotated[int | None, typer.Option(help="Most drafts per round; unset, all γ.")] = None,
    assistant_confidence_threshold: Annotated[
        float | None, typer.Option(help="Cut a block at the first draft whose confidence is below this, 0 to 1.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the random numbers.")] = None,
    dtype: ModelDType = DType.auto,
    device_map: Device = "auto",
    stream: Annotated[bool | None, typer.Option(help="Show the text as it comes; by default on a terminal.")] = None,
    json: JsonPath = None,
) -> None:
    """Answer a prompt, or chat, with a target and its draft. The text is the one that the target writes alone."""
    options = {
        "max_new_tokens": max_new_tokens,
        "do_sample": do_sample,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "num_assistant_tokens": num_assistant_tokens,
        "assistant_confidence_threshold": assistant_confidence_threshold,
    }
    options = {name: value for name, value in options.items() if value is not None}
    check_usage(prompt, chat, plain, options)
    console.check_json_path(json)
    models = load_models(target, draft, dtype=dtype.value, device_map=device_map, plain=plain)
    if seed is not None:
        set_seed(seed)
    streaming = sys.stdout.isatty() if stream is None else stream
    session = Session(models.target, models.draft)
    if chat:
        result = {"turns": converse(models, session, prompt, system, options, streaming)}
    else:
        result = answer(models, session, conversation(system, prompt), options, streaming)
    settings = {
        "target": models.target_name,
        "draft": models.draft_name,
        "dtype": str(models.target.dtype),
        "seed": seed,
    }
    console.write_json(json, result | settings | {"options": options})


def check_usage(prompt: str | None, chat: bool, plain: bool, options: dict[str, Any]) -> None:
    """Refuse options that would have no effect.

    Raises:
        ValueError: names the option and what it needs.
    """
    if not prompt and not chat:
        raise ValueError('Give a prompt (hf-dspark generate "What is 3 + 4?") or `--chat`.')
    for name in ("temperature", "top_p", "top_k"):
        if name in options and not options["do_sample"]:
            raise ValueError(f"`--{name.replace('_', '-')}` has an effect on sampling only: add `--do-sample`.")
    for name in ("num_assistant_tokens", "assistant_confidence_threshold"):
        if name in options and plain:
            raise ValueError(f"`--{name.replace('_', '-')}` is about drafts: remove it, or `--plain`.")


def conversation(system: str | None, prompt: str | None = None) -> list[dict[str, str]]:
    texts = {"system": system, "user": prompt}
    return [{"role": role, "content": text} for role, text in texts.items() if text is not None]


def converse(
    models: Models,
    session: Session,
    prompt: str | None,
    system: str | None,
    options: dict[str, Any],
    streaming: bool,
) -> list[dict[str, Any]]:
    """Read questions and answer them until the input ends; Ctrl-C gives up an answer and asks for the next question."""
    messages, turns = conversation(system), []
    while prompt := prompt or _read_question():
        messages.append({"role": "user", "content": prompt})
        prompt = None
        try:
            turns.append(answer(models, session, messages, options, streaming))
            messages.append({"role": "assistant", "content": turns[-1]["text"]})
        except KeyboardInterrupt:
            messages.pop()
            console.note("stopped; that question is forgotten")
    return turns


def _read_question() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None


def answer(
    models: Models, session: Session, messages: list[dict[str, str]], options: dict[str, Any], streaming: bool
) -> dict[str, Any]:
    """Generate the next message, print it, and return what happened as plain Python values."""
    inputs = encode(models, messages)
    streamer = TextStreamer(models.tokenizer, skip_prompt=True, skip_special_tokens=True) if streaming else None
    start = time.perf_counter()
    with record() as stats:
        output = session.generate(**inputs, **options, streamer=streamer)
    seconds = time.perf_counter() - start
    ids = output[0, inputs["input_ids"].shape[1] :].tolist()
    text = models.tokenizer.decode(ids, skip_special_tokens=True)
    if not streaming:
        console.out.print(text, markup=False)
    console.note(summary(len(ids), seconds, stats if models.draft else None))
    return {
        "prompt": messages[-1]["content"],
        "text": text,
        "ids": ids,
        "seconds": seconds,
        "tokens_per_second": len(ids) / seconds,
        "statistics": stats.to_dict() if models.draft else None,
    }


def encode(models: Models, messages: list[dict[str, str]]) -> Any:
    """The messages in the model's chat template; a model without one gets a single prompt as it is.

    Raises:
        ValueError: more than a prompt for a model without chat template.
    """
    tokenizer = models.tokenizer
    if tokenizer.chat_template is not None:
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    elif len(messages) == 1 and messages[0]["role"] == "user":
        inputs = tokenizer(messages[0]["content"], return_tensors="pt")
    else:
        raise ValueError(
            f"{models.target_name} has no chat template: give one prompt, without `--system` and `--chat`."
        )
    return inputs.to(models.target.device)


def summary(num_tokens: int, seconds: float, stats: SpeculationStats | None) -> str:
    """One line about a run; with a draft also τ, and why drafts were not used where they were not."""
    line = f"{num_tokens} tokens, {num_tokens / seconds:.1f} tokens/s"
    if stats is None:
        return f"{line}, without draft"
    line += f", τ {stats.mean_acceptance_length:.2f} over {stats.num_rounds} rounds"
    return line if stats.path != "target_only" else f"{line} (no drafts used: {stats.reason})"
