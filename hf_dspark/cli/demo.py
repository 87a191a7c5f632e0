"""`hf-dspark demo`."""

from pathlib import Path
from typing import Annotated, cast

import typer

from ..demo.launch import gradio_module, launch, read_report
from ..demo.settings import Limits
from ..modeling_dspark import DSparkForCausalLM
from .models import check_pair_arguments, load_models
from .options import Device, Draft, DType, ModelDType, Target


def demo(
    target: Target = None,
    draft: Draft = None,
    dtype: ModelDType = DType.auto,
    device_map: Device = "auto",
    calibration: Annotated[
        Path | None, typer.Option(help="Show this report of `hf-dspark calibrate --json`.", metavar="PATH")
    ] = None,
    cost_model: Annotated[
        Path | None, typer.Option(help="Costs of `hf-dspark profile --json`, for a scheduler.", metavar="PATH")
    ] = None,
    max_prompt_tokens: Annotated[int, typer.Option(help="Longest conversation, in tokens.")] = 2048,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer that a visitor may ask for.")] = 512,
    server_name: Annotated[
        str, typer.Option(help="Address to listen at; 0.0.0.0 for the whole network.")
    ] = "127.0.0.1",
    server_port: Annotated[
        int | None, typer.Option(help="Port to listen at.", show_default="the first free one from 7860 on")
    ] = None,
    share: Annotated[bool, typer.Option("--share", help="Make a public link through Gradio's servers.")] = False,
    inbrowser: Annotated[bool, typer.Option("--inbrowser", help="Open the page in a browser.")] = False,
) -> None:
    """Chat in the browser and see where every token came from."""
    # Whatever is wrong with the arguments shows before a model is loaded.
    gradio_module()
    Limits(max_prompt_tokens, max_new_tokens)
    check_pair_arguments(target, draft)
    if calibration is not None:
        read_report(calibration)
    models = load_models(target, draft, dtype=dtype.value, device_map=device_map, plain=False)
    own = (
        {"title": f"{Path(models.target_name).name} and {Path(models.draft_name or '').name}"}
        if target or draft
        else {}
    )
    launch(
        models.target,
        cast(DSparkForCausalLM, models.draft),
        models.tokenizer,
        calibration=calibration,
        cost_model=cost_model,
        max_prompt_tokens=max_prompt_tokens,
        max_new_tokens=max_new_tokens,
        server_name=server_name,
        server_port=server_port,
        share=share,
        inbrowser=inbrowser,
        **own,
    )
