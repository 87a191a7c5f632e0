"""`MarkovLogitsProcessor`: the sequential stage of DSpark in transformers' own terms."""

import torch
from transformers import LogitsProcessor

from ..heads import VanillaMarkovHead


class MarkovLogitsProcessor(LogitsProcessor):
    """Adds the Markov bias B_k(x_{k-1}) to the base logits of the next slot of a block.

    `begin` opens a block; each call after it serves the next slot and carries the state of an rnn head. With
    `head=None` (a draft without Markov head) the scores pass unchanged.

    ```python
    markov = MarkovLogitsProcessor(draft.markov_head)
    markov.begin(block.hidden_states)
    scores = markov(input_ids, block.base_logits[:, 0])
    ```
    """

    def __init__(self, head: VanillaMarkovHead | None):
        self.head = head
        self._hidden_states: torch.Tensor | None = None
        self._slot = 0
        self._state: torch.Tensor | None = None

    def begin(self, hidden_states: torch.Tensor) -> None:
        """Open a block with its backbone states h_1..h_γ, [B, γ, H]."""
        self._hidden_states, self._slot, self._state = hidden_states, 0, None

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """`input_ids` [B, t] ends with x_{k-1}; `scores` [B, V] are U_k. Returns U_k + B_k.

        Raises:
            ValueError: before `begin`, or after the last slot of the block.
        """
        if self._hidden_states is None:
            raise ValueError("`MarkovLogitsProcessor` has no open block. Call `begin(hidden_states)` first.")
        if self._slot >= self._hidden_states.shape[1]:
            raise ValueError(f"The block has {self._hidden_states.shape[1]} slots. Call `begin` to open the next one.")
        hidden = self._hidden_states[:, self._slot]
        self._slot += 1
        if self.head is None:
            return scores
        prev = input_ids[:, -1].clamp(max=self.head.markov_w1.num_embeddings - 1)
        bias, self._state = self.head.step(prev, hidden, self._state)
        return scores + bias
