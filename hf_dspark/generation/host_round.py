"""Rounds whose tokens are chosen on the host, since it has to see or to show scores; the forwards are the device's."""

import time
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from ..modeling_dspark import BackboneOutput
from .row_view import RowProcessors
from .verify import decided_probabilities, verify

if TYPE_CHECKING:
    from .ragged_loop import RaggedLoop, Row


class HostRounds:
    """The rounds of one `RaggedLoop` behind its prompts.

    Attributes:
        one_by_one: why none starts before the last one is read.
    """

    one_by_one = "the host decides about tokens"

    def __init__(self, loop: "RaggedLoop"):
        self._loop, self._policy, self._rounds = loop, loop.policy, loop.rounds

    def run(self, active: "list[Row]") -> None:
        """A round of the `active` rows."""
        started, drafted = time.perf_counter(), self._policy.should_draft()
        self._loop.recorded(lambda: self._round(active, drafted, started))

    def end(self) -> None:
        """Nothing is left to do: rounds are noted at once."""

    def _round(self, active: "list[Row]", drafted: bool, started: float) -> None:
        loop, rounds, policy = self._loop, self._rounds, self._policy
        graphs = loop.engine.graphs(rounds)
        width = graphs.width(len(active))
        n, count = len(active), policy.options.num_assistant_tokens
        backbone, block, c = rounds.propose_lanes(graphs, width, drafted), None, None
        if backbone is not None:
            backbone = BackboneOutput(backbone.hidden_states[:n], backbone.base_logits[:n])
            anchors = torch.tensor([[row.transcript.tokens[-1]] for row in active], device=loop.device)
            choose = partial(self._choose, active) if policy.processors else policy.choice
            block = loop.engine.proposer.walk(backbone, anchors, choose)
            c = policy.conditional(block.confidence_logits)
        lengths = [0] * n if block is None else policy.lengths(c, [row.room for row in active])
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
        loop.recorded(lambda: rounds.commit_lanes(loop.engine.graphs(rounds), width, committed, own, count))
        milliseconds = 1000 * (time.perf_counter() - started)
        for i, (row, (_, accepted, seen)) in enumerate(zip(active, decided, strict=True)):
            probabilities = {}
            if loop.record.probabilities:
                next_token = own[i] if committed[i] > accepted else None
                probabilities = {
                    "q": [] if scores is None else policy.draft_probabilities(drafts[i], scores[i]),
                    "p": decided_probabilities(seen, drafts[i, : lengths[i]].tolist(), accepted, next_token),
                }
            row.length += committed[i]
            loop.record.add_round(
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
        if ended := [row.index for row in active if row.transcript.stopped]:
            rounds.end(ended)

    def _choose(
        self, active: "list[Row]", prefix: torch.Tensor, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`DraftPolicy.choose` for rows whose texts have different lengths; `prefix` starts with the anchors."""
        parts = []
        for i, row in enumerate(active):
            text = row.transcript.ids
            ids = torch.cat((text, prefix[i : i + 1, 1:].to(text.device)), dim=1)
            processors = RowProcessors(self._policy.processors, row.index, self._loop.texts)
            parts.append(self._policy.choose(ids, logits[i : i + 1].to(text.device), processors))
        return tuple(torch.cat([part[i] for part in parts]).to(self._loop.device) for i in range(2))
