"""Chromium, and a page to look at. Tests that need what is missing are skipped."""

import copy
import shutil

import pytest
import torch

import tiny
from demo_page import Slow, chat_tokenizer, served


@pytest.fixture(scope="session")
def tiny_page():
    """(address, `Slow` of its target): rounds accept 4, 0, 2, 1, 3 drafts in turn, with confidence that differs."""
    target = copy.deepcopy(tiny.perm_target())
    pattern = [4, 0, 2, 1, 3] * 4  # 60 tokens: T-perm comes round after 62
    table = tiny.scripted_table(pattern, tiny.chain(tiny.tokenizer()("c").input_ids[-1], 1)[0])
    confidence = torch.linspace(-1.5, 3, tiny.V)
    draft = tiny.markov_draft(tiny.one_hot_table(table), confidence=confidence)
    slow = Slow(target)
    with served(target, draft, chat_tokenizer(), max_new_tokens=200, max_prompt_tokens=60) as address:
        yield address, slow


@pytest.fixture(scope="module")
def chromium():
    """The browser; it ends with the module, since an event loop runs in this thread as long as it does."""
    playwright = pytest.importorskip("playwright.sync_api")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium: install Debian's `chromium` package")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()
