"""From the messages of a conversation to token ids."""

from transformers import PreTrainedTokenizerBase


class ChatFormat:
    """How conversations are written for a model.

    Args:
        tokenizer: of the target.
        chat_template (`bool`, *optional*): whether its chat template is used; `None` means if it has one. Without, the
            messages and answers are put one after the other as they are.
        thinking (`bool`, *optional*): thinking mode on or off; `None` leaves it to the template.

    Raises:
        ValueError: a template is asked for and there is none, or `thinking` would have no effect.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, chat_template: bool | None = None, thinking: bool | None = None
    ):
        template = tokenizer.chat_template
        if chat_template and template is None:
            raise ValueError("The target's tokenizer has no chat template: turn `chat_template` off.")
        self.tokenizer = tokenizer
        self.uses_template = template is not None and chat_template is not False
        if thinking is not None and not (self.uses_template and "enable_thinking" in str(template)):
            raise ValueError("`thinking` has no effect: the chat template in use does not read `enable_thinking`.")
        self.thinking = thinking

    def __str__(self) -> str:
        if not self.uses_template:
            return "none"
        return "chat" if self.thinking is None else f"chat, thinking {'on' if self.thinking else 'off'}"

    def encode(self, messages: list[str]) -> list[int]:
        """Ids of a conversation that the model is to go on with: user, assistant, user ... , the last a user's."""
        if not self.uses_template:
            return self.tokenizer("".join(messages))["input_ids"]
        roles = ("user", "assistant")
        chat = [{"role": roles[i % 2], "content": text} for i, text in enumerate(messages)]
        options = {} if self.thinking is None else {"enable_thinking": self.thinking}
        return self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, **options)[
            "input_ids"
        ]

    def decode(self, ids: list[int]) -> str:
        """An answer as it goes back into the conversation."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)
