"""The sequential heads of DSpark: Markov biases and the confidence head (paper, "Semi-autoregressive drafting").

A Markov head gives every slot a bias over the vocabulary that depends on the previous token. All three kinds share one
`step`, so the walk over a block (`proposal.markov_walk`) is written once; they differ in `transition`, the vector that
W2 turns into the bias, which training uses directly. Parameter names are DeepSpec's.
"""

import torch
import torch.nn.functional as F
from torch import nn

from .configuration_dspark import DSparkConfig


class VanillaMarkovHead(nn.Module):
    """B_k = W2 · W1[x_{k-1}], a first-order transition matrix of rank r.

    Shapes: `prev` [B] token ids, `hidden` [B, H], `state` as the previous step returned it (`None` opens a block);
    `step` returns the bias [B, V_draft] in the head's dtype and the next state, `transition` the next state and before
    it u_k [B, r] with B_k = W2 · u_k. Where the state is not used (`has_state` False), any leading shape will do.
    """

    has_state = False

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.rank = config.markov_rank
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.head_size, bias=False)

    def embed(self, prev: torch.Tensor) -> torch.Tensor:
        """W1[prev], [..., r]; the confidence head reads it too."""
        return self.markov_w1(prev)

    def transition(
        self, prev: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.embed(prev), state

    def step(
        self, prev: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        vector, state = self.transition(prev, hidden, state)
        return self.markov_w2(vector), state


class GatedMarkovHead(VanillaMarkovHead):
    """The transition embedding is gated by what the backbone sees: B_k = W2(σ(G[h_k; e] + b) · e), e = W1[x_{k-1}]."""

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size + config.markov_rank, config.markov_rank)

    def transition(self, prev, hidden, state):
        embedding = self.embed(prev)
        gate = self.gate_proj(torch.cat((hidden, embedding), dim=-1)).sigmoid()
        return gate * embedding, state


class RNNMarkovHead(VanillaMarkovHead):
    """A gated recurrent state carries the whole block so far.

    z = J[s; e; h] + b is split into three parts (g, c, o) of width r: B_k = W2 tanh(o) and
    s' = σ(g) · s + (1 − σ(g)) · tanh(c), with s = 0 at the start of a block.
    """

    has_state = True

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        self.joint_proj = nn.Linear(2 * config.markov_rank + config.hidden_size, 3 * config.markov_rank)

    def transition(self, prev, hidden, state):
        embedding = self.embed(prev)
        if state is None:
            state = torch.zeros_like(embedding)
        gate, candidate, output = self.joint_proj(torch.cat((state, embedding, hidden), dim=-1)).chunk(3, dim=-1)
        gate = gate.sigmoid()
        return output.tanh(), gate * state + (1 - gate) * candidate.tanh()


MARKOV_HEADS = {"vanilla": VanillaMarkovHead, "gated": GatedMarkovHead, "rnn": RNNMarkovHead}


class ConfidenceHead(nn.Module):
    """Logit of c_k, the probability that x_k is accepted given that x_1..x_{k-1} were.

    It reads [h_k; W1[x_{k-1}]] (or h_k alone) and never x_k, so a decision to verify slot k cannot depend on it
    (paper, Appendix A).
    """

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.with_markov = config.confidence_head_with_markov
        width = config.hidden_size + (config.markov_rank if self.with_markov else 0)
        self.proj = nn.Linear(width, 1, bias=config.confidence_head_bias)

    def forward(self, hidden: torch.Tensor, prev_embedding: torch.Tensor | None) -> torch.Tensor:
        """`hidden` [B, γ, H], `prev_embedding` [B, γ, r] or `None` -> logits [B, γ] before temperatures, float32."""
        features = torch.cat((hidden, prev_embedding), dim=-1) if self.with_markov else hidden
        bias = None if self.proj.bias is None else self.proj.bias.float()
        return F.linear(features.float(), self.proj.weight.float(), bias).squeeze(-1)
