"""`DSparkCandidateGenerator`: the proposer behind transformers' `CandidateGenerator` interface."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from .._compat import hidden_states_request
from ..context import DraftContext
from ..modeling_dspark import DSparkForCausalLM
from ..proposal import DraftBlock, Proposer
from ..target import context_features, share_vocabulary
from .policy import DraftPolicy


@dataclass(frozen=True)
class Proposal:
    """A block and how much of it is worth verifying.

    `tokens` [ℓ] and `q` [ℓ, V] (`None` when greedy) go to verification; `confidence` holds c_1..c_γ or is `None`.
    """

    block: DraftBlock
    tokens: torch.Tensor
    q: torch.Tensor | None
    confidence: torch.Tensor | None


class DSparkCandidateGenerator(CandidateGenerator):
    """Drafts for one sequence of one generate() call.

    Two steps a round: `observe` turns the target's hidden states of newly committed tokens into draft context,
    `propose` gives the next block. `get_candidates` does both in the form that transformers' own assisted decoding
    expects.

    Args:
        draft, target: the pair; it is checked here.
        generation_config: of the call; `num_assistant_tokens`, `assistant_confidence_threshold`, `do_sample`.
        logits_processor: processors of the call; those that may see drafts also shape q.

    Raises:
        ValueError: for a pair or options that do not fit.
    """

    requires_model_outputs = True

    def __init__(
        self,
        draft: DSparkForCausalLM,
        target: PreTrainedModel,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList | None = None,
    ):
        self.draft = draft
        self.policy = DraftPolicy(draft, generation_config, logits_processor)
        self.max_length = generation_config.max_length
        self.context = DraftContext(draft.config, 1, draft.device, draft.dtype, draft.context_window)
        self.proposer = Proposer(draft, share_vocabulary(draft.config, target))

    @property
    def model_kwargs_overrides(self) -> dict[str, Any]:
        """What the target's forward must be called with, so that `observe` finds its taps."""
        return {"output_hidden_states": hidden_states_request(self.draft.config.target_layer_ids)}

    @torch.no_grad()
    def observe(self, features: torch.Tensor, position: int) -> None:
        """Add committed tokens to the context: `features` [1, n, n_taps · H_target], the first at `position`."""
        if features.shape[1]:
            positions = torch.arange(position, position + features.shape[1]).unsqueeze(0)
            self.draft.append_context(self.context, features, positions)
            self.context.end = position + features.shape[1]

    @torch.no_grad()
    def propose(self, input_ids: torch.Tensor, position: int, limit: int | None = None) -> Proposal:
        """The next block.

        Args:
            input_ids: [1, t] committed tokens; the last is the anchor.
            position: of the anchor among the real tokens.
            limit: most drafts that the length limit leaves room for.
        """
        block = self.proposer.propose(self.context, input_ids, position, self.policy.choice)
        c = self.policy.conditional(block.confidence_logits)
        c = None if c is None else c[0]
        verified = self.policy.verified(c, limit)
        tokens = block.tokens[0, :verified]
        return Proposal(block, tokens, self.policy.distribution(block.scores[0, :verified], tokens), c)

    def get_candidates(
        self,
        input_ids: torch.LongTensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: Any = None,
        is_first_iteration: bool = True,
        n_last_matches: int = 0,
        **kwargs: Any,
    ) -> tuple[torch.LongTensor, torch.FloatTensor | None]:
        """transformers' interface: nothing on the first call (the target prefills), then input ids plus drafts.

        Returns the candidates [1, t + ℓ] and, when sampling, log q [1, ℓ, V].
        """
        if is_first_iteration:
            return input_ids, None
        position = input_ids.shape[1] - 1
        features = context_features(model_outputs, self.draft.config.target_layer_ids)
        self.observe(features[:, : position - self.context.length], self.context.length)
        limit = None if self.max_length is None else max(0, self.max_length - input_ids.shape[1] - 1)
        proposal = self.propose(input_ids, position, limit)
        candidates = torch.cat((input_ids, proposal.tokens[None].to(input_ids.device)), dim=-1)
        return candidates, None if proposal.q is None else proposal.q.log()[None]

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, num_matches: int):
        """Nothing to adapt: the block has a fixed size and the confidence head decides how much is verified."""
