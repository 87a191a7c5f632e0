"""From a folder or hub id to one local folder, and from a folder to what its files say, without loading a weight."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from safetensors import SafetensorError, safe_open

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# What `hub.add_loader` writes into a config beside a file of that name, for `trust_remote_code=True`.
LOADER = "modeling_dspark.py"
AUTO_MAP = dict.fromkeys(("AutoModel", "AutoModelForCausalLM"), "modeling_dspark.DSparkForCausalLM")
MAX_HEADER = 2**23
GGUF = ".gguf"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class TensorInfo(NamedTuple):
    """Header entry of a stored tensor: `shape`, `dtype` as safetensors spells it ("BF16"), `file` it lies in."""

    shape: tuple[int, ...]
    dtype: str
    file: str


def resolve_folder(
    path_or_id: str | os.PathLike,
    *,
    weights: bool = True,
    revision: str | None = None,
    cache_dir: str | os.PathLike | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
    subfolder: str | None = None,
) -> Path:
    """The local folder of a checkpoint. A hub repository is downloaded, or found in the cache when offline.

    Args:
        path_or_id: an existing folder, used as it is, or a repository id.
        weights: also fetch the safetensors files; otherwise the json files alone.
        subfolder: folder inside it that holds the checkpoint.

    Raises:
        OSError: nothing is found under that name, or it cannot be reached.
        ValueError: a file instead of a folder.
    """
    name = os.fspath(path_or_id) if isinstance(path_or_id, (str, os.PathLike)) else ""
    if not name:
        raise ValueError(f"Give a folder or a repository id, got {path_or_id!r}.")
    if os.path.isfile(name):
        gguf = " GGUF files are not read: take the safetensors checkpoint it was made from." if GGUF in name else ""
        raise ValueError(f"{name} is a file. Give the folder that holds it and its config.json.{gguf}")
    prefix = f"{subfolder.strip('/')}/" if subfolder else ""
    if os.path.isdir(name):
        folder = Path(name)
    else:
        patterns = [prefix + pattern for pattern in ("*.json", "*.safetensors")[: 2 if weights else 1]]
        hub = {"revision": revision, "cache_dir": cache_dir, "token": token, "local_files_only": local_files_only}
        # A pattern's `*` crosses folders; files deeper than asked for belong to other formats.
        folder = _snapshot(
            name, allow_patterns=patterns, ignore_patterns=[prefix + "*/*"], force_download=force_download, **hub
        )
    if not (folder / prefix).is_dir():
        raise OSError(f"{name} has no folder {subfolder!r}.")
    offline = local_files_only or constants.HF_HUB_OFFLINE
    if weights and offline and not os.path.isdir(name) and not list((folder / prefix).glob("*.safetensors")):
        raise OSError(f"The cache holds no weights of {name}. Load it once while online.")
    return folder / prefix


def _snapshot(repo_id: str, **kwargs: Any) -> Path:
    try:
        return Path(snapshot_download(repo_id, **kwargs))
    except HFValidationError as error:
        raise OSError(f"{repo_id!r} is neither an existing folder nor a repository id.") from error
    except (HfHubHTTPError, OSError) as error:
        raise OSError(
            f"{repo_id!r} is not a local folder, and as a repository it could not be read: {error} "
            "Check the name, the revision, the access token, and whether this machine is online."
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder.

    Raises:
        ValueError: it is missing or not a JSON object.
    """
    if not (folder / "config.json").is_file():
        found = " It holds GGUF files, which are not read: take the safetensors checkpoint they were made from."
        gguf = found if any(GGUF in path.name for path in folder.iterdir()) else ""
        raise ValueError(f"{folder} has no config.json. Give the folder of a DSpark checkpoint.{gguf}")
    return _read_json(folder / "config.json")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}). Download it again.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, found {type(content).__name__}.")
    return content


def read_headers(folder: Path) -> dict[str, TensorInfo]:
    """Names, shapes and dtypes of all tensors of a folder, from the safetensors headers.

    Raises:
        ValueError: no safetensors, a damaged file, or an index that does not agree with its shards.
    """
    if (folder / WEIGHTS).is_file():
        return _read_header(folder / WEIGHTS)
    if not (folder / INDEX).is_file():
        raise ValueError(_no_weights(folder))
    index = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
        raise ValueError(f"{folder / INDEX} has no `weight_map` of tensor names to files. Download it again.")
    tensors: dict[str, TensorInfo] = {}
    for file in sorted(set(index.values())):
        if Path(file).name != file or not (folder / file).is_file():
            raise ValueError(f"{INDEX} names the shard {file!r}, which is not in {folder}. Download it again.")
        for name, info in _read_header(folder / file).items():
            if index.get(name) != file:
                raise ValueError(f"Tensor {name} is in {file}, but {INDEX} says {index.get(name)}. Download it again.")
            tensors[name] = info
    missing = sorted(index.keys() - tensors.keys())
    if missing:
        raise ValueError(f"{INDEX} names {listing(missing)}, which no shard holds. Download it again.")
    return tensors


def _read_header(path: Path) -> dict[str, TensorInfo]:
    with path.open("rb") as start:
        size = int.from_bytes(start.read(8), "little")
    # Within the file a claim is read as a whole by safetensors, which takes up to 100 MB.
    if MAX_HEADER < size < path.stat().st_size:
        raise ValueError(
            f"{path} claims a header of {size} bytes; those of drafts are small. It is damaged or made up."
        )
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {n: TensorInfo(tuple(s.get_shape()), s.get_dtype(), path.name) for n, s in slices.items()}
    except (SafetensorError, OSError) as error:
        with path.open("rb") as file:
            pointer = file.read(24) == b"version https://git-lfs."
        fix = "It is a git-lfs pointer: run `git lfs pull`" if pointer else "It is damaged or cut off: download again"
        raise ValueError(f"{path} is not a readable safetensors file ({error}). {fix}.") from error


def _no_weights(folder: Path) -> str:
    files = sorted(path.name for path in folder.iterdir())
    pickles = [file for file in files if file.endswith(PICKLES)]
    if pickles:
        return (
            f"{folder} holds only pickle files ({listing(pickles)}), which can run code and are never opened. Convert "
            "them: `safetensors.torch.save_file(torch.load(path, weights_only=True), 'model.safetensors')`."
        )
    if any(GGUF in file for file in files):
        return f"{folder} holds GGUF files. Use the safetensors checkpoint that they were made from."
    return f"{folder} has neither {WEIGHTS} nor {INDEX} (found: {listing(files) or 'nothing'})."


def file_sha256(path: str | os.PathLike) -> str:
    """SHA-256 of a file of any size, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def listing(names: list[str], limit: int = 8) -> str:
    """Names joined for an error message, long lists cut."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
