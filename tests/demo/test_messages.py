"""STREAM-5: history and messages in every form a chat front end sends them."""

import pytest

from hf_dspark.demo.messages import conversation

PART = {"type": "text", "text": "b"}
TOLD = {
    "dicts": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    "lists of parts": [{"role": "user", "content": ["a"]}, {"role": "assistant", "content": [PART]}],
    "a dict as content": [{"role": "user", "content": {"text": "a"}}, {"role": "assistant", "content": PART}],
    "extra fields": [
        {"role": "user", "content": "a", "metadata": None, "options": None},
        {"role": "assistant", "content": "b", "metadata": {"title": "x"}},
    ],
    "pairs": [("a", "b")],
    "lists of two": [["a", "b"]],
    "a question without answer": [("a", "b"), {"role": "user", "content": "lost"}],
}


@pytest.mark.parametrize("history", TOLD.values(), ids=TOLD)
@pytest.mark.parametrize("message", ["c", ["c"], [{"type": "text", "text": "c"}], {"text": "c", "files": []}, " c\n"])
def test_forms_of_history_and_message(history, message):
    assert conversation(message, history) == ["a", "b", "c"]


@pytest.mark.parametrize("history", [None, [], ()])
def test_no_history(history):
    assert conversation("c", history) == ["c"]


def test_two_messages_of_one_side_are_one():
    history = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}, ("c", None)]
    assert conversation("d", history[:2] + [{"role": "assistant", "content": "c"}]) == ["a\nb", "c", "d"]


@pytest.mark.parametrize("message", [None, "", "  \n", [], {"text": ""}])
def test_nothing_to_answer(message):
    with pytest.raises(ValueError, match="Write a message"):
        conversation(message, [])


def test_what_is_not_text_is_refused_by_name():
    with pytest.raises(ValueError, match="text only"):
        conversation([{"type": "image", "path": "x.png"}])
