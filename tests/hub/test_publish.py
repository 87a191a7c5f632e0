"""Uploads, against a stand-in of the hub's HTTP API on localhost."""

import json

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModel

import tiny
from hf_dspark import DSparkForCausalLM

FILES = {"README.md", "config.json", "model.safetensors", "modeling_dspark.py"}


@pytest.fixture
def draft():
    return tiny.random_draft()


def download(files, folder):
    """The files of a branch as a folder."""
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def test_push_to_hub_uploads_what_loads_again(hub, draft, tmp_path):
    info = draft.push_to_hub("user/draft", token="hf_secret", private=True, commit_message="First", tags=["tiny"])
    assert info.commit_url == f"{hub.url}/user/draft/commit/1"
    files = hub.repos["user/draft"]["main"]
    assert files.keys() == FILES and hub.private == {"user/draft": True}
    assert [commit["summary"] for commit in hub.commits] == ["First"] and "Bearer hf_secret" in hub.tokens
    loaded = AutoModel.from_pretrained(download(files, tmp_path / "copy"))
    assert type(loaded).__name__ == "Qwen3DSparkModel"
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), draft.parameters(), strict=True))
    card = ModelCard(files["README.md"].decode())
    assert card.data.library_name == "hf-dspark" and {"dspark", "tiny"} <= set(card.data.tags)
    assert 'AutoModel.from_pretrained("user/draft"' in card.text


def test_a_card_in_the_repository_stays(hub, draft):
    draft.push_to_hub("user/draft")
    hub.repos["user/draft"]["main"]["README.md"] = b"mine"
    draft.push_to_hub("user/draft")
    assert hub.repos["user/draft"]["main"]["README.md"] == b"mine" and len(hub.commits) == 2


def test_branches_and_pull_requests(hub, draft):
    draft.push_to_hub("user/draft", revision="try")
    assert not hub.repos["user/draft"]["main"] and hub.repos["user/draft"]["try"].keys() == FILES
    draft.push_to_hub("user/draft", create_pr=True)
    assert not hub.repos["user/draft"]["main"] and hub.repos["user/draft"]["refs/pr/1"].keys() == FILES


def test_saving_with_push_to_hub_uploads_what_was_saved(hub, draft, tmp_path):
    """The folder as written at the end, not as transformers had it in between; files of others stay at home."""
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "secrets.txt").write_text("private")
    draft.generation_config.num_assistant_tokens = 2
    draft.save_pretrained(folder, push_to_hub=True, repo_id="team/other", commit_message="Saved", token="hf_x")
    files = hub.repos["team/other"]["main"]
    assert files.keys() == FILES | {"generation_config.json"}
    config = json.loads(files["config.json"])
    assert config["model_type"] == "qwen3" and config["architectures"] == ["Qwen3DSparkModel"]
    assert config["auto_map"]["AutoModel"] == "modeling_dspark.DSparkForCausalLM"
    assert hub.commits[-1]["summary"] == "Saved"
    draft.save_pretrained(folder, push_to_hub=True)
    assert "user/draft" in hub.repos  # named like the folder


def test_weights_in_shards_are_complete(hub, draft, tmp_path):
    draft.push_to_hub("user/draft", max_shard_size="100KB")
    files = hub.repos["user/draft"]["main"]
    shards = {name for name in files if name.endswith(".safetensors")}
    assert len(shards) > 1 and set(json.loads(files["model.safetensors.index.json"])["weight_map"].values()) == shards
    loaded = DSparkForCausalLM.from_pretrained(download(files, tmp_path / "copy"))
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), draft.parameters(), strict=True))
