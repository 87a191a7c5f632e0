"""What a visitor can choose, and the limits of the page. Names are those of generate()."""

from dataclasses import dataclass
from typing import Any

PATHS = {"plain": {}, "ragged": {"cache_implementation": "static"}}
SCHEDULERS = ("off", "auto", "measured")


@dataclass(frozen=True)
class Limits:
    """Longest prompt (the conversation so far included) and longest answer, in tokens.

    Raises:
        ValueError: a limit below 1.
    """

    max_prompt_tokens: int = 2048
    max_new_tokens: int = 512

    def __post_init__(self) -> None:
        for name in ("max_prompt_tokens", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")

    def check_prompt(self, num_tokens: int) -> None:
        if num_tokens > self.max_prompt_tokens:
            raise ValueError(
                f"The conversation is {num_tokens} tokens long and this page takes {self.max_prompt_tokens}: "
                "write less, or clear the conversation."
            )


@dataclass(frozen=True)
class Settings:
    """The controls of the page.

    Attributes:
        temperature: 0 takes the likeliest token, anything above samples.
        top_p: sampling only.
        num_assistant_tokens: most drafts verified in a round.
        assistant_confidence_threshold: on c_k; 0 verifies the whole block.
        scheduler: `"off"`, `"auto"` or `"measured"` (by the page's cost model).
        path: `"plain"` or `"ragged"`.
        max_new_tokens: longest answer.
        seed: of the random numbers.
        thinking: thinking mode on or off; `None` where the chat template has none.
        probabilities: whether q and p of every draft are noted.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    num_assistant_tokens: int = 7
    assistant_confidence_threshold: float = 0.0
    scheduler: str = "off"
    path: str = "plain"
    max_new_tokens: int = 256
    seed: int = 0
    thinking: bool | None = None
    probabilities: bool = True

    def check(self, limits: Limits) -> None:
        """Refuse what the page's own controls cannot send, but a program can.

        Raises:
            ValueError: with the value and the fix. Values that generate() refuses are left to it.
        """
        if self.path not in PATHS:
            raise ValueError(f"`path` must be one of {', '.join(PATHS)}, got {self.path!r}.")
        if self.scheduler not in SCHEDULERS:
            raise ValueError(f"`scheduler` must be one of {', '.join(SCHEDULERS)}, got {self.scheduler!r}.")
        for name in ("temperature", "top_p", "max_new_tokens", "seed"):
            if not isinstance(getattr(self, name), (int, float)):
                raise ValueError(f"`{name}` must be a number, got {getattr(self, name)!r}.")
        if not 1 <= self.max_new_tokens <= limits.max_new_tokens:
            raise ValueError(
                f"`max_new_tokens` must lie in 1..{limits.max_new_tokens} on this page, got {self.max_new_tokens}."
            )
        if self.temperature < 0:
            raise ValueError(f"`temperature` must be at least 0, got {self.temperature}. Use 0 for greedy decoding.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"`top_p` must be above 0 and at most 1, got {self.top_p}. Use 1 to keep every token.")

    def target_options(self) -> dict[str, Any]:
        """Arguments of generate() with or without a draft."""
        options: dict[str, Any] = {"max_new_tokens": int(self.max_new_tokens), "do_sample": self.temperature > 0}
        if options["do_sample"]:
            # top_k is 50 in generate() where nobody says otherwise; what is sampled is to be what the page says.
            options |= {"temperature": float(self.temperature), "top_p": float(self.top_p), "top_k": 0}
        return options

    def draft_options(self) -> dict[str, Any]:
        """Arguments of generate() that concern the draft."""
        return {
            "num_assistant_tokens": int(self.num_assistant_tokens),
            "assistant_confidence_threshold": float(self.assistant_confidence_threshold),
            **PATHS[self.path],
        }
