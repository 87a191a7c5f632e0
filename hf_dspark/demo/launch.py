"""`launch`: from a loaded pair to a running page."""

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_dspark import CostModel, DSparkForCausalLM

from .generation import Models
from .settings import Limits

FOLDER = Path(__file__).parent
# Fonts of the visitor's own machine: the page works without a network.
FONTS = ["system-ui", "Segoe UI", "Roboto", "Helvetica", "Arial", "sans-serif"]
MONOSPACED = ["ui-monospace", "Menlo", "Consolas", "DejaVu Sans Mono", "monospace"]


def launch(
    target: Any,
    draft: DSparkForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    *,
    title: str = "SmolLM2-135M-Instruct and its DSpark draft",
    calibration: str | Path | None = None,
    cost_model: str | Path | None = None,
    max_prompt_tokens: int = 2048,
    max_new_tokens: int = 512,
    server_name: str = "127.0.0.1",
    server_port: int | None = None,
    share: bool = False,
    **options: Any,
) -> Any:
    """Start the page; returns when it is stopped.

    Args:
        target, draft, tokenizer: the pair.
        title: what the pair is called on the page.
        calibration: a report that `hf-dspark calibrate --json` or `CalibrationReport.to_json` wrote, to be shown.
        cost_model: costs that `hf-dspark profile --json` wrote, for the scheduler `"measured"`.
        max_prompt_tokens, max_new_tokens: longest conversation and longest answer that a visitor may ask for.
        server_name, server_port: address to listen at; the first free port from 7860 on.
        share: make the page reachable through Gradio's public tunnel.
        options: of Gradio's `Blocks.launch`, such as `prevent_thread_lock`.

    Returns:
        Gradio's `Blocks`; its `close()` ends a page that was started with `prevent_thread_lock=True`.

    Raises:
        ValueError: Gradio is missing, the pair is swapped, or a file is not what it should be.
        OSError: a file that cannot be read, or a port that is taken.
    """
    limits = Limits(max_prompt_tokens, max_new_tokens)
    report = None if calibration is None else read_report(calibration)
    costs = None if cost_model is None else CostModel.from_json(cost_model)
    models = Models(target, draft, tokenizer, cost_model=costs, limits=limits)
    gradio = gradio_module()
    from .page import VISITORS, build

    page = build(models, title=title, calibration=report)
    page.queue(max_size=4 * VISITORS)
    page.launch(
        server_name=server_name,
        server_port=server_port,
        share=share,
        theme=gradio.themes.Default(font=FONTS, font_mono=MONOSPACED, primary_hue="indigo", neutral_hue="slate"),
        css=(FOLDER / "page.css").read_text(encoding="utf-8"),
        head=f"<script>{(FOLDER / 'page.js').read_text(encoding='utf-8')}</script>",
        footer_links=[],
        **options,
    )
    return page


def gradio_module() -> Any:
    """Gradio.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import gradio
    except ImportError as error:
        raise ValueError('The demo needs Gradio: pip install "hf-dspark[demo]".') from error
    return gradio


def read_report(path: str | Path) -> dict[str, Any]:
    """A calibration report.

    Raises:
        ValueError: the file is something else.
    """
    wanted = ("temperatures", "ece_before", "ece_after", "ece_by_position", "ece_by_position_before", "num_rounds")
    try:
        report = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"`calibration` must be a JSON file, {path} is not: {error}.") from error
    missing = [name for name in wanted if not isinstance(report, dict) or name not in report]
    if missing:
        raise ValueError(
            f"`calibration` must be a report of `hf-dspark calibrate --json`; {path} has no {', '.join(missing)}."
        )
    return report
