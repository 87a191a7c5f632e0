"""From a `TrainingConfig` to what a run needs: target, texts, draft."""

import json
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from .. import formats
from ..default_pair import setup_demo
from ..modeling_dspark import DSparkForCausalLM
from . import checkpoint
from .config import TrainingConfig
from .data import Texts
from .from_target import start_from_target
from .new_draft import new_draft, unused_token
from .teacher import Teacher

logger = logging.get_logger(__name__)


class Parts(NamedTuple):
    """`draft` is float32, on the device and attached to the target, which `teacher` holds."""

    teacher: Teacher
    draft: DSparkForCausalLM
    texts: Texts
    validation_texts: Texts | None


def load_parts(config: TrainingConfig, device: torch.device, newest: Path | None) -> Parts:
    """Load everything on `device`; the draft from `newest`, a checkpoint, if there is one."""
    name = config.target or str(setup_demo())
    target = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, config.dtype)).to(device)
    size = target.config.get_text_config(decoder=True).vocab_size
    texts = Texts.read(config.data, config.max_length, size)
    used, validation_texts = texts.used_tokens(), None
    if config.validation_data:
        validation_texts = Texts.read(config.validation_data, config.max_length, size)
    elif config.num_validation_texts:
        texts, validation_texts = texts.split(config.num_validation_texts)
    source = config.init_from if newest is None else newest / checkpoint.DRAFT
    if source is not None:
        draft = DSparkForCausalLM.from_pretrained(source, dtype=torch.float32)
    else:
        draft = _fresh_draft(config, target, name, used)
    formats.foreign_config(draft.config)  # what cannot be saved is refused before the work
    draft.to(device).attach_target(target)
    compiled = device.type == "cuda" if config.compile is None else config.compile
    teacher = Teacher(target, draft.config.target_layer_ids, compiled=compiled)
    return Parts(teacher, draft.train(), texts, validation_texts)


def _fresh_draft(config: TrainingConfig, target: PreTrainedModel, name: str, used: set[int]) -> DSparkForCausalLM:
    mask = config.mask_token_id
    if mask is None:
        mask = unused_token(target, _tokenizer(name), used)
    draft = new_draft(
        target,
        mask_token_id=mask,
        num_hidden_layers=config.num_hidden_layers,
        block_size=config.block_size,
        target_layer_ids=config.target_layer_ids,
        markov_rank=config.markov_rank,
        markov_head_type=config.markov_head_type,
        enable_confidence_head=config.enable_confidence_head,
    )
    taken = start_from_target(draft, target) if config.from_target else []
    logger.info(
        f"New draft: taps {draft.config.target_layer_ids}, mask token {mask}, {len(taken)} tensors from the target."
    )
    return draft


def _tokenizer(name: str) -> PreTrainedTokenizerBase | None:
    """The target's tokenizer, if its folder or repository has one."""
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, json.JSONDecodeError) as error:
        logger.warning(
            f"{name} has no tokenizer that can be read; the mask token is a token that the text lacks: {error}"
        )
        return None
