"""The ragged path of one generate() call: rows of a batch in one cache, each accepting its own number of drafts.

All verify tokens of a round lie on one flat axis and ended rows leave it, so they cost nothing.
"""

import statistics
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import compress

import numpy as np
import torch
import torch.nn.functional as F
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from ..modeling_dspark import BackboneOutput, DSparkForCausalLM
from ..sampling import draw
from ..scheduling.scheduler import PrefixScheduler
from .device_round import DeviceRound
from .engine import Engine
from .graphs import Graphs, RecordingFailed
from .layout import bucket
from .options import KEEPS_ROWS
from .policy import AUTO, DraftPolicy
from .record import CallRecord
from .rounds import RoundOptions
from .row_view import RowCriteria, RowProcessors, Texts
from .stopping import Transcript
from .verify import decided_probabilities, verify
from .warpers import Warpers

UNLIMITED = 2**40
FEWEST_TIMES = 4  # between rounds, for their median


class Row:
    """One row of the batch: its text, and how many of its tokens are in the caches."""

    def __init__(self, index: int, prompt: list[int], transcript: Transcript, processors: LogitsProcessorList):
        self.index = index
        self.prompt = prompt
        self.transcript = transcript
        self.processors = processors
        self.length = len(prompt)

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
        texts: Texts = lambda: loop._texts()  # noqa: E731
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
        # Where nobody looks on, a round is noted while the next one is at work.
        self._watched = streamer is not None or not all(row.transcript.decided_by_ids for row in self.rows)
        self._unnoted: DeviceRound | None = None
        self._untold: DeviceRound | None = None  # of which the scheduler does not know yet
        self._answered: float | None = None  # when the device had finished the last round
        self._host_seconds: list[float] = []  # from there to the next one

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
            try:
                while active := self._active():
                    self._round(active)
            finally:
                self._note()
        if not self._watched and len(self._host_seconds) >= FEWEST_TIMES:
            self.engine.host_ms[self.rounds.num_rows] = 1000 * statistics.median(self._host_seconds)
        self.engine.texts = [row.held for row in self.rows]
        if self.streamer is not None:
            self.streamer.end()
        return self._output()

    def _texts(self) -> list[torch.Tensor]:
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

    def _prefill(self) -> None:
        rows, rounds = self.rows, self.rounds
        if self.policy.scheduler == AUTO:
            costs = self.engine.cost_model(rounds.num_rows, max(row.length for row in rows))
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

    def _round(self, active: list[Row]) -> None:
        self._reserve(max(row.length for row in active), keep=True)
        self._drafted = self.policy.should_draft()
        started = time.perf_counter()
        round_ = self._host_round if self.warpers is None else self._device_round
        self._recording(lambda: round_(active, started))

    def _recording(self, step: Callable[[], None]) -> None:
        """Run `step`; where its recording fails, again with less: without compiled layers, then without recordings."""
        while True:
            try:
                return step()
            except RecordingFailed as error:
                self.record.note(self.engine.give_way(error))
                self.record.set_captured(not self.engine.uncaptured)

    def _device_round(self, active: list[Row], started: float) -> None:
        options, rounds = self.policy.options, self.rounds
        graphs = self.engine.graphs(rounds)
        width = graphs.width(len(active))
        kind = RoundOptions(
            count=options.num_assistant_tokens,
            truncates=options.threshold > 0,
            samples=bool(self.config.do_sample),
            one_hot=self.policy.sample_method == "greedy",
        )
        launched = time.perf_counter()
        if self._answered is not None and len(active) == len(self.rows):
            self._host_seconds.append(launched - self._answered)
        self._answered = None  # until this one is through
        if self.policy.scheduler is None:
            lines = rounds.run(graphs, width, kind, meanwhile=self._catch_up)
        else:
            lines = self._scheduled(graphs, width, kind, active)
        self._answered = time.perf_counter()
        self._commit(active, lines, 1000 * (self._answered - started))

    def _commit(self, active: list[Row], lines: torch.Tensor, milliseconds: float) -> None:
        """Add to the texts what a round on the device returned."""
        n, gamma = len(active), self.rounds.gamma
        has_confidence = self._drafted and self.draft.confidence_head is not None
        c = self._confidences(lines)[:n] if has_confidence else None
        listed = lines[:n, : gamma + 3].tolist()
        done = DeviceRound(listed, c, self._drafted, milliseconds)
        for row, (*drafts, own, accepted, _) in zip(active, listed, strict=True):
            committed = row.transcript.commit([*drafts[:accepted], own])
            row.length += committed
            done.rows.append(row)
            done.committed.append(committed)
            if self._watched:
                done.note(self.record, first=-1)
        self._unnoted = None if self._watched else done
        self._untold = done if c is not None and self.policy.decides_before else None
        self._end(active)

    def _note(self) -> None:
        """Add the last round to the statistics."""
        last, self._unnoted = self._unnoted, None
        if last is not None:
            last.note(self.record)

    def _catch_up(self) -> None:
        """What can wait until the device is busy again."""
        self._note()
        last, self._untold = self._untold, None
        if last is not None and last.c is not None:
            self.policy.tell_scheduler(last.c, last.room)

    def _confidences(self, lines: torch.Tensor) -> np.ndarray:
        """c_k [L, γ] of what a round returned."""
        return lines.numpy()[:, self.rounds.gamma + 3 :].view(np.float32)

    def _scheduled(self, graphs: Graphs, width: int, kind: RoundOptions, active: list[Row]) -> torch.Tensor:
        """A round whose lengths the scheduler chooses; without drafts where they do not pay."""
        if not self._drafted:
            return self.rounds.run(graphs, width, replace(kind, count=0), meanwhile=self._catch_up)
        n = len(active)
        if self.policy.decides_before:  # one recording, as without a scheduler
            budget = self.policy.budget(n, pending=self._untold is not None)
            num_tokens = None if budget is None else n + budget
            return self.rounds.run(graphs, width, kind, num_tokens, meanwhile=self._catch_up)
        c = self.rounds.propose(graphs, width, kind, meanwhile=self._catch_up)
        lengths = self.policy.lengths(None if c is None else c[:n], self._room(active))
        return self.rounds.conclude(graphs, width, lengths, kind)

    @staticmethod
    def _room(active: list[Row]) -> list[int | None]:
        """Drafts that the length limit of each row leaves room for."""
        rooms = [row.transcript.room for row in active]
        return [None if room is None else room - 1 for room in rooms]

    def _host_round(self, active: list[Row], started: float) -> None:
        """A round whose tokens are chosen on the host; the forwards around it are the same."""
        rounds, policy = self.rounds, self.policy
        graphs = self.engine.graphs(rounds)
        width = graphs.width(len(active))
        n, count = len(active), policy.options.num_assistant_tokens
        backbone, block, c = rounds.propose_lanes(graphs, width, self._drafted), None, None
        if backbone is not None:
            backbone = BackboneOutput(backbone.hidden_states[:n], backbone.base_logits[:n])
            anchors = torch.tensor([[row.transcript.tokens[-1]] for row in active], device=self.device)
            choose = partial(self._choose, active) if policy.processors else policy.choice
            block = self.engine.proposer.walk(backbone, anchors, choose)
            c = policy.conditional(block.confidence_logits)
        lengths = [0] * n if block is None else policy.lengths(c, self._room(active))
        drafts = torch.zeros(n, rounds.gamma, dtype=torch.long) if block is None else block.tokens
        logits = rounds.verify_lanes(graphs, width, drafts, lengths, count).float()

        device = active[0].transcript.ids.device
        drafts, scores = drafts.to(device), None if block is None else block.scores.to(device)
        parts = logits[: sum(lengths) + n].to(device).split([length + 1 for length in lengths])
        decided = []
        for i, (row, length, row_logits) in enumerate(zip(active, lengths, parts, strict=True)):
            given = row_logits[:0] if scores is None else scores[i, :length]
            q = policy.distribution(given, drafts[i, :length])
            if q is not None:
                q = F.pad(q, (0, row_logits.shape[-1] - q.shape[-1]))
            decided.append(verify(row.transcript, drafts[i, :length], q, row_logits, row.processors))
        committed = [count for count, _, _ in decided]
        own = [row.transcript.tokens[-1] for row in active]
        # The tokens are in the texts already, so only this part may be done again.
        self._recording(lambda: rounds.commit_lanes(self.engine.graphs(rounds), width, committed, own, count))
        milliseconds = 1000 * (time.perf_counter() - started)
        for i, (row, (_, accepted, seen)) in enumerate(zip(active, decided, strict=True)):
            probabilities = {}
            if self.record.probabilities:
                next_token = own[i] if committed[i] > accepted else None
                probabilities = {
                    "q": [] if scores is None else policy.draft_probabilities(drafts[i], scores[i]),
                    "p": decided_probabilities(seen, drafts[i, : lengths[i]].tolist(), accepted, next_token),
                }
            row.length += committed[i]
            self.record.add_round(
                row.transcript,
                row=row.index,
                position=row.length - committed[i],
                draft_tokens=[] if block is None else block.tokens[i].tolist(),
                c=None if c is None else c[i].tolist(),
                verified=lengths[i],
                committed=committed[i],
                accepted=accepted,
                milliseconds=milliseconds,
                **probabilities,
            )
        self._end(active)

    def _choose(
        self, active: list[Row], prefix: torch.Tensor, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`DraftPolicy.choose` for rows whose texts have different lengths; `prefix` starts with the anchors."""
        parts = []
        for i, row in enumerate(active):
            text = row.transcript.ids
            ids = torch.cat((text, prefix[i : i + 1, 1:].to(text.device)), dim=1)
            processors = RowProcessors(self.policy.processors, row.index, self._texts)
            parts.append(self.policy.choose(ids, logits[i : i + 1].to(text.device), processors))
        return tuple(torch.cat([part[i] for part in parts]).to(self.device) for i in range(2))

    def _end(self, active: list[Row]) -> None:
        """Take rows that have ended off the lanes."""
        if ended := [row.index for row in active if row.transcript.stopped]:
            self.rounds.ends[ended] = 0
