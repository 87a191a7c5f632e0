"""A fresh draft that starts from its target's last layers instead of random weights."""

import torch
from torch import nn
from transformers import PreTrainedModel

from ..modeling_dspark import DSparkForCausalLM
from ..target import decoder_layers


@torch.no_grad()
def start_from_target(draft: DSparkForCausalLM, target: PreTrainedModel) -> list[str]:
    """Copy what fits of the target's last layers and final norm into the draft, and let `fc` begin as its last tap.

    A projection fits when name and shape are the same, a norm when it also computes the same (some families store
    their weights as differences from 1). What does not fit keeps its random weights.

    Returns:
        names of the draft's parameters that were set.
    """
    layers = list(decoder_layers(target) or [])
    pairs = [("norm", draft.norm, getattr(target.get_decoder(), "norm", None))]
    for i, own in enumerate(draft.layers if layers else []):
        theirs = layers[max(len(layers) - len(draft.layers) + i, 0)]
        for name, module in own.named_modules():
            if not list(module.children()):
                pairs.append((f"layers.{i}.{name}", module, _submodule(theirs, name)))
    done = [f"{name}.weight" for name, module, source in pairs if source is not None and _copy(module, source)]
    width = draft.config.hidden_size
    if draft.config.target_hidden_size == width:
        draft.fc.weight[:, -width:] += torch.eye(width, device=draft.fc.weight.device, dtype=draft.fc.weight.dtype)
        done.append("fc.weight")
    return done


def _submodule(module: nn.Module, name: str) -> nn.Module | None:
    try:
        return module.get_submodule(name)
    except AttributeError:
        return None


def _is_plain(weight: torch.Tensor) -> bool:
    """Whether its numbers are here, and are those that count: quantised weights have scales besides."""
    known = type(weight) is nn.Parameter and not weight.is_meta
    return known and weight.is_floating_point() and weight.dtype.itemsize > 1


def _copy(module: nn.Module, source: nn.Module) -> bool:
    """Take the weight over if `module` then computes what `source` does."""
    own, given = getattr(module, "weight", None), getattr(source, "weight", None)
    if own is None or given is None or own.shape != given.shape or not _is_plain(given):
        return False
    if getattr(source, "bias", None) is not None and getattr(module, "bias", None) is None:
        return False
    before = own.clone()
    own.copy_(given)
    x = torch.randn(2, own.shape[-1], generator=torch.Generator().manual_seed(0)).to(given)
    expected = source(x).float()
    if torch.allclose(module(x.to(own)).float().to(expected.device), expected, rtol=0.05, atol=0.05):
        return True
    own.copy_(before)
    return False
