"""Conversations in the forms that chat front ends send them, as the list of texts that `ChatFormat.encode` takes."""

from collections.abc import Sequence
from typing import Any


def conversation(message: Any, history: Sequence[Any] | None = None) -> list[str]:
    """User, assistant, user ... texts that end with `message`.

    Args:
        message: a text, a list of parts (`{"type": "text", "text": ...}` or texts), `{"text": ...}`, or `None`.
        history: earlier messages, as `{"role", "content"}` dicts or as (user, assistant) pairs.

    Raises:
        ValueError: nothing to answer, or a part that is not text.
    """
    texts: list[str] = []
    for entry in history or ():
        if isinstance(entry, dict):
            text, is_user = text_of(entry.get("content")), entry.get("role") == "user"
            if is_user == (len(texts) % 2 == 0):
                texts.append(text)
            elif texts:  # two messages of one side in a row
                texts[-1] += "\n" + text
        else:
            texts += [text_of(part) for part in entry]
    texts = texts[: len(texts) // 2 * 2]  # a question that was never answered
    text = text_of(message).strip()
    if not text:
        raise ValueError("Write a message first.")
    return [*texts, text]


def text_of(content: Any) -> str:
    """The text of a message's content.

    Raises:
        ValueError: a part that is not text.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, (list, tuple)):
        return "".join(text_of(part) for part in content)
    if isinstance(content, dict) and isinstance(content.get("text"), str):
        return content["text"]
    raise ValueError(f"This page takes text only, got {content!r}.")
