"""Whether a pair can take the ragged path, and whether it is still the pair it was."""

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel

from ..layers import is_plain
from ..modeling_dspark import DSparkForCausalLM

CAPTURING = "transformers.utils.output_capturing"
ADAPTER_STATE = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")
LAYER_TYPES = {"full_attention", "sliding_attention"}


def own_hooks(module: nn.Module) -> Iterator[tuple[dict, int]]:
    """(table, key) of the hooks of `module` that transformers' output capturing did not set."""
    for table in (module._forward_hooks, module._forward_pre_hooks):
        for key, hook in table.items():
            if getattr(hook, "__module__", "") != CAPTURING:
                yield table, key


def fingerprint(model: nn.Module) -> tuple:
    """Changes whenever modules, tensors or hooks of `model` are exchanged; new values in the same tensors are fine.

    Every call waits for it, so it goes through the modules and their tables itself.
    """
    parts: list = []
    seen, waiting = set(), [model]
    while waiting:
        module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        own = vars(module)
        parts.append(id(module))
        parts.append(id(own.get("forward")))
        if own["_forward_hooks"] or own["_forward_pre_hooks"]:
            parts += [key for _, key in own_hooks(module)]
        for table in (own["_parameters"], own["_buffers"]):
            for tensor in table.values():
                parts.append(None if tensor is None else (id(tensor), tensor.data_ptr(), tensor.dtype))
        if "_active_adapter" in own:  # PEFT switches its layers by plain attributes
            parts.append(repr([own.get(name) for name in ADAPTER_STATE]))
        waiting += [child for child in own["_modules"].values() if child is not None]
    return tuple(parts)


def why_not_now(target: PreTrainedModel) -> str | None:
    """What of a target the ragged path cannot honour and no fingerprint shows: to be asked for every call."""
    text = target.config.get_text_config(decoder=True)
    kinds = set(getattr(text, "layer_types", None) or ()) - LAYER_TYPES
    if kinds:
        return f"the ragged path has no {', '.join(sorted(kinds))} layers"
    if getattr(text, "num_kv_shared_layers", 0):
        return "the ragged path has no layers that share keys and values"
    if target.training:
        return "the ragged path runs no dropout, and the target is in train mode"
    method = type(target).prepare_inputs_for_generation
    if "prepare_inputs_for_generation" in vars(target) or not method.__module__.startswith("transformers."):
        return f"{type(target).__name__} has a `prepare_inputs_for_generation` of the caller's"
    if not getattr(target, "_supports_attention_backend", False):
        return f"{type(target).__name__} does not use transformers' attention interface"
    return None


def why_not_target(target: PreTrainedModel) -> str | None:
    """What of a target the ragged path cannot honour; its weights are not looked at."""
    if why_not := why_not_now(target):
        return why_not
    if any("forward" in vars(module) or hasattr(module, "_orig_mod") for module in target.modules()):
        return "the ragged path runs modules of its own, and a `forward` of the target was replaced or compiled"
    return None


def why_not_pair(target: PreTrainedModel, draft: DSparkForCausalLM) -> str | None:
    """What of a pair the ragged path cannot honour, as far as it shows before the twins are made."""
    if why_not := why_not_target(target):
        return why_not
    devices = {tensor.device for model in (target, draft) for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) > 1:
        return f"the ragged path needs target and draft on one device, not on {', '.join(sorted(map(str, devices)))}"
    if draft.markov_head is not None and not is_plain(draft.markov_head.markov_w2):
        return "the ragged path needs the Markov head as plain weights"
    return None
