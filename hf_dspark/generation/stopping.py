"""`Transcript`: each token of a text is committed under the criteria, records and streamer of plain generate()."""

import torch
from transformers import EosTokenCriteria, GenerationConfig, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer


class Transcript:
    """The growing text of one row.

    A stopping criterion that becomes true at a token inside a block ends the text there: nothing after it is returned,
    streamed or counted. End-of-text ids and length limits are compared on the host; any other criterion is called with
    exactly the ids and scores that plain generate() would have shown it.

    Attributes:
        tokens: new tokens on the host.
        scores, logits: one [1, V] entry a new token (processed and raw), or `None` when not asked for.
        stopped: whether the text has ended.
        decided_by_ids: whether end-of-text ids and length limits alone end it, so that no code of the caller runs.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        criteria: StoppingCriteriaList,
        streamer: BaseStreamer | None,
        generation_config: GenerationConfig,
    ):
        keeps = bool(generation_config.return_dict_in_generate)
        self.prompt_length = input_ids.shape[1]
        self.tokens: list[int] = []
        self.scores: tuple[torch.Tensor, ...] | None = () if keeps and generation_config.output_scores else None
        self.logits: tuple[torch.Tensor, ...] | None = () if keeps and generation_config.output_logits else None
        self.stopped = False
        self._ids = input_ids
        self._streamer = streamer
        self._criteria = criteria
        # Exact types only: a subclass may decide differently.
        limits = [c.max_length for c in criteria if type(c) is MaxLengthCriteria]
        self._max_length = min(limits, default=None)
        self._eos = {int(i) for c in criteria if type(c) is EosTokenCriteria for i in c.eos_token_id}
        self.decided_by_ids = all(type(c) in (MaxLengthCriteria, EosTokenCriteria) for c in criteria)

    def __len__(self) -> int:
        return self.prompt_length + len(self.tokens)

    @property
    def ids(self) -> torch.Tensor:
        """[1, t] committed tokens, the prompt included; built when somebody asks, since it is a launch on a GPU."""
        if missing := self.tokens[self._ids.shape[1] - self.prompt_length :]:
            new = torch.tensor([missing], device=self._ids.device)  # int64, as plain generate() adds them
            self._ids = torch.cat((self._ids, new), dim=-1)
        return self._ids

    @property
    def room(self) -> int | None:
        """Tokens that still fit under the length limit; `None` without one."""
        return None if self._max_length is None else self._max_length - len(self)

    def run_on(self, length: int) -> None:
        """Continue an ended text up to `length` tokens, whatever it says."""
        self.stopped, self._max_length, self._eos, self.decided_by_ids = False, length, set(), True

    def commit(self, tokens: list[int], scores: torch.Tensor | None = None, logits: torch.Tensor | None = None) -> int:
        """Commit `tokens` until one of them ends the text.

        Args:
            tokens: candidates in order.
            scores, logits: [n, V] processed and raw logits that each token was chosen from; may be left out where
                nobody asked for them.

        Returns:
            how many were committed.
        """
        if self.decided_by_ids and self._streamer is None and scores is None and logits is None:
            return self._commit_ids(tokens)
        for i, token in enumerate(tokens):
            self.tokens.append(token)
            if self.scores is not None and scores is not None:
                self.scores += (scores[i : i + 1],)
            if self.logits is not None and logits is not None:
                self.logits += (logits[i : i + 1],)
            self.stopped = self._ends(token)
            if self._streamer is not None:
                self._streamer.put(torch.tensor([token]))
            if self.stopped:
                return i + 1
        return len(tokens)

    def _commit_ids(self, tokens: list[int]) -> int:
        """`commit` where nobody looks on. Rounds wait for every row of it: token by token takes three times as long."""
        room = self.room
        taken = tokens if room is None else tokens[:room]
        if self._eos and not self._eos.isdisjoint(taken):
            taken = taken[: next(i for i, token in enumerate(taken) if token in self._eos) + 1]
            self.stopped = True
        self.tokens.extend(taken)
        self.stopped = self.stopped or len(taken) == room
        return len(taken)

    def _ends(self, token: int) -> bool:
        if self.decided_by_ids:
            return token in self._eos or self.room == 0
        return bool(self._criteria(self.ids, self.scores).all())
