"""Memory-bound savings on the twin of a target: fused projections and compiled layers. The target's values stay."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class _Outputs:
    """What one product gave, for the modules whose turn comes after."""

    parts: tuple[torch.Tensor, ...] = ()


class FusedFirst(nn.Module):
    """The first of a group of linear layers over one input: computes all of them in one product."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, sizes: list[int], outputs: _Outputs):
        super().__init__()
        self.fused_weight, self.fused_bias = weight, bias
        self.sizes, self.outputs = sizes, outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.outputs.parts = F.linear(x, self.fused_weight, self.fused_bias).split(self.sizes, dim=-1)
        return self.outputs.parts[0]


class FusedNext(nn.Module):
    """Hands on what `FusedFirst` computed."""

    def __init__(self, index: int, outputs: _Outputs):
        super().__init__()
        self.index, self.outputs = index, outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outputs.parts[self.index]


def fuse_projections(twin: nn.Module) -> None:
    """Compute query, key and value (and gate and up) projections as one product each.

    The weights become views of the fused matrix, here and in the target that shares them, so memory and values stay as
    they are.
    """
    for module in list(twin.modules()):
        for names in GROUPS:
            linears = [getattr(module, name, None) for name in names]
            if all(type(linear) is nn.Linear for linear in linears):
                _fuse(module, names, linears)


def _fuse(module: nn.Module, names: tuple[str, ...], linears: list[nn.Linear]) -> None:
    biases = [linear.bias for linear in linears]
    if len({bias is None for bias in biases}) > 1:
        return
    sizes = [linear.out_features for linear in linears]
    with torch.no_grad():
        weight = torch.cat([linear.weight.detach() for linear in linears])
        for linear, view in zip(linears, weight.split(sizes), strict=True):
            linear.weight.data = view
    bias = None if biases[0] is None else torch.cat([bias.detach() for bias in biases])
    outputs = _Outputs()
    setattr(module, names[0], FusedFirst(weight, bias, sizes, outputs))
    for i, name in enumerate(names[1:], start=1):
        setattr(module, name, FusedNext(i, outputs))


def compile_layers(layers: list[nn.Module]) -> Callable[[bool], None]:
    """Compile decoder layers, one compilation for all; returns a switch, compiled (True) or eager."""
    eager = [layer.forward for layer in layers]
    compiled = [torch.compile(forward, fullgraph=True, dynamic=False) for forward in eager]

    def switch(on: bool) -> None:
        for layer, forward in zip(layers, compiled if on else eager, strict=True):
            layer.forward = forward

    return switch
