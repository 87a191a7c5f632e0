"""The byte floor of a round: what has to be read from memory once, over the bandwidth of the device."""

import statistics
import time
from collections.abc import Iterable

import torch
from torch import nn
from transformers import PreTrainedModel

from ..generation.memory import layer_widths, meta_target
from ..modeling_dspark import DSparkForCausalLM

FLOOR = "byte floor"


def byte_floor(target: PreTrainedModel, draft: DSparkForCausalLM, *, num_rows: int, context: int) -> dict[str, int]:
    """Bytes that a round of γ drafts has to read, by item.

    Weights count once a forward, whatever the number of rows; those of the draft's key and value projections twice
    (block and context), W2 once for each slot, the head once for the target and once for the draft. Rows of embedding
    tables, activations and logits are small beside these and left out.

    Args:
        num_rows: running rows. context: tokens of each in the caches.

    Raises:
        ValueError: for a target whose forward does not read all of its weights.
    """
    text = target.config.get_text_config(decoder=True)
    if getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None):
        raise ValueError("a mixture of experts reads a share of its weights that depends on the text")
    config = draft.config
    head = target.get_output_embeddings()
    w2 = 0 if draft.markov_head is None else _size([draft.markov_head.markov_w2])
    projections = [linear for layer in draft.layers for linear in layer.self_attn.key_value_projections()]
    draft_cache = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * draft.dtype.itemsize
    own_head = _size([draft.lm_head]) if config.has_lm_head else 0
    return {
        "target layers": _size([target.get_decoder()], without=[*_embeddings(target), head]),
        "target head": _size([head]),
        "draft layers": _size([draft], without=_embeddings(draft)) - w2 - own_head,
        "draft context": _size(projections),
        "draft head": own_head or _size([head]),
        "Markov W2": config.num_draft_tokens * w2,
        "target cache": num_rows * _cached(target, context),
        "draft cache": num_rows * context * draft_cache,
    }


def copy_bandwidth(device: torch.device, num_bytes: int = 1 << 31) -> float:
    """Bytes a second, read and written, of copies from one buffer to another of `num_bytes`: the median of ten.

    On a GPU with little memory left the buffers are smaller.
    """
    if device.type == "cuda":
        num_bytes = min(num_bytes, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    seconds = []
    for _ in range(12):
        _synchronize(device)
        started = time.perf_counter()
        copy.copy_(source)
        _synchronize(device)
        seconds.append(time.perf_counter() - started)
    return 2 * num_bytes / statistics.median(seconds[2:])


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _embeddings(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, nn.Embedding)]


def _size(modules: Iterable[nn.Module], without: Iterable[nn.Module] = ()) -> int:
    """Bytes of the parameters of modules, each once, without those of others."""
    left_out = {id(parameter) for module in without for parameter in module.parameters()}
    parameters = {id(parameter): parameter for module in modules for parameter in module.parameters()}
    return sum(p.numel() * p.element_size() for key, p in parameters.items() if key not in left_out)


def _cached(target: PreTrainedModel, context: int) -> int:
    """Bytes that the attention of one token reads from the target's cache; sliding layers see their window only."""
    text = target.config.get_text_config(decoder=True)
    window = getattr(text, "sliding_window", None)
    widths = layer_widths(meta_target(target.config))
    alike = ["sliding_attention" if window else "full_attention"] * len(widths)
    kinds = getattr(text, "layer_types", None) or alike
    seen = [min(context, window) if window and kind == "sliding_attention" else context for kind in kinds]
    return sum(n * width for n, width in zip(seen, widths, strict=True)) * target.dtype.itemsize
