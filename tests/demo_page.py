"""The demo's page on tiny models, in this process."""

import copy
import time
from contextlib import contextmanager

import pytest

import tiny


def chat_tokenizer():
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return tokenizer


@contextmanager
def served(target, draft, tokenizer, **options):
    """The address of a page in this process."""
    pytest.importorskip("gradio")
    from hf_dspark.demo import launch

    page = launch(target, draft, tokenizer, prevent_thread_lock=True, quiet=True, **options)
    try:
        yield page.local_url
    finally:
        page.close()


class Slow:
    """Makes a target take a while for each forward, or fail, as a test likes."""

    def __init__(self, target):
        self.target, self.seconds, self.forwards, self.error = target, 0.0, 0, None
        self._original = target.forward
        target.forward = self

    def __call__(self, *args, **kwargs):
        self.forwards += 1
        time.sleep(self.seconds)
        if self.error and self.forwards > 4:
            raise self.error
        return self._original(*args, **kwargs)
