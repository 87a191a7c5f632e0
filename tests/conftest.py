"""Shared fixtures. Test helpers live beside this file and are imported as `tiny` and `oracle`."""

import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).resolve().parent
if str(TESTS) not in sys.path:  # so that helpers are found under every pytest import mode
    sys.path.insert(0, str(TESTS))

torch.set_num_threads(1)


def find_shared_folder() -> Path | None:
    """`../shared` beside the repository root, or None."""
    folder = TESTS.parent.parent / "shared"
    return folder if folder.is_dir() else None


@pytest.fixture(scope="session")
def shared_folder() -> Path:
    """Folder of reference data beside the repository; tests that need it are skipped without it."""
    folder = find_shared_folder()
    if folder is None:
        pytest.skip("no ../shared folder beside the repository")
    return folder


@pytest.fixture(autouse=True)
def seed():
    """Every test begins with the same random state."""
    torch.manual_seed(0)
