"""Where every token of an answer came from. Pure functions of token ids and recorded rounds."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_dspark import Round, SpeculationStats

ORIGINS = {
    "first": "from the target's forward over the prompt",
    "accepted": "a draft that the target would have written too",
    "correction": "the target's token in the place of a rejected draft",
    "bonus": "the target's extra token after all verified drafts were accepted",
    "target": "no drafts were used",
}


@dataclass(frozen=True)
class Token:
    """One token of an answer.

    Attributes:
        id, text: empty text: bytes of a character that a later token completes.
        special: whether it is a control token, such as the end of a turn.
        origin: a key of `ORIGINS`.
        position: its index among the real tokens, prompt included.
        round: number of its round from 0; `None` for the first token and without drafts.
        slot: k of the draft it is, or of the draft that it stands in for; `None` otherwise.
        c, a: c_k and a_k of that slot.
        q, p: what draft and target gave to this token; a correction's q is not known.
        replaced: text of the rejected draft, and what draft and target gave to that.
    """

    id: int
    text: str
    special: bool
    origin: str
    position: int
    round: int | None = None
    slot: int | None = None
    c: float | None = None
    a: float | None = None
    q: float | None = None
    p: float | None = None
    replaced: str | None = None
    replaced_q: float | None = None
    replaced_p: float | None = None


@dataclass
class Answer:
    """An answer and how it came about, as far as it is known.

    Attributes:
        prompt: the visitor's last message.
        settings: what it was asked with, as plain values.
        tokens: of the answer.
        drafts: for each round the texts of its γ drafts.
        stats: rounds and counters, those of `SpeculationStats`; `None` without a draft.
        seconds: since generate() began, the prompt's forward included.
        state: "waiting", "running", "finished", "stopped" or "failed".
        error: what went wrong.
    """

    prompt: str
    settings: dict[str, Any] = field(default_factory=dict)
    tokens: list[Token] = field(default_factory=list)
    drafts: list[list[str]] = field(default_factory=list)
    stats: SpeculationStats | None = None
    seconds: float = 0.0
    state: str = "waiting"
    error: str = ""

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens if not token.special)

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds if self.seconds else 0.0

    @property
    def rounds(self) -> list[Round]:
        """The rounds whose drafts have been read; the statistics may be one ahead while the answer grows."""
        return [] if self.stats is None else self.stats.rounds[: len(self.drafts)]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain Python values, for JSON."""
        own = ("prompt", "text", "settings", "seconds", "tokens_per_second", "state", "error")
        return {
            **{name: getattr(self, name) for name in own},
            "tokens": [asdict(token) for token in self.tokens],
            "drafts": self.drafts,
            "statistics": None if self.stats is None else self.stats.to_dict(),
        }


class Pieces:
    """The text that each token adds to those before it, as far as characters are complete."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.texts: list[str] = []
        self._tokenizer = tokenizer
        self._special = set(tokenizer.all_special_ids)
        self._ids: list[int] = []
        self._start = self._read = 0  # what is decoded again with each token, and how much of it has been handed out

    def is_special(self, token: int) -> bool:
        return token in self._special

    def extend(self, ids: Sequence[int]) -> list[str]:
        """Take the tokens of `ids` that are new; returns the texts of all."""
        for token in ids[len(self._ids) :]:
            self._ids.append(token)
            self.texts.append(self._name(token) if self.is_special(token) else self._next())
        return self.texts

    def drafts(self, round_: Round) -> list[str]:
        """The texts of a round's drafts, each after the ones before it."""
        chain = [round_.anchor, *round_.draft_tokens]
        return [self._after(*edge) for edge in zip(chain, chain[1:], strict=False)]

    def _next(self) -> str:
        known, now = self._decode(self._ids[self._start : self._read]), self._decode(self._ids[self._start :])
        if len(now) <= len(known) or now.endswith("\ufffd"):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return now[len(known) :]

    def _after(self, before: int, token: int) -> str:
        if self.is_special(token):
            return self._name(token)
        return self._decode([before, token])[len(self._decode([before])) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _name(self, token: int) -> str:
        return str(self._tokenizer.convert_ids_to_tokens(token))


def tokens_of(ids: Sequence[int], pieces: Pieces, rounds: Sequence[Round], start: int, drafted: bool) -> list[Token]:
    """The tokens of an answer, as many as the first one and `rounds` account for.

    Args:
        ids: new tokens so far; they may be ahead of the rounds.
        pieces: their texts.
        rounds: of this answer.
        start: position of the first new token.
        drafted: `False` where no drafts were used; all tokens are the target's then.
    """
    texts = pieces.extend(ids)
    places = _places(rounds, pieces) if drafted else [{"origin": "target"}] * len(ids)
    return [
        Token(id=token, text=text, special=pieces.is_special(token), position=start + i, **place)
        for i, (token, text, place) in enumerate(zip(ids, texts, places, strict=False))
    ]


def _places(rounds: Sequence[Round], pieces: Pieces) -> list[dict[str, Any]]:
    places: list[dict[str, Any]] = [{"origin": "first"}]
    for number, r in enumerate(rounds):
        places += [{"origin": "accepted", "round": number, **_slot(r, k)} for k in range(r.accepted)]
        if r.next_token is None:
            continue
        own = {"round": number, "p": r.p[-1] if r.p else None}
        if r.accepted == r.verified:
            places.append({"origin": "bonus", **own})
            continue
        slot = _slot(r, r.accepted)
        replaced = {
            "replaced": pieces.drafts(r)[r.accepted],
            "replaced_q": slot.pop("q"),
            "replaced_p": slot.pop("p"),
        }
        places.append({"origin": "correction", **own, **slot, **replaced})
    return places


def _slot(r: Round, k: int) -> dict[str, Any]:
    """What is known about draft k (from 0) of a round."""
    of_slot = {"c": r.confidence, "a": r.survival, "q": r.q, "p": r.p}
    return {"slot": k + 1, **{name: values[k] if values else None for name, values in of_slot.items()}}
