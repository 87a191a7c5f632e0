"""STREAM, library part: streamers see plain generate's sequence of calls; errors and cancelling get through.

The demo's part is in `tests/demo`, that of the command line in `tests/cli/test_demo.py` and `test_cli.py`.
"""

import threading

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer

import checks
import tiny

PROMPT = [7, 21, 40]
CHAIN = tiny.chain(40, 60)


def streamed(target, draft=None, **options):
    streamer = checks.ListStreamer()
    if draft is None:
        checks.plain(target, PROMPT, streamer=streamer, **options)
    else:
        checks.generate(target, draft, PROMPT, streamer=streamer, **options)
    return streamer


@pytest.mark.parametrize("drafts", ["full", "bad", "scripted"])
@pytest.mark.parametrize("options", [{}, {"max_new_tokens": 1}, {"eos_token_id": CHAIN[6]}, {"eos_token_id": CHAIN[0]}])
def test_one_put_a_token_as_in_plain_generate(drafts, options):
    draft = {"full": tiny.perm_draft, "bad": tiny.bad_draft}.get(
        drafts, lambda: tiny.scripted_draft([2, 0, 4], CHAIN[0])
    )()
    expected, found = streamed(tiny.perm_target(), **options), streamed(tiny.perm_target(), draft, **options)
    assert found.puts == expected.puts
    assert found.ends == expected.ends == 1


def test_nothing_behind_a_criterion_is_streamed():
    make = lambda: {"stopping_criteria": StoppingCriteriaList([checks.StopAt(3 + 4)])}  # noqa: E731
    expected = streamed(tiny.perm_target(), **make())
    found = streamed(tiny.perm_target(), tiny.perm_draft(gamma=7), **make())
    assert found.puts == expected.puts and len(found.puts) == 1 + 4


def test_text_streamer_in_a_thread():
    tokenizer = tiny.tokenizer()
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=10)
    options = {"max_new_tokens": 20, "do_sample": False, "assistant_model": tiny.perm_draft(), "streamer": streamer}
    thread = threading.Thread(target=tiny.perm_target().generate, args=(checks.tensor(PROMPT),), kwargs=options)
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == tokenizer.decode(CHAIN[:20])


class Failing(checks.ListStreamer):
    """A client that goes away after so many tokens."""

    def __init__(self, after):
        super().__init__()
        self.after = after

    def put(self, value):
        super().put(value)
        if len(self.puts) > self.after:
            raise BrokenPipeError("client went away")


@pytest.mark.parametrize("after", [1, 3, 5])
def test_stream_1_an_error_reaches_the_caller_and_the_next_request_works(after):
    target, draft, streamer = tiny.perm_target(), tiny.perm_draft(), Failing(after)
    with pytest.raises(BrokenPipeError):
        checks.generate(target, draft, PROMPT, streamer=streamer)
    assert [p[0] for p in streamer.puts[1:]] == CHAIN[:after]
    assert streamed(target, draft).puts == streamed(target).puts


def test_stream_1_a_bad_argument_fails_before_anything_is_streamed():
    streamer = checks.ListStreamer()
    with pytest.raises(ValueError, match="num_assistant_tokens"):
        checks.generate(tiny.perm_target(), tiny.perm_draft(), PROMPT, streamer=streamer, num_assistant_tokens=99)
    assert len(streamer.puts) <= 1, "generate() itself puts the prompt"


class Cancel(StoppingCriteria):
    """A stop button, pressed while token `at` is being looked at."""

    def __init__(self, at):
        self.at, self.event = at, threading.Event()

    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] == self.at:
            self.event.set()
        return torch.full((input_ids.shape[0],), self.event.is_set())


@pytest.mark.parametrize("at", [1, 4, 6])
def test_stream_3_cancelling_stops_at_once(at):
    target, draft = tiny.perm_target(), tiny.perm_draft()
    cancel = Cancel(3 + at)
    with checks.CallCounter(target) as calls:
        output, stats = checks.generate(
            target, draft, PROMPT, max_new_tokens=400, stopping_criteria=StoppingCriteriaList([cancel])
        )
    assert output[0].tolist() == PROMPT + CHAIN[:at]
    assert len(calls.shapes) == 1 + stats.num_rounds == 1 + -(-(at - 1) // 5)
    assert streamed(target, draft).puts == streamed(target).puts
