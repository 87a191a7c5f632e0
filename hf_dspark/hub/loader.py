"""The file that travels with a published draft."""

import json
import shutil
from pathlib import Path

from . import shim

LOADER = "modeling_dspark.py"
AUTO_CLASSES = ("AutoModel", "AutoModelForCausalLM")


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
    auto_map = {name: f"{Path(LOADER).stem}.DSparkForCausalLM" for name in AUTO_CLASSES}
    if config.get("auto_map") != auto_map:
        path.write_text(json.dumps(config | {"auto_map": auto_map}, indent=2) + "\n", encoding="utf-8")
