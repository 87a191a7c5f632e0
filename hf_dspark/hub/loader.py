"""The file that travels with a published draft."""

import json
import shutil
from pathlib import Path

from .._hub_files import AUTO_MAP, LOADER
from . import shim


def add_loader(folder: str | Path) -> None:
    """Put the file beside a draft that lets `AutoModel.from_pretrained(..., trust_remote_code=True)` find this package.

    A config without `model_type` (speculators) is left alone: transformers opens such a folder only after an import of
    this package.
    """
    path = Path(folder, "config.json")
    config = json.loads(path.read_text(encoding="utf-8"))
    if "model_type" not in config:
        return
    shutil.copyfile(str(shim.__file__), Path(folder, LOADER))
    # Models only: with a config class too, servers that trust remote code would need this package.
    if config.get("auto_map") != AUTO_MAP:
        path.write_text(json.dumps(config | {"auto_map": AUTO_MAP}, indent=2) + "\n", encoding="utf-8")
