"""The ragged path of one generate() call: rows of a batch in one cache, each accepting its own number of drafts.

All verify tokens of a round lie on one flat axis and ended rows leave it, so they cost nothing.
"""

import weakref
from collections.abc import Callable
from itertools import compress
from typing import TypeVar

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from ..modeling_dspark import DSparkForCausalLM
from ..sampling import draw
from ..scheduling.scheduler import PrefixScheduler
from .device_round import DeviceRounds
from .engine import Engine
from .graphs import RecordingFailed
from .host_round import HostRounds
from .layout import bucket
from .options import KEEPS_ROWS
from .policy import AUTO, DraftPolicy
from .record import CallRecord
from .row_view import RowCriteria, RowProcessors, Texts
from .stopping import Transcript
from .warpers import Warpers

UNLIMITED = 2**40
T = TypeVar("T")


class Row:
    """One row of the batch: its text, and how many of its tokens are in the caches."""

    def __init__(self, index: int, prompt: list[int], transcript: Transcript, processors: LogitsProcessorList):
        self.index = index
        self.prompt = prompt
        self.transcript = transcript
        self.processors = processors
        self.length = len(prompt)

    @property
    def room(self) -> int | None:
        """Drafts that the length limit leaves room for; `None` without limit."""
        room = self.transcript.room
        return None if room is None else room - 1

    @property
    def held(self) -> list[int]:
        """Ids of the tokens in the caches."""
        return [*self.prompt, *self.transcript.tokens][: self.length]


class RaggedLoop:
    """State of one generate() call; the engine's lock is held while it runs."""

    def __init__(
        self,
        engine: Engine,
        draft: DSparkForCausalLM,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None,
        record: CallRecord,
    ):
        self.engine = engine
        self.draft = draft
        self.config = generation_config
        self.streamer = streamer
        self.record = record
        self.policy = DraftPolicy(draft, generation_config, logits_processor)
        for note in self.policy.notes:
            record.note(note)
        self._input_ids, self._processors = input_ids, logits_processor
        num_rows = input_ids.shape[0]
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        prompts = [list(compress(ids, real)) for ids, real in zip(input_ids.tolist(), mask.tolist(), strict=True)]
        # Rows know the loop weakly: in a cycle, scores and draft would stay until Python looks for cycles.
        loop = weakref.proxy(self)
        texts: Texts = lambda: loop.texts()  # noqa: E731
        self.rows = [
            Row(
                i,
                prompts[i],
                Transcript(input_ids[i : i + 1], RowCriteria(stopping_criteria, i, texts), streamer, generation_config),
                RowProcessors(logits_processor, i, texts),
            )
            for i in range(num_rows)
        ]
        # Without end-of-text ids plain generate() lets rows that have ended run on until the last one has.
        self._runs_on = num_rows > 1 and not any(hasattr(c, "eos_token_id") for c in stopping_criteria)
        self.device = draft.device
        self.rounds = engine.rounds(bucket(num_rows))
        self.warpers = self._device_warpers(logits_processor)

    def _device_warpers(self, processors: LogitsProcessorList) -> Warpers | None:
        """How the device samples; `None` if the host must decide, since it has to see or to show scores."""
        shown = self.rows[0].transcript
        if shown.scores is not None or shown.logits is not None or self.record.probabilities:
            return None
        return Warpers.of(processors) if self.config.do_sample else None if processors else Warpers()

    def run(self) -> GenerateDecoderOnlyOutput | torch.Tensor:
        """Generate; sequences are padded on the right as plain generate() pads them."""
        self.record.set_captured(not self.engine.uncaptured)
        with torch.no_grad():
            self._prefill()
            # It knows the loop, so the loop does not keep it.
            steps = HostRounds(self) if self.warpers is None else DeviceRounds(self)
            if self.engine.runs_ahead and steps.one_by_one:
                self.record.note(f"rounds do not run ahead, {steps.one_by_one}", log=False)
            try:
                while active := self._active():
                    self._reserve(max(row.length for row in active), keep=True)
                    steps.run(active)
            finally:
                steps.end()
        self.engine.texts = [row.held for row in self.rows]
        if self.streamer is not None:
            self.streamer.end()
        return self._output()

    def texts(self) -> list[torch.Tensor]:
        return [row.transcript.ids for row in self.rows]

    def _active(self) -> list[Row]:
        active = [row for row in self.rows if not row.transcript.stopped]
        if active or not self._runs_on:
            return active
        self._runs_on, longest = False, max(len(row.transcript) for row in self.rows)
        active = [row for row in self.rows if len(row.transcript) < longest]
        for row in active:
            row.transcript.run_on(longest)
        if active:
            self._open()
        return active

    def _output(self) -> GenerateDecoderOnlyOutput | torch.Tensor:
        pad = self.config._pad_token_tensor
        padding = 0 if pad is None else int(pad)
        texts = [row.transcript.tokens for row in self.rows]
        longest = max(map(len, texts))
        new = torch.tensor([text + [padding] * (longest - len(text)) for text in texts], device=self._input_ids.device)
        sequences = torch.cat((self._input_ids, new), dim=1)
        if not self.config.return_dict_in_generate:
            return sequences
        scores, logits = (self._stacked(name) for name in ("scores", "logits"))
        return GenerateDecoderOnlyOutput(sequences=sequences, scores=scores, logits=logits)

    def _stacked(self, name: str) -> tuple[torch.Tensor, ...] | None:
        """Scores or logits [B, V] step by step; rows that ended repeat their last ones."""
        of_rows = [getattr(row.transcript, name) for row in self.rows]
        if of_rows[0] is None:
            return None
        steps = max(len(values) for values in of_rows)
        return tuple(torch.cat([values[min(i, len(values) - 1)] for values in of_rows]) for i in range(steps))

    # ---- prompt

    def _reserve(self, length: int, keep: bool) -> None:
        """Room for one more round behind `length` tokens."""
        self.engine.reserve(self.rounds.num_rows, length + self.rounds.block_size + 2, keep)

    def has_room(self, length: int) -> bool:
        """Whether the caches take one more round behind `length` tokens as they are."""
        return self.engine.has_room(self.rounds.num_rows, length + self.rounds.block_size + 2)

    def _prefill(self) -> None:
        rows, rounds = self.rows, self.rounds
        if self.policy.scheduler == AUTO:
            longest = max(row.length for row in rows)
            costs = self.recorded(lambda: self.engine.cost_model(rounds.num_rows, longest))
            self.policy.scheduler = PrefixScheduler(costs, lagged=True, min_gain=0.01)
        new = min(self.config.max_length - rows[0].transcript.prompt_length, 512)
        keeps = getattr(self.config, KEEPS_ROWS, False)
        starts = self.engine.held_tokens([row.prompt for row in rows]) if keeps else [0] * len(rows)
        self.record.add_reused(sum(starts))
        self._reserve(max(row.length for row in rows) + new, keep=any(starts))
        chunk, graphs = self.config.prefill_chunk_size, self.engine.graphs(rounds)
        logits = self.engine.prefill([row.prompt for row in rows], rounds.num_rows, chunk, starts, graphs)
        self.record.note(self.engine.unrecorded_prompts)
        self._begin(logits.to(dtype=torch.float32, device=self._input_ids.device))
        self.record.add_tokens(len(rows))
        self._open()

    def _begin(self, logits: torch.Tensor) -> None:
        """The first token of every row, from the `logits` [B, V] behind its prompt."""
        do_sample = bool(self.config.do_sample)
        if self.warpers is not None:  # they look at nothing but scores, so rows need not be shown one by one
            tokens = draw(self._processors(self._input_ids, logits), do_sample).tolist()
            for row, token in zip(self.rows, tokens, strict=True):
                row.transcript.commit([token])
            return
        for row, row_logits in zip(self.rows, logits, strict=True):
            scores = row.processors(row.transcript.ids, row_logits[None].clone())
            row.transcript.commit(draw(scores, do_sample).tolist(), scores, row_logits[None])

    def _open(self) -> None:
        """Tell the device what the rows and the options are."""
        rounds, options = self.rounds, self.policy.options
        ends, anchors, lengths = ([0] * rounds.num_rows for _ in range(3))
        for row in self.rows:
            room = UNLIMITED if row.transcript.room is None else row.transcript.room
            anchors[row.index], lengths[row.index] = row.transcript.tokens[-1], row.length
            ends[row.index] = 0 if row.transcript.stopped else row.length + 1 + room
        for buffer, values in ((rounds.ends, ends), (rounds.anchors, anchors), (rounds.lengths, lengths)):
            buffer.copy_(torch.tensor(values))
        rounds.threshold.fill_(options.threshold)
        temperatures = self.draft.config.confidence_temperatures
        rounds.temperatures.copy_(torch.tensor(temperatures or [1.0] * rounds.gamma, dtype=torch.float32))
        if self.config.do_sample and self.warpers is not None:
            rounds.warpers.set(self.warpers)
            rounds.seed.copy_(torch.randint(2**62, (1,)))

    # ---- rounds

    def recorded(self, step: Callable[[], T]) -> T:
        """Run `step`; where its recording fails, again with less: without compiled layers, then without recordings."""
        while True:
            try:
                return step()
            except RecordingFailed as error:
                self.record.note(self.engine.give_way(error))
                self.record.set_captured(not self.engine.uncaptured)
