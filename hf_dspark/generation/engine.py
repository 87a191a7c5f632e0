"""`Engine`: what the ragged path keeps of a pair between calls. Twins, caches, graphs; grown when needed, released."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ..context import common_length
from ..modeling_dspark import DSparkForCausalLM
from ..proposal import Proposer
from ..scheduling.cost_model import CostModel
from ..target import share_vocabulary
from . import fuse
from .graphs import TURN, Graphs, RecordingFailed, current, finish
from .pair import fingerprint, own_hooks
from .prompts import Prompts, pack
from .ragged_cache import FlatTokens, RaggedCache, RaggedContext
from .rounds import Rounds
from .timing import EngineTimer
from .twin import Twin, draft_twin

logger = logging.get_logger(__name__)

MAX_ROWS = 64
# A cache starts with this many slots a row, and grows by half.
FIRST_SLOTS = 1024
STEP = 64
PREFILL_TOKENS = 16384  # activations of a prompt forward stay below this many tokens


@dataclass(frozen=True)
class FastPath:
    """Switches of the ragged path, set as `draft.fast_path`.

    Attributes:
        capture: record rounds in CUDA graphs.
        compile: compile decoder layers and draft layers with torch.compile.
        fuse_projections: compute query, key and value (and gate and up) projections of the target as one product. Their
            weights become views of one matrix; values and state dict stay as they are, `release` undoes it.
        ahead: start a recorded round before the last one is read, so that the device does not wait for the host.
            Greedy texts are the same. Samples of a batch under one seed may be other draws of the same distribution
            from call to call: a row that ends moves the others to other random numbers, sooner or later.
    """

    capture: bool = True
    compile: bool = True
    fuse_projections: bool = True
    ahead: bool = True


class Engine:
    """Caches, twins and rounds of a pair, for one call at a time.

    Attributes:
        uncaptured: why rounds are not recorded, or "".
        unrecorded_prompts: why prompts are not recorded although rounds are, or "".
        texts: ids of the tokens that each row of the caches holds since the last call, if it ended well.
        host_ms: by number of rows (a power of two), milliseconds that rounds of the last call waited for the host.
    """

    def __init__(self, target: PreTrainedModel, draft: DSparkForCausalLM, options: FastPath):
        self._lock = threading.Lock()
        self._holder: int | None = None
        self._options = options
        num_layers = target.config.get_text_config(decoder=True).num_hidden_layers
        self._cache = RaggedCache(num_layers, 1, 16)
        self.twin = Twin(target, self._cache, draft.config.target_layer_ids)
        twin = draft_twin(draft)
        self._context = RaggedContext(twin.config, 1, 16, draft.device, draft.dtype, draft.context_window)
        self.texts: list[list[int]] = []
        self.host_ms: dict[int, float] = {}
        self._fused = fuse.Fused(self.twin.model, twin, options.fuse_projections)
        self._fingerprint = fingerprint(target), fingerprint(draft)
        self.proposer = Proposer(twin, share_vocabulary(twin.config, self.twin.model))
        self._compiled = fuse.Compiled(self.twin, twin) if options.compile else None
        self._rounds: dict[int, Rounds] = {}
        self._prompts: dict[int, Prompts] = {}
        self.unrecorded_prompts = ""
        self._costs: dict[int, CostModel] = {}
        self._graphs = Graphs(self._idle, self._recording)
        self.uncaptured = self._why_uncaptured(target, draft)

    def fits(self, target: PreTrainedModel, draft: DSparkForCausalLM, options: FastPath) -> bool:
        if (options, draft.context_window) != (self._options, self._context.window):
            return False
        return self._fingerprint == (fingerprint(target), fingerprint(draft))

    def _why_uncaptured(self, target: PreTrainedModel, draft: DSparkForCausalLM) -> str:
        if draft.device.type != "cuda":
            return f"no CUDA graphs on {draft.device.type}"
        if not self._options.capture:
            return "draft.fast_path switches capturing off"
        if any(True for model in (target, draft) for module in model.modules() for _ in own_hooks(module)):
            return "forward hooks would not run inside a CUDA graph"
        return ""

    def give_way(self, error: RecordingFailed) -> str:
        """Do with less after a recording failed: without compiled layers, then without recordings. Returns the note."""
        if self._compiled is not None:
            self._compiled = None
            for rounds in self._rounds.values():
                rounds.compiles = False
            return f"layers run uncompiled ({error})"
        self.uncaptured = f"rounds could not be recorded ({error})"
        return self.uncaptured

    @property
    def runs_ahead(self) -> bool:
        """Whether rounds are to start before the last one is read."""
        return self._options.ahead and not self.uncaptured

    @property
    def num_bytes(self) -> int:
        """Memory of the caches."""
        tensors = [*self._cache.tensors, *self._context.tensors]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @property
    def held_here(self) -> bool:
        """Whether a call of this very thread is at work, of which a criterion or processor has started another."""
        return self._holder == threading.get_ident()

    @contextmanager
    def held(self) -> Iterator[None]:
        """The engine for one call; other threads wait."""
        with self._lock, current(self.proposer.draft.device):
            self._holder = threading.get_ident()
            try:
                yield
            finally:
                self._holder = None
                finish(self.proposer.draft.device)  # what a call that was broken off has left

    def close(self) -> None:
        """Give graphs and buffers back; a call at work records its rounds anew."""
        with current(self.proposer.draft.device), TURN:
            finish(self.proposer.draft.device)
            self._graphs = Graphs(self._idle, self._recording)
            self._rounds, self._prompts = {}, {}

    def unfuse(self) -> None:
        """Make the weights of target and draft their own again; engines that still use them are built anew."""
        self._fused.undo()

    def rounds(self, num_rows: int) -> Rounds:
        """State for `num_rows` rows, a power of two."""
        if num_rows not in self._rounds:
            with torch.inference_mode(False):
                self._rounds[num_rows] = Rounds(
                    self.twin, self.proposer, self._context, num_rows, self._compiled is not None
                )
        return self._rounds[num_rows]

    def has_room(self, num_rows: int, slots: int) -> bool:
        return num_rows <= self._cache.num_rows and slots <= self._cache.capacity

    def reserve(self, num_rows: int, slots: int, keep: bool) -> None:
        """Room for `slots` tokens in each of `num_rows` rows; larger caches mean new graphs.

        keep: what the caches hold is still needed.
        """
        cache = self._cache
        if self.has_room(num_rows, slots):
            return
        if slots > cache.capacity:  # a text that grows is copied a few times only
            slots = whole_slots(max(slots, cache.capacity + cache.capacity // 2 if keep else 0))
        rows, capacity = max(num_rows, cache.num_rows), max(slots, cache.capacity)
        if rows * capacity > 4 * num_rows * slots:
            rows, capacity = num_rows, slots  # few long rows after many short ones, or the other way round
        self._graphs.clear()
        self.texts, self.unrecorded_prompts = [], ""
        try:
            for store in (cache, self._context):
                store.resize(rows, capacity, keep)
        except BaseException:  # some layers have the new size, others not
            for store in (cache, self._context):
                store.drop()
            raise

    @contextmanager
    def _idle(self) -> Iterator[None]:
        with self._active.idle():
            yield

    @contextmanager
    def _recording(self, static: bool | None) -> Iterator[None]:
        if self._compiled is None or static is None:
            yield
            return
        with self._compiled.on([*self._cache.tensors, *self._context.tensors], static):
            yield

    def held_tokens(self, prompts: list[list[int]]) -> list[int]:
        """How much of each prompt the caches hold from the last call; the last token of a prompt is always fed."""
        found = []
        for row, prompt in enumerate(prompts):
            text = self.texts[row] if row < len(self.texts) else []
            start = common_length(text, prompt[:-1])
            # A window that has moved on cannot go back.
            found.append(start if start == len(text) or self._context.holds_all(len(text)) else 0)
        return found

    def prefill(
        self,
        prompts: list[list[int]],
        num_rows: int,
        chunk: int | None = None,
        starts: list[int] | None = None,
        graphs: Graphs | None = None,
    ) -> torch.Tensor:
        """Fill the caches with `prompts` (ids of each row) and return the logits behind each, [rows, V].

        starts: how many tokens of each row the caches hold already.
        graphs: where short prompts may be recorded.
        """
        self.texts, logits = [], []
        for spans in pack([len(prompt) for prompt in prompts], chunk or PREFILL_TOKENS, starts):
            flat = [token for row, start, count in spans for token in prompts[row][start : start + count]]
            ids = torch.tensor(flat, device=self.proposer.draft.device)
            tokens = FlatTokens.of(spans, num_rows, ids.device)
            ends = torch.tensor([count for _, _, count in spans]).cumsum(0) - 1
            last = [start + count == len(prompts[row]) for row, start, count in spans]
            keep = ends[torch.tensor(last)].to(ids.device)
            with TURN:
                row_logits = self._recorded_prompt(graphs, num_rows, ids, tokens, keep)
                if row_logits is None:
                    row_logits, features = self.twin.forward(ids, tokens, keep)
                    self._context.committed = tokens
                    self.proposer.draft.append_context(self._context, features, tokens.positions[None])
            logits.append(row_logits[-len(keep) :] if len(keep) else row_logits[:0])
        return torch.cat(logits)

    def _recorded_prompt(
        self, graphs: Graphs | None, num_rows: int, ids: torch.Tensor, tokens: FlatTokens, keep: torch.Tensor
    ) -> torch.Tensor | None:
        """Logits [K, V] of the tokens in `keep` [K]; `None` where prompts are not recorded."""
        if graphs is None or not graphs.enabled or self.unrecorded_prompts:
            return None
        prompts = self._prompts_of(num_rows)
        if not prompts.fits(len(ids)):
            return None
        with self._recording_prompts():
            return prompts.run(graphs, ids, tokens, keep)
        return None

    def record_prompts(self, graphs: Graphs, num_rows: int) -> None:
        """Record the forwards of short prompts before one is met."""
        prompts = self._prompts_of(num_rows)
        if prompts.fits(1):
            with self._recording_prompts():
                prompts.record(graphs)

    @contextmanager
    def _recording_prompts(self) -> Iterator[None]:
        try:
            yield
        except RecordingFailed as error:
            self.unrecorded_prompts = f"prompts could not be recorded ({error})"

    def _prompts_of(self, num_rows: int) -> Prompts:
        if num_rows not in self._prompts:
            with torch.inference_mode(False):
                self._prompts[num_rows] = Prompts(self.twin, self.proposer, self._context, num_rows)
        return self._prompts[num_rows]

    def cost_model(self, num_rows: int, context_length: int) -> CostModel:
        """Measured costs of rounds of up to `num_rows` rows, a power of two.

        The device's part is measured on the first use, the host's part is that of the last call, 0 before the first.
        """
        if num_rows not in self._costs:
            tokens = [num_rows * size for size in range(1, self.proposer.draft.config.num_draft_tokens + 2)]
            timer = EngineTimer(self, num_rows, context_length)
            self._costs[num_rows] = CostModel.measure(timer, token_counts=tokens, row_counts=[num_rows])
        host = self.host_ms.get(num_rows)
        return self._costs[num_rows].with_host({num_rows: host} if host else {})

    def graphs(self, rounds: Rounds) -> Graphs:
        """Where the steps of `rounds` are recorded, or just run."""
        self._active = rounds
        self._graphs.enabled = not self.uncaptured
        return self._graphs


def whole_slots(length: int) -> int:
    """Slots of a row that is to hold `length` tokens."""
    return -(-max(length, FIRST_SLOTS) // STEP) * STEP
