"""A conversation as token ids that grow turn by turn, supervised where the target wrote."""

from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

MARK = "THE-TEXT-OF-THE-USER"
REQUEST = (
    "Write one message that a user could send to an AI assistant about this topic: {topic}. "
    "Write the message alone, without an introduction and without an answer."
)


@dataclass
class Conversation:
    """One conversation at work.

    Attributes:
        pending: user turns that are still to come, given by a file; then `own_turns` that the target writes.
        topic: what the first of its own turns is about.
        temperature: of its answers.
        messages: so far, in transformers' form.
        ids, loss_mask: token ids so far, and 1 where the target wrote an answer.
        text: what `ids` are in words, special tokens included.
    """

    pending: list[str] = field(default_factory=list)
    own_turns: int = 0
    topic: str | None = None
    temperature: float = 0.0
    messages: list[dict[str, str]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    text: str = ""
    ended: bool = False

    @property
    def source(self) -> str:
        if not self.own_turns:
            return "prompt"
        return "topic" if self.topic else "self"

    def add_answer(self, ids: list[int], content: str, text: str, complete: bool) -> None:
        """Append what the target wrote: `content` goes into the messages, `text` has the special tokens too."""
        self.ids += ids
        self.loss_mask += [1] * len(ids)
        self.text += text
        self.messages.append({"role": "assistant", "content": content})
        # An answer without end cannot be followed by another turn.
        self.ended = self.ended or not complete


class ChatText:
    """How the turns of a conversation are written for a target.

    Raises:
        ValueError: (when the user's turns are to be written) for a chat template that does not show where they begin.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer

    @property
    def has_template(self) -> bool:
        return self.tokenizer.chat_template is not None

    def user_opening(self, messages: list[dict[str, str]]) -> tuple[str, str]:
        """The text in front of the next user turn, and what follows that turn."""
        rendered = self._render([*messages, {"role": "user", "content": MARK}])
        if rendered.count(MARK) != 1:
            raise ValueError(
                "The chat template does not write a user's turn as it is, so the target cannot write one. Give prompts."
            )
        opening, closing = rendered.split(MARK)
        return opening, closing

    def request(self, topic: str) -> list[int]:
        """Ids of a question whose answer is a user turn about `topic`."""
        return self.encode(self._render([{"role": "user", "content": REQUEST.format(topic=topic)}], answer=True))

    def add_user(self, conversation: Conversation, content: str) -> bool:
        """Append a user turn and the opening of the answer.

        False, and the conversation has ended, when the template writes earlier turns differently once another follows
        (it drops thoughts, say): its ids would no longer be what the target sees.
        """
        messages = [*conversation.messages, {"role": "user", "content": content}]
        rendered = self._render(messages, answer=True) if self.has_template else content
        if not rendered.startswith(conversation.text):
            conversation.ended = True
            return False
        tail = rendered[len(conversation.text) :]
        ids = self.encode(tail, first=not conversation.ids)
        conversation.messages, conversation.text = messages, rendered
        conversation.ids += ids
        conversation.loss_mask += [0] * len(ids)
        return True

    def encode(self, text: str, *, first: bool = True) -> list[int]:
        """A template writes its special tokens itself; a bare text gets the tokenizer's at its start."""
        return self.tokenizer(text, add_special_tokens=first and not self.has_template)["input_ids"]

    def _render(self, messages: list[dict[str, str]], answer: bool = False) -> str:
        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": answer}
        return self.tokenizer.apply_chat_template(messages, **options)
