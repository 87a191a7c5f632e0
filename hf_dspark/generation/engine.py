"""The ragged path: rows of a batch in one preallocated cache, each accepting its own number of drafts.

All verify tokens of a round lie on one flat axis, so a finished row costs nothing.
"""

import time
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput

from ..modeling_dspark import DSparkForCausalLM
from ..proposal import DraftBlock, Proposer
from ..sampling import draw
from ..target import share_vocabulary
from .policy import DraftPolicy
from .ragged_cache import FlatTokens, RaggedCache, RaggedContext
from .record import CallRecord, Round
from .stopping import Transcript
from .twin import Twin
from .verify import verify


class RowProcessors(LogitsProcessorList):
    """The processors of a batch as one of its rows sees them.

    Rows of a batch are at different lengths, and a processor may hold one setting a row. So the row is shown in its
    place among copies of itself, all of its own length, as plain generate() would show it at that step.
    """

    def __init__(self, processors: LogitsProcessorList, row: int, num_rows: int):
        super().__init__(processors)
        self.row, self.num_rows = row, num_rows

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        ids, copies = input_ids.expand(self.num_rows, -1), scores.repeat(self.num_rows, 1)
        return super().__call__(ids, copies, **kwargs)[self.row : self.row + 1]


class Row:
    """One row of the batch: its text, and how many of its tokens are in the caches."""

    def __init__(self, index: int, transcript: Transcript, processors: LogitsProcessorList):
        self.index = index
        self.transcript = transcript
        self.processors = processors
        self.length = 0

    @property
    def anchor(self) -> torch.Tensor:
        return self.transcript.ids[0, -1]


class RaggedLoop:
    """State of one generate() call on the ragged path."""

    def __init__(
        self,
        target: PreTrainedModel,
        draft: DSparkForCausalLM,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        record: CallRecord,
    ):
        self.draft = draft
        self.config = generation_config
        self.record = record
        self.policy = DraftPolicy(draft, generation_config, logits_processor)
        keeps = {
            "keep_scores": bool(generation_config.return_dict_in_generate and generation_config.output_scores),
            "keep_logits": bool(generation_config.return_dict_in_generate and generation_config.output_logits),
        }
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        self.prompts = [ids[mask.bool()] for ids, mask in zip(input_ids, real, strict=True)]
        self.rows = [
            Row(
                i,
                Transcript(input_ids[i : i + 1], stopping_criteria, None, **keeps),
                RowProcessors(logits_processor, i, input_ids.shape[0]),
            )
            for i in range(input_ids.shape[0])
        ]
        capacity = max(len(p) for p in self.prompts) + generation_config.max_length - input_ids.shape[1]
        capacity += draft.config.block_size
        num_layers = target.config.get_text_config(decoder=True).num_hidden_layers
        self.cache = RaggedCache(num_layers, len(self.rows), capacity)
        self.context = RaggedContext(draft.config, len(self.rows), capacity, draft.device, draft.dtype)
        self.twin = Twin(target, self.cache, draft.config.target_layer_ids)
        self.proposer = Proposer(draft, share_vocabulary(draft.config, target))

    def run(self) -> GenerateDecoderOnlyOutput | torch.Tensor:
        """Generate; sequences are padded on the right as plain generate() pads them."""
        self._prefill()
        while active := [row for row in self.rows if not row.transcript.stopped]:
            self._round(active)
        ids = [row.transcript.ids[0] for row in self.rows]
        pad = self.config._pad_token_tensor
        padding = 0 if pad is None else int(pad)
        sequences = nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=padding)
        if not self.config.return_dict_in_generate:
            return sequences
        only = self.rows[0].transcript
        return GenerateDecoderOnlyOutput(sequences=sequences, scores=only.scores, logits=only.logits)

    @torch.no_grad()
    def _prefill(self) -> None:
        lengths = [len(prompt) for prompt in self.prompts]
        tokens = FlatTokens.of([0] * len(lengths), lengths, self.prompts[0].device)
        ends = torch.tensor(lengths, device=tokens.rows.device).cumsum(0) - 1
        logits, features = self._forward(torch.cat(self.prompts), tokens, keep=ends)
        self._observe(features, tokens)
        for row, length, row_logits in zip(self.rows, lengths, logits, strict=True):
            row.length = length
            scores = row.processors(row.transcript.ids, row_logits[None].clone())
            token = draw(scores, do_sample=bool(self.config.do_sample)).tolist()
            row.transcript.commit(token, scores, row_logits[None])
            self.record.add_tokens(1)

    def _forward(
        self, ids: torch.Tensor, tokens: FlatTokens, keep: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Target forward of flat `ids` [T]: float32 logits (of the tokens in `keep`, or all) and features [1, T, ·]."""
        logits, features = self.twin.forward(ids, tokens, keep)
        return logits.to(dtype=torch.float32, device=ids.device), features

    def _observe(self, features: torch.Tensor, tokens: FlatTokens) -> None:
        self.context.committed = tokens
        self.draft.append_context(self.context, features, tokens.positions[None])

    @torch.no_grad()
    def _round(self, active: list[Row]) -> None:
        started = time.perf_counter()
        block = self._propose(active)
        c = self.policy.conditional(block.confidence_logits)
        verified = []
        for i, row in enumerate(active):
            room = row.transcript.room
            verified.append(self.policy.verified(None if c is None else c[i], None if room is None else room - 1))
        drafts = block.tokens.to(active[0].anchor.device)
        ids = [
            torch.cat((row.anchor[None], drafts[i, :count]))
            for i, (row, count) in enumerate(zip(active, verified, strict=True))
        ]
        counts = [count + 1 for count in verified]
        tokens = self._flat(active, counts)
        logits, features = self._forward(torch.cat(ids), tokens)

        committed, kept = [], []
        for i, (row, count, row_logits) in enumerate(zip(active, verified, logits.split(counts), strict=True)):
            q = self.policy.distribution(block.scores[i, :count].to(drafts.device), drafts[i, :count])
            committed.append(verify(row.transcript, drafts[i, :count], q, row_logits, row.processors))
            start = sum(counts[:i])
            kept.append(torch.arange(start, start + committed[-1][0], device=drafts.device))
        keep = torch.cat(kept)
        committed_tokens = self._flat(active, [count for count, _ in committed])
        self._observe(features[:, keep.to(features.device)], committed_tokens)
        milliseconds = 1000 * (time.perf_counter() - started)
        for i, row in enumerate(active):
            self._finish(row, i, block, c, verified[i], *committed[i], milliseconds)

    def _propose(self, active: list[Row]) -> DraftBlock:
        self.context.blocks = self._flat(active, [self.draft.config.block_size] * len(active))
        anchors = torch.stack([row.anchor for row in active])[:, None]
        positions = torch.tensor([row.length for row in active], device=self.draft.device)

        def choose(prefix: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            if not self.policy.processors:
                return self.policy.choose(prefix, logits)
            parts = []
            for i, row in enumerate(active):
                ids = torch.cat((row.transcript.ids, prefix[i : i + 1, 1:].to(row.transcript.ids.device)), dim=1)
                processors = RowProcessors(self.policy.processors, row.index, len(self.rows))
                parts.append(self.policy.choose(ids, logits[i : i + 1], processors))
            return torch.cat([scores for scores, _ in parts]), torch.cat([token for _, token in parts])

        return self.proposer.propose(self.context, anchors, positions, choose)

    def _flat(self, active: list[Row], counts: list[int]) -> FlatTokens:
        """The next `counts[i]` tokens of each active row on one axis."""
        of_row = {row.index: count for row, count in zip(active, counts, strict=True)}
        starts = [row.length for row in self.rows]
        return FlatTokens.of(starts, [of_row.get(row.index, 0) for row in self.rows], self.prompts[0].device)

    def _finish(
        self,
        row: Row,
        i: int,
        block: DraftBlock,
        c: torch.Tensor | None,
        verified: int,
        committed: int,
        accepted: int,
        milliseconds: float,
    ) -> None:
        ids = row.transcript.ids
        self.record.add_tokens(committed)
        self.record.add_round(
            Round(
                call=0,
                row=row.index,
                position=row.length,
                anchor=int(ids[0, -committed - 1]),
                draft_tokens=block.tokens[i].tolist(),
                confidence=None if c is None else c[i].tolist(),
                survival=None if block.survival is None else block.survival[i].tolist(),
                verified=verified,
                accepted=accepted,
                next_token=int(ids[0, -1]) if committed > accepted else None,
                milliseconds=milliseconds,
            )
        )
        row.length += committed
