"""The upload of a draft's folder to the hub."""

from pathlib import Path

from huggingface_hub import CommitInfo, HfApi

from .._hub_files import LOADER
from .card import CARD, write_card
from .loader import add_loader

# What belongs to a draft; a folder may hold more than that.
FILES = ("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json", "*.png")


def push(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    commit_description: str | None = None,
    tags: list[str] | None = None,
) -> CommitInfo:
    """Upload a draft's folder to the hub: its config, weights and loader, and its card.

    A card in the folder is uploaded; without one, a card in the repository stays, and a new repository gets one without
    numbers. Arguments are those of transformers' `push_to_hub`.

    Raises:
        HfHubHTTPError: the hub refuses (no token, no permission, ...).
        ValueError: the folder holds no draft.
    """
    api = HfApi(token=token, library_name="hf-dspark")
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None and not revision.startswith("refs/pr"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    add_loader(folder)
    if not Path(folder, CARD).exists() and not api.file_exists(repo_id, CARD, revision=revision):
        write_card(folder, repo_id=repo_id, tags=tags or ())
    return api.upload_folder(
        repo_id=repo_id,
        folder_path=folder,
        allow_patterns=[*FILES, CARD, LOADER],
        commit_message=commit_message or "Upload DSpark draft",
        commit_description=commit_description,
        revision=revision,
        create_pr=create_pr,
    )
