"""Write the model card of the embedded draft from its weights, its notes and the JSON files of this folder.

    python benchmarks/write_card.py            # rewrite
    python benchmarks/write_card.py --check    # exit code 1 if it is not up to date

The notes are `model_cards/<draft>.notes.md`; numbers of new kinds of files are added to `MEASUREMENTS`.
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from hf_dspark.default_pair import DRAFT_NAME
from hf_dspark.hub import write_card

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "model_cards" / DRAFT_NAME
# Those that exist are shown, in this order.
MEASUREMENTS = ("embedded_draft", "cpu_smollm2", "h200_smollm2", "calibrate_smollm2", "train_smollm2")


def write(folder: Path) -> Path:
    files = [ROOT / "benchmarks" / f"{name}.json" for name in MEASUREMENTS]
    return write_card(
        folder,
        [path for path in files if path.exists()],
        target="HuggingFaceTB/SmolLM2-135M-Instruct",
        license="apache-2.0",
        language=["en"],
        notes=FOLDER.with_suffix(".notes.md").read_text(encoding="utf-8"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        print(write(FOLDER))
        return
    with tempfile.TemporaryDirectory() as temporary:
        copy = shutil.copytree(FOLDER, Path(temporary) / DRAFT_NAME)
        write(copy)
        stale = sorted(path.name for path in copy.iterdir() if not up_to_date(path, FOLDER / path.name))
    sys.exit(f"Run `python benchmarks/write_card.py`: {stale}" if stale else 0)


def up_to_date(new: Path, committed: Path) -> bool:
    """Pictures only have to exist: their bytes depend on the version of matplotlib."""
    return committed.exists() and (new.suffix == ".png" or new.read_bytes() == committed.read_bytes())


if __name__ == "__main__":
    main()
