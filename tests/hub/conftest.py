"""Fixtures of the tests of hf_dspark.hub."""

import sys
from pathlib import Path

import pytest

HERE = str(Path(__file__).resolve().parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)


@pytest.fixture
def hub(monkeypatch):
    """A hub on localhost in the place of huggingface.co, for everything that this test does."""
    import hub_server
    from huggingface_hub import constants

    with hub_server.serving() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield server
