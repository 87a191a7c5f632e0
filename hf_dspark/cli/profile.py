"""`hf-dspark profile`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from ..scheduling.cost_model import CostModel
from . import console
from .models import load_models
from .options import Device, Draft, DType, JsonPath, ModelDType, Target


def profile(
    target: Target = None,
    draft: Draft = None,
    batch_size: Annotated[
        list[int] | None, typer.Option(help="Rows to measure; may be repeated.", show_default="1")
    ] = None,
    context_length: Annotated[int, typer.Option(help="Tokens in the caches of every row.")] = 1024,
    plot: Annotated[Path | None, typer.Option(metavar="PATH", help="Draw the costs (png, svg, pdf).")] = None,
    dtype: ModelDType = DType.auto,
    device_map: Device = "auto",
    json: JsonPath = None,
) -> None:
    """Measure what a round costs on this machine; `CostModel.from_json` reads the file for `PrefixScheduler`."""
    console.check_json_path(json)
    models = load_models(target, draft, dtype=dtype.value, device_map=device_map, plain=False)
    costs = CostModel.profile(models.target, models.draft, batch_sizes=batch_size or [1], context_length=context_length)
    tables = {"tokens verified": costs.verify_ms, "rows drafted": costs.draft_ms, "rows on the host": costs.host_ms}
    for title, table in tables.items():
        shown = Table(title_justify="left", box=None)
        shown.add_column(title, justify="right")
        shown.add_column("ms", justify="right")
        for size, milliseconds in table.items():
            shown.add_row(str(size), f"{milliseconds:.3f}")
        console.out.print(shown)
    if plot is not None:
        costs.plot(plot)
        console.note(f"drawn: {plot}")
    if json is not None:
        costs.to_json(json)
