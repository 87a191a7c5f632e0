"""Model cards: metadata, usage, measured numbers and provenance of a draft, written from its files and from JSON."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

import hf_dspark

from .. import formats
from .._hub_files import file_sha256
from ..evaluation import plots
from . import results, tables
from .loader import add_loader
from .results import Evidence

CARD = "README.md"
TEMPLATE = Path(__file__).with_name("card.md")
TAGS = ("dspark", "speculative-decoding", "draft-model", "assisted-generation")
CALIBRATION_PLOT, RELIABILITY_PLOT = "calibration.png", "reliability.png"


def write_card(
    folder: str | Path,
    measurements: Iterable[str | Path] = (),
    *,
    target: str | None = None,
    repo_id: str | None = None,
    license: str | None = None,
    language: Sequence[str] = (),
    datasets: Sequence[str] = (),
    tags: Sequence[str] = (),
    notes: str | None = None,
) -> Path:
    """Make a draft's folder ready for the hub: write `README.md` with the pictures it shows, and the file that
    `trust_remote_code=True` looks for. Returns the path of the card.

    Args:
        folder: a draft that loads.
        measurements: JSON files, see `hf_dspark.hub.results.read`. Nothing else in the card is a number.
        target: hub id of the target, the card's `base_model`.
        repo_id: where the draft will be found; by default "path/to/<name of the folder>".
        license, language, datasets, tags: metadata of the hub.
        notes: Markdown that goes in as it is.

    Raises:
        ValueError: `folder` holds no draft, `target` is no hub id, a measurement is of no known kind, or there is
            something to draw and matplotlib is missing.
    """
    folder = Path(folder)
    if target is not None and (target.count("/") != 1 or Path(target).exists()):
        raise ValueError(f"`target` {target!r} must be the hub id of the target (user/name), as readers will find it.")
    name = repo_id.split("/")[-1] if repo_id else folder.resolve().name
    add_loader(folder)
    checkpoint = formats.open_checkpoint(folder)
    evidence = results.read(measurements)
    found = eval_results(evidence)
    data = ModelCardData(
        base_model=target,
        datasets=list(datasets) or None,
        eval_results=found or None,
        language=list(language) or None,
        library_name="hf-dspark",
        license=license,
        model_name=name if found else None,
        pipeline_tag="text-generation",
        tags=[*TAGS, *tags],
    )
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        name=name,
        repo_id=repo_id or f"path/to/{name}",
        gamma=checkpoint.config.num_draft_tokens,
        facts=tables.facts(checkpoint),
        has_loader="auto_map" in (checkpoint.config.foreign or {}),
        **measured_parts(evidence),
        **draw(evidence, folder),
        notes=notes and notes.strip(),
        version=hf_dspark.__version__,
        hashes=tables.table(["file", "SHA-256"], [*weight_hashes(folder).items(), *evidence.files.items()]),
        num_results=len(evidence.files),
    )
    path = folder / CARD
    path.write_text(str(card).rstrip() + "\n", encoding="utf-8")
    return path


def measured_parts(evidence: Evidence) -> dict[str, Any]:
    """What the template shows of measurements."""
    return {
        "reports": [tables.report(report) for report in evidence.reports],
        "acceptance": tables.acceptance(evidence.reports),
        "calibration": evidence.calibration and tables.calibration(evidence.calibration),
        "training": tables.training(evidence.training, evidence.texts),
    }


def eval_results(evidence: Evidence) -> list[EvalResult]:
    """τ of every prompt set, for the hub's `model-index`; other drafts that were measured beside it are left out."""
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=row.set,
            dataset_name=row.set,
            metric_type="mean_acceptance_length",
            metric_name=f"τ ({row.mode}, {report.dtype}, {row.method}, {row.prompts} prompts)",
            metric_value=round(row.tau, 2),
        )
        for report in evidence.reports
        for row in report.rows
        if row.tau is not None and row.prompts is not None and row.set != results.ALL_SETS and row.is_own
    ]


def draw(evidence: Evidence, folder: Path) -> dict[str, str | None]:
    """Draw what there is to draw into `folder`; names of the pictures for the template."""
    figures: dict[str, Any] = {}
    if evidence.calibration is not None or evidence.reliability is not None:
        plots.check_available()
    if evidence.calibration is not None:
        figures[CALIBRATION_PLOT] = plots.calibration(evidence.calibration)
    if evidence.reliability is not None:
        figures[RELIABILITY_PLOT] = plots.reliability(*evidence.reliability)
    for name, figure in figures.items():
        # Without the version of matplotlib, which would change the file at every update.
        figure.savefig(folder / name, dpi=120, metadata={"Software": None})
    named = {"calibration_plot": CALIBRATION_PLOT, "reliability_plot": RELIABILITY_PLOT}
    return {part: name if name in figures else None for part, name in named.items()}


def weight_hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every safetensors file."""
    return {path.name: file_sha256(path) for path in sorted(folder.glob("*.safetensors"))}
