"""The plain path: our round loop over transformers' own caches, for one sequence.

prefill -> first token -> rounds of propose, verify, commit, observe -> the output of plain generate().
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer
from transformers.utils import ModelOutput

from .._compat import CACHE_KEY, CHUNKS_BEHIND_TOKENS, NO_CHUNKS, hidden_states_request
from ..context import common_length
from ..modeling_dspark import DSparkForCausalLM
from ..sampling import draw
from ..target import context_features
from .candidate_generator import DSparkCandidateGenerator, Proposal
from .policy import AUTO
from .probe import Probe
from .record import CallRecord
from .stopping import Transcript
from .target_cache import TargetCache
from .verify import decided_probabilities, verify

NEW_TOKENS = 512  # that a draft's context has room for from the start


class WatchedTarget:
    """The target as transformers' `_prefill` sees it, with a look at the outputs of every chunk.

    `_prefill` returns the outputs of the last chunk only, and a hook on the target would see the calls of other
    threads.
    """

    def __init__(self, target: PreTrainedModel, look: Callable[[ModelOutput], None]):
        self._target = target
        self._look = look

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def __call__(self, **inputs: Any) -> ModelOutput:
        outputs = self._target(**inputs)
        self._look(outputs)
        return outputs


class PlainLoop:
    """State of one generate() call on the plain path."""

    def __init__(
        self,
        target: PreTrainedModel,
        draft: DSparkForCausalLM,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None,
        model_kwargs: dict[str, Any],
        record: CallRecord,
    ):
        self.target = target
        self.draft = draft
        self.processors = logits_processor
        self.config = generation_config
        self.streamer = streamer
        self.kwargs = model_kwargs
        self.record = record
        self.generator = DSparkCandidateGenerator(draft, target, generation_config, logits_processor)
        policy = self.generator.policy
        if policy.scheduler == AUTO:
            policy.scheduler = None
            policy.notes.append('draft.scheduler="auto" knows the costs of the fast path only')
        for note in policy.notes:
            record.note(note)
        keeps = bool(generation_config.return_dict_in_generate)
        self.transcript = Transcript(input_ids, stopping_criteria, streamer, generation_config)
        self.hidden_states: tuple | None = () if keeps and generation_config.output_hidden_states else None
        self.attentions: tuple | None = () if keeps and generation_config.output_attentions else None
        self.cache = TargetCache(model_kwargs[CACHE_KEY], target.config.get_text_config(decoder=True))
        self.position = self._columns = 0
        self._prompt = self._real_ids()
        self._last = ModelOutput()
        self._fed: dict[str, Any] = {}
        wanted = generation_config.output_hidden_states
        self._selected = wanted if isinstance(wanted, (list, tuple)) else None
        self.probe = Probe.of(target, draft, self.generator.proposer.vocabulary, input_ids.shape[1])
        self.kwargs |= self._hidden_states_request()

    def run(self) -> GenerateDecoderOnlyOutput | torch.Tensor:
        """Generate; the return value is what plain generate() would have returned."""
        try:
            self._prefill()
            while not self.transcript.stopped:
                self._round()
            self._catch_up()
        finally:
            self.cache.close()
            text = None if self._prompt is None else self._prompt + self.transcript.tokens
            self.cache.keep_draft_context(self.draft, self.generator.context, text)
        if self.streamer is not None:
            self.streamer.end()
        if not self.config.return_dict_in_generate:
            return self.transcript.ids
        return GenerateDecoderOnlyOutput(
            sequences=self.transcript.ids,
            scores=self.transcript.scores,
            logits=self.transcript.logits,
            attentions=self.attentions,
            hidden_states=self.hidden_states,
            **{CACHE_KEY: self.cache.cache},
        )

    def _hidden_states_request(self) -> dict[str, Any]:
        """What the target must be called with: for the caller, the draft, and the probe while there is one."""
        if self.config.output_hidden_states:
            return {"output_hidden_states": True}
        if self.probe is None:
            return self.generator.model_kwargs_overrides
        return {"output_hidden_states": hidden_states_request(self.probe.target_layer_ids)}

    def _prefill(self) -> None:
        self._columns, past = self.cache.length(), self._real(self.cache.length())
        self._restore_context(past)
        self._reserve_context()
        self.record.add_reused(past)
        self.position = past
        if past and self.config.prefill_chunk_size is not None and not CHUNKS_BEHIND_TOKENS:
            self.config.prefill_chunk_size = None
            self.record.note(NO_CHUNKS)
        outputs = type(self.target)._prefill(
            WatchedTarget(self.target, self._read), self.transcript.ids, self.config, self.kwargs
        )
        self.cache.start(outputs)
        if not self.cache.croppable:
            name = type(self.cache.cache).__name__
            self.record.explain("target_only", f"{name} of {type(self.target).__name__} cannot be rolled back")
            self._end_probe()

        logits = outputs.logits[:, -1].to(copy=True, dtype=torch.float32, device=self.transcript.ids.device)
        scores = self.processors(self.transcript.ids, logits.clone())
        token = draw(scores, do_sample=bool(self.config.do_sample)).tolist()
        self.transcript.commit(token, scores, logits)
        self.record.add_tokens(1)
        if self.hidden_states is not None:
            self.hidden_states += (self._wanted(outputs.hidden_states),)
        if self.attentions is not None:
            self.attentions += (outputs.attentions,)
        self.kwargs = self._extended(self.kwargs, outputs)

    def _real(self, columns: int) -> int:
        """Tokens among the first `columns` of the text and its padding: the draft counts those only."""
        mask = self.kwargs.get("attention_mask")
        return columns if mask is None else int(mask[0, :columns].sum())

    def _reserve_context(self) -> None:
        """Room for the prompt and what may follow soon, so that a long context is not copied while it fills."""
        if self.draft.context_window is None:
            room = NEW_TOKENS if self.transcript.room is None else min(self.transcript.room, NEW_TOKENS)
            length = len(self.transcript) + room + self.draft.config.block_size
            self.generator.context.reserve(length - self.generator.context.length)

    def _real_ids(self) -> list[int] | None:
        """The prompt without padding; `None` where the caller gave embeddings, or only what follows a cache."""
        mask, ids = self.kwargs.get("attention_mask"), self.transcript.ids
        if self.kwargs.get("inputs_embeds") is not None or (mask is not None and mask.shape != ids.shape):
            return None
        return (ids[0] if mask is None else ids[0, mask[0].bool().to(ids.device)]).tolist()

    def _read(self, outputs: ModelOutput) -> None:
        """Hand a chunk of the prompt to the draft at once, so that features of one chunk only are in memory."""
        features = context_features(outputs, self.draft.config.target_layer_ids)
        mask = self.kwargs.get("attention_mask")
        count, real = features.shape[1], None
        if mask is not None:
            real = mask[0, self._columns : self._columns + count].bool().to(features.device)
            # transformers 5.18 feeds a cached prompt again when it goes by chunks, past the end of the mask.
            real = real if len(real) == count else None
        features = features if real is None else features[:, real]
        self.generator.observe(features, self.position)
        if self.probe is not None:
            self.probe.see_prompt(outputs, real, self.position + features.shape[1])
        self._columns += count
        self.position += features.shape[1]

    def _restore_context(self, past: int) -> None:
        """Take up the draft's context where an earlier call with this cache left it."""
        if past == 0:
            return
        context, text = self.cache.draft_context(self.draft)
        if context is not None:
            known = past
            if text is not None and self._prompt is not None:  # others may have put another text into the cache
                known = common_length(text, self._prompt[:past])
            context.crop(known)
            self.generator.context = context
        unseen = past - self.generator.context.length
        if unseen:
            self.record.note(f"the cache holds {unseen} tokens that the draft has not seen")

    def _round(self) -> None:
        started = time.perf_counter()
        ids = self.transcript.ids
        limit = None if self.transcript.room is None else self.transcript.room - 1
        proposal = self._propose(ids, limit)
        drafts = ids.new_empty(0) if proposal is None else proposal.tokens.to(ids.device)
        states = [self.kwargs]
        for _ in range(len(drafts)):
            states.append(self._extended(states[-1]))
        length = self.cache.pending + len(drafts) + 1
        outputs = self._forward(torch.cat((ids, drafts[None]), dim=-1), length, len(drafts) + 1, states[-1])
        with torch.profiler.record_function("decode_sample"):
            logits = outputs.logits[0, -len(drafts) - 1 :].to(dtype=torch.float32, device=ids.device)
            q = proposal.q if proposal is not None else logits[:0] if self.config.do_sample else None
            if q is not None:
                # A target's logits may be wider than the vocabulary its config states.
                q = F.pad(q.to(ids.device), (0, logits.shape[-1] - q.shape[-1]))
            committed, accepted, scores = verify(self.transcript, drafts, q, logits, self.processors)

            self._fed = states[committed - 1]
            self.cache.forget(len(drafts) + 1 - committed)
            if self.cache.pending > self.draft.config.num_draft_tokens:
                self._catch_up()
            self.kwargs = states[committed] if committed < len(states) else self._extended(states[-1])
            self._keep_outputs(outputs, committed, len(drafts))
            if self.cache.croppable:
                features = context_features(outputs, self.draft.config.target_layer_ids)[:, -len(drafts) - 1 :]
                self.generator.observe(features[:, :committed], self.position)
        if not self.cache.croppable:
            self.record.add_tokens(committed)
        else:
            self.record.add_round(
                self.transcript,
                row=0,
                position=self.position,
                draft_tokens=[] if proposal is None else proposal.block.tokens[0].tolist(),
                c=None if proposal is None or proposal.confidence is None else proposal.confidence.tolist(),
                verified=len(drafts),
                committed=committed,
                accepted=accepted,
                milliseconds=1000 * (time.perf_counter() - started),
                **self._probabilities(proposal, scores, accepted, committed),
            )
        self.position += committed
        if self.probe is not None:
            tokens = self.transcript.tokens
            self.record.note(self.probe.see_round(outputs, len(drafts), accepted, committed, tokens), log=False)
            if self.probe.finished:
                self._end_probe()

    def _end_probe(self) -> None:
        self.probe = None
        self.kwargs |= self._hidden_states_request()

    def _probabilities(
        self, proposal: Proposal | None, scores: Sequence[torch.Tensor], accepted: int, committed: int
    ) -> dict[str, list[float]]:
        """`q` and `p` of a round, where somebody asked for them."""
        if not self.record.probabilities:
            return {}
        next_token = self.transcript.tokens[-1] if committed > accepted else None
        if proposal is None:
            return {"q": [], "p": decided_probabilities(scores, [], accepted, next_token)}
        return {
            "q": self.generator.policy.draft_probabilities(proposal.block.tokens[0], proposal.block.scores[0]),
            "p": decided_probabilities(scores, proposal.tokens.tolist(), accepted, next_token),
        }

    def _propose(self, ids: torch.Tensor, limit: int | None) -> Proposal | None:
        """The next block; `None` when the target goes on alone: it cannot be rolled back, or drafts do not pay."""
        if not self.cache.croppable or not self.generator.policy.should_draft():
            return None
        with torch.profiler.record_function("dspark_propose"):
            return self.generator.propose(ids, self.position, limit)

    def _catch_up(self) -> None:
        """Feed committed tokens that a cache with recurrent states had to forget, all but the anchor."""
        if pending := self.cache.pending:
            self._forward(self.transcript.ids[:, :-1], pending, 1, self._fed)
            self.cache.forget(0)

    def _forward(self, candidate_ids: torch.Tensor, length: int, keep: int, kwargs: dict[str, Any]) -> ModelOutput:
        """The target over the last `length` ids, with logits of the last `keep`."""
        inputs = self.target.prepare_inputs_for_generation(candidate_ids, next_sequence_length=length, **kwargs)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = keep
        with torch.profiler.record_function("target_verify"), self.target._optimize_model_for_decode():
            return self.target(**inputs, return_dict=True)

    def _extended(self, kwargs: dict[str, Any], outputs: ModelOutput | None = None) -> dict[str, Any]:
        """Model arguments with mask, positions and token types one token longer, as plain generate() extends them."""
        if outputs is not None:
            large = ("logits", "hidden_states", "attentions")
            self._last = type(outputs)(**{name: value for name, value in outputs.items() if name not in large})
        extend = self.target._update_model_kwargs_for_generation
        return extend(self._last, dict(kwargs), is_encoder_decoder=False)

    def _wanted(self, hidden_states: tuple) -> tuple:
        """The hidden states the caller asked for; a list of indices leaves None elsewhere, as in transformers."""
        if self._selected is None:
            return hidden_states
        return tuple(state if i in self._selected else None for i, state in enumerate(hidden_states))

    def _keep_outputs(self, outputs: ModelOutput, committed: int, drafts: int) -> None:
        for i in range(committed):
            if self.hidden_states is not None:
                states = [s if s is None else s[:, -drafts - 1 :] for s in self._wanted(outputs.hidden_states)]
                self.hidden_states += (tuple(s if s is None else s[:, i : i + 1] for s in states),)
            if self.attentions is not None:
                self.attentions += (self.cache.attention_step(outputs.attentions, i, drafts),)
