"""`warmup`: compile and record before the first call needs it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.utils import logging

from ..modeling_dspark import DSparkForCausalLM
from .engine import FIRST_SLOTS, MAX_ROWS, Engine
from .engines import engine_of
from .layout import bucket
from .options import draft_options
from .rounds import RoundOptions
from .warpers import Warpers


def warmup(
    target: PreTrainedModel, draft: DSparkForCausalLM, *, batch_size: int = 1, max_length: int | None = None
) -> float:
    """Make the fast path of a pair ready: caches reserved, layers compiled, rounds recorded in CUDA graphs.

    Covers short prompts, greedy decoding and, if the target's generation config samples, its sampling; for all numbers
    of rows up to `batch_size`, since rows end one by one. Later calls with `cache_implementation="static"` or a batch
    start at once.

    Args:
        target, draft: the pair.
        batch_size: rows of the largest batch, 1..64.
        max_length: tokens of a row, prompt included, that the caches should hold; by default they start small and grow.

    Returns:
        seconds it took.

    Raises:
        ValueError: for a pair or sizes that the fast path cannot serve.
    """
    started = time.perf_counter()
    if not 1 <= batch_size <= MAX_ROWS:
        raise ValueError(f"`batch_size` must be in 1..{MAX_ROWS}, got {batch_size}.")
    if max_length is not None and max_length < 1:
        raise ValueError(f"`max_length` must be a positive number of tokens, got {max_length}.")
    widths = [1 << i for i in reversed(range(bucket(batch_size).bit_length()))]
    with idle_engine(target, draft) as engine:
        rounds = engine.rounds(widths[0])
        engine.reserve(widths[0], (max_length or FIRST_SLOTS // 2) + rounds.block_size + 2, keep=False)
        rounds.ends.zero_()
        engine.prefill([[0]] * widths[0], widths[0])
        graphs = engine.graphs(rounds)
        if not graphs.enabled:
            return time.perf_counter() - started
        kinds = [(width, warpers) for warpers in _kinds(target) for width in widths]
        count, threshold, _ = draft_options(draft, target.generation_config)
        one_hot = draft.draft_sample_method == "greedy"
        for width, warpers in logging.tqdm(kinds, desc="warmup"):
            if warpers is not None:
                rounds.warpers.set(warpers)
            options = RoundOptions(count, threshold > 0, samples=warpers is not None, one_hot=one_hot)
            rounds.run(graphs, width, options)
        engine.record_prompts(graphs, widths[0])
    return time.perf_counter() - started


@contextmanager
def idle_engine(target: PreTrainedModel, draft: DSparkForCausalLM) -> Iterator[Engine]:
    """The engine of a pair outside of any generate() call.

    Raises:
        ValueError: for a pair without a fast path.
    """
    draft.attach_target(target)
    try:
        engine = engine_of(target, draft)
    except NotImplementedError as error:
        raise ValueError(f"This pair has no fast path: {error}.") from error
    if engine.held_here:
        raise ValueError("A generate() call of this pair is at work in this very thread. Call this before or after it.")
    with engine.held(), torch.no_grad():
        yield engine


def _kinds(target: PreTrainedModel) -> list[Warpers | None]:
    """Greedy, and the sampling that a call without options would do, if the device can do it."""
    config, _ = target._prepare_generation_config(None)
    if not config.do_sample:
        return [None]
    processors = target._get_logits_processor(
        generation_config=config, input_ids_seq_length=1, logits_processor=LogitsProcessorList(), device="cpu"
    )
    warpers = Warpers.of(processors)
    return [None] if warpers is None else [None, warpers]
