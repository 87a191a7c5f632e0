"""From a folder, or from a hub id through its cache, to headers: what is damaged, missing or unsafe is named."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_dspark import DSparkForCausalLM, _hub_files
from hf_dspark._hub_files import read_headers, resolve_folder
from hf_dspark.formats import open_checkpoint
from tiny import draft_config, draft_tensors, write_draft

REPO = "deepseek-ai/dspark_qwen3_8b_block7"
COMMIT = "03326e50" + "0" * 32


@pytest.fixture
def folder(tmp_path):
    config = draft_config()
    return write_draft(tmp_path / "draft", config, draft_tensors(config))


def shard(folder, parts=2):
    """Split model.safetensors of a folder into shards with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for i in range(parts):
        file = f"model-{i + 1:05}-of-{parts:05}.safetensors"
        part = dict(sorted(tensors.items())[i::parts])
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def write_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


# ---- headers


def test_headers_of_one_file_and_of_shards_are_the_same(folder):
    single = read_headers(folder)
    expected = load_file(folder / "model.safetensors")
    assert {name: info.shape for name, info in single.items()} == {n: tuple(t.shape) for n, t in expected.items()}
    assert {info.dtype for info in single.values()} == {"F32"}
    weight_map = shard(folder)
    sharded = read_headers(folder)
    assert {n: (i.shape, i.dtype) for n, i in sharded.items()} == {n: (i.shape, i.dtype) for n, i in single.items()}
    assert {name: info.file for name, info in sharded.items()} == weight_map
    loaded = DSparkForCausalLM.from_pretrained(folder)
    assert torch.equal(loaded.fc.weight, expected["fc.weight"])


def test_index_and_shards_must_agree(folder):
    weight_map = shard(folder)
    first, second = sorted(set(weight_map.values()))
    write_index(folder, weight_map | {"extra.weight": first})
    with pytest.raises(ValueError, match="extra.weight.*no shard holds"):
        open_checkpoint(folder)
    write_index(folder, {name: file for name, file in weight_map.items() if name != "fc.weight"})
    with pytest.raises(ValueError, match="fc.weight is in .*says None"):
        open_checkpoint(folder)
    write_index(folder, weight_map | {"fc.weight": first if weight_map["fc.weight"] == second else second})
    with pytest.raises(ValueError, match="fc.weight"):
        open_checkpoint(folder)
    write_index(folder, weight_map | {"fc.weight": "../draft/" + first})
    with pytest.raises(ValueError, match="'../draft/model-00001.*not in"):
        open_checkpoint(folder)
    write_index(folder, ["not", "a", "map"])
    with pytest.raises(ValueError, match="weight_map"):
        open_checkpoint(folder)
    write_index(folder, weight_map)
    (folder / second).unlink()
    with pytest.raises(ValueError, match=f"{second}.*Download it again"):
        open_checkpoint(folder)


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1])
def test_a_file_that_is_cut_off_is_named_with_the_fix(folder, keep):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match="model.safetensors is not a readable.*download again"):
        DSparkForCausalLM.from_pretrained(folder)


GARBAGE = [b"\xff" * 200, (10**15).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little") + b"[]"]


@pytest.mark.parametrize("content", GARBAGE, ids=["noise", "huge", "list"])
def test_a_header_that_is_garbage(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="download again"):
        open_checkpoint(folder)


def test_a_bogus_header_of_100_mb_is_refused_before_it_is_read(folder):
    """In a process of its own, whose largest size shows what was read."""
    path = folder / "model.safetensors"
    with path.open("wb") as file:
        file.write((99_000_000).to_bytes(8, "little") + b'{"a":' + b" " * 100)
        file.truncate(100_000_100)
    script = (
        "import resource, sys\n"
        "from hf_dspark._hub_files import read_headers\n"
        "from pathlib import Path\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak()\n"
        f"try: read_headers(Path({str(folder)!r}))\n"
        "except ValueError as error: print(error)\n"
        "print(peak() - before)\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    message, grown = run.stdout.strip().rsplit("\n", 1)
    assert "claims a header of 99000000 bytes" in message and int(grown) < 10_000, run.stdout + run.stderr


def test_a_damaged_shard_is_named(folder):
    file = sorted(set(shard(folder).values()))[1]
    (folder / file).write_bytes((folder / file).read_bytes()[:-10])
    with pytest.raises(ValueError, match=f"{file}.*download again"):
        open_checkpoint(folder)


def test_a_git_lfs_pointer_says_so(folder):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (folder / "model.safetensors").write_bytes(pointer)
    with pytest.raises(ValueError, match="git lfs pull"):
        open_checkpoint(folder)


# ---- config.json and weights that are not there


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "not valid JSON"), ("[1]", "JSON object"), ("\udcff", "not valid JSON"), ("[" * 100000, "not valid JSON")],
)  # fmt: skip
def test_a_config_that_cannot_be_read(folder, content, message):
    (folder / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=f"config.json.*{message}"):
        open_checkpoint(folder)


def test_missing_config_and_missing_weights(folder, tmp_path):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"neither model.safetensors nor .*found: config.json"):
        open_checkpoint(folder)
    (folder / "draft.gguf").write_bytes(b"")
    with pytest.raises(ValueError, match="GGUF"):
        open_checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match="no config.json"):
        open_checkpoint(folder)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt"])
def test_pickle_files_are_never_opened(folder, file):
    (folder / "model.safetensors").unlink()
    (folder / file).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(ValueError, match=f"{file}.*never opened.*save_file"):
        DSparkForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("path", ["", None, 5])
def test_a_path_that_is_none(path):
    with pytest.raises(ValueError, match="folder or a repository id"):
        resolve_folder(path)


def test_a_file_instead_of_its_folder(folder):
    with pytest.raises(ValueError, match="is a file"):
        open_checkpoint(folder / "model.safetensors")


@pytest.mark.parametrize("path", ["/no/such/folder", "./no_such_folder", "a/b/c", "spaces in name/x"])
def test_a_path_that_does_not_exist_is_an_os_error(path):
    with pytest.raises(OSError, match="neither an existing folder nor a repository id"):
        DSparkForCausalLM.from_pretrained(path)


def test_subfolder_of_a_local_folder(folder):
    shutil.copytree(folder, folder / "inner")
    (folder / "config.json").unlink()
    assert open_checkpoint(folder, subfolder="inner").folder.name == "inner"
    assert DSparkForCausalLM.from_pretrained(folder, subfolder="inner/").config.block_size == 4
    with pytest.raises(OSError, match="no folder 'other'"):
        open_checkpoint(folder, subfolder="other")


# ---- the hub's cache


def published_config():
    """config.json of the published 8B draft with the widths of a tiny one."""
    tiny = draft_config(gamma=7, layers=5, taps=[1, 9, 17, 25, 33], rank=8)
    return tiny | {
        "attention_dropout": 0.0, "bos_token_id": None, "eos_token_id": 62, "num_anchors": 512, "num_target_layers": 36,
        "max_window_layers": 28, "sliding_window": None, "use_sliding_window": False, "use_cache": True,
        "rope_theta": 1000000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "dtype": "bfloat16", "transformers_version": "5.10.2", "initializer_range": 0.02, "rope_scaling": None,
    }  # fmt: skip


def fill_cache(cache: Path, *, subfolder: str = "", weights: bool = True) -> Path:
    """Lay the draft out as the hub's cache keeps it, blobs and links included; returns the snapshot."""
    repo = cache / "models--deepseek-ai--dspark_qwen3_8b_block7"
    snapshot = repo / "snapshots" / COMMIT
    config = published_config()
    tensors = {name: tensor.bfloat16() for name, tensor in draft_tensors(config).items()}
    source = write_draft(cache / "source", config, tensors)
    for path in [repo / "refs", repo / "blobs", snapshot / subfolder]:
        path.mkdir(parents=True, exist_ok=True)
    (repo / "refs" / "main").write_text(COMMIT)
    for i, file in enumerate(["config.json", "model.safetensors"][: 2 if weights else 1]):
        shutil.move(source / file, repo / "blobs" / str(i))
        target = os.path.relpath(repo / "blobs" / str(i), (snapshot / subfolder))
        (snapshot / subfolder / file).symlink_to(target)
    shutil.rmtree(source)
    return snapshot


def test_the_published_id_loads_offline_through_the_auto_classes(tmp_path):
    fill_cache(tmp_path / "hub")
    script = f"""
import hf_dspark
from transformers import AutoModel, AutoModelForCausalLM
for auto in (AutoModel, AutoModelForCausalLM):
    draft = auto.from_pretrained({REPO!r})
    assert isinstance(draft, hf_dspark.DSparkForCausalLM), type(draft)
    assert draft.config.num_draft_tokens == 7 and draft.config.target_layer_ids == [1, 9, 17, 25, 33]
    assert str(draft.dtype) == "torch.bfloat16"
assert hf_dspark.DSparkForCausalLM.from_pretrained({REPO!r}, revision="main").config.markov_rank == 8
try:
    hf_dspark.DSparkForCausalLM.from_pretrained("deepseek-ai/dspark_qwen3_4b_block7")
except OSError as error:
    print(error)
"""
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "dspark_qwen3_4b_block7" in run.stdout and "online" in run.stdout


def test_cache_dir_revision_and_subfolder(tmp_path):
    snapshot = fill_cache(tmp_path, subfolder="dspark")
    found = open_checkpoint(REPO, cache_dir=tmp_path, local_files_only=True, subfolder="dspark")
    assert found.folder == snapshot / "dspark"
    found = open_checkpoint(REPO, cache_dir=tmp_path, local_files_only=True, subfolder="dspark", revision=COMMIT)
    assert found.config.num_draft_tokens == 7
    with pytest.raises(OSError, match="online"):
        open_checkpoint(REPO, cache_dir=tmp_path, local_files_only=True, revision="other")
    with pytest.raises(OSError, match="no folder 'none'"):
        open_checkpoint(REPO, cache_dir=tmp_path, local_files_only=True, subfolder="none")


def test_a_cache_without_the_weights_says_to_go_online(tmp_path):
    fill_cache(tmp_path, weights=False)
    with pytest.raises(OSError, match="no weights.*online"):
        open_checkpoint(REPO, cache_dir=tmp_path, local_files_only=True)


def test_the_config_is_judged_before_weights_are_downloaded(tmp_path, monkeypatch):
    """An ordinary model of hundreds of gigabytes must not be downloaded to be refused."""
    calls = []
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}))

    def download(repo_id, **kwargs):
        calls.append(kwargs["allow_patterns"])
        return str(tmp_path)

    monkeypatch.setattr(_hub_files, "snapshot_download", download)
    with pytest.raises(ValueError, match="not a DSpark draft"):
        open_checkpoint("Qwen/Qwen3-235B-A22B", subfolder=None)
    assert calls == [["*.json"]]
    (tmp_path / "config.json").write_text(json.dumps(draft_config()))
    with pytest.raises(ValueError, match="neither model.safetensors"):
        open_checkpoint(REPO, token="t")
    assert calls[1:] == [["*.json"], ["*.json", "*.safetensors"]]


def test_hub_patterns_leave_deeper_folders_alone(tmp_path, monkeypatch):
    """What the hub's own filter makes of the patterns that are passed to it."""
    names = ["config.json", "model.safetensors", "o/model.safetensors", "a.py", "m.bin", "d/config.json", "d/e/x.json"]
    wanted = {None: ["config.json", "model.safetensors"], "d": ["d/config.json"]}
    for subfolder, expected in wanted.items():
        seen = {}

        def download(repo_id, seen=seen, **kwargs):
            seen.update(kwargs)
            return str(tmp_path)

        monkeypatch.setattr(_hub_files, "snapshot_download", download)
        (tmp_path / "d").mkdir(exist_ok=True)
        resolve_folder(REPO, subfolder=subfolder)
        kept = huggingface_hub.utils.filter_repo_objects(
            names, allow_patterns=seen["allow_patterns"], ignore_patterns=seen["ignore_patterns"]
        )
        assert list(kept) == expected
