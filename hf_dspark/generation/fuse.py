"""Memory-bound savings on the twins of a pair: fused projections and compiled layers. Values stay as they are."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn

from ..modeling_dspark import DSparkForCausalLM, is_plain
from .twin import Twin

QUERY_KEY_VALUE, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
RECOMPILE_LIMIT = 64  # of one layer's code, over all models of a process


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


class Fused:
    """Query, key and value (and gate and up) projections of the twins, each group as one product.

    The weights become views of the fused matrix, in the twin and in the model that shares them: memory and values stay
    as they are. Of the draft only gate and up: its keys and values are fused already, over all layers.
    """

    def __init__(self, target: nn.Module, draft: nn.Module):
        self._weights: list[nn.Parameter] = []
        for model, groups in ((target, (QUERY_KEY_VALUE, GATE_UP)), (draft, (GATE_UP,))):
            for module in list(model.modules()):
                for names in groups:
                    self._fuse(module, names)

    def _fuse(self, module: nn.Module, names: tuple[str, ...]) -> None:
        linears = [linear for name in names if is_plain(linear := getattr(module, name, None))]
        if len(linears) < len(names):
            return
        weights = [linear.weight for linear in linears]
        biases = [linear.bias for linear in linears if linear.bias is not None]
        if len(biases) not in (0, len(linears)) or any(type(weight) is not nn.Parameter for weight in weights):
            return
        sizes = [linear.out_features for linear in linears]
        # Parameters that were made views in inference mode could never be trained again.
        with torch.inference_mode(False), torch.no_grad():
            weight = torch.cat([weight.detach() for weight in weights])
            for parameter, view in zip(weights, weight.split(sizes), strict=True):
                parameter.data = view
            bias = torch.cat([bias.detach() for bias in biases]) if biases else None
        self._weights += weights
        outputs = _Outputs()
        setattr(module, names[0], FusedFirst(weight, bias, sizes, outputs))
        for i, name in enumerate(names[1:], start=1):
            setattr(module, name, FusedNext(i, outputs))

    def undo(self) -> None:
        """Give every weight memory of its own again."""
        with torch.inference_mode(False), torch.no_grad():
            for parameter in self._weights:
                parameter.data = parameter.data.clone()
        self._weights.clear()


class Compiled:
    """Decoder layers, norms and rotary tables of the twins, compiled one by one: equal layers share one compilation."""

    def __init__(self, target: Twin, draft: DSparkForCausalLM):
        base = getattr(target.model, target.model.base_model_prefix, target.model)
        parts = [
            child for child in base.children() if "Norm" in type(child).__name__ or "Rotary" in type(child).__name__
        ]
        self._modules = [*target.layers, *parts, *draft.layers, draft.norm, draft.hidden_norm, draft.rotary_emb]
        self._compiled = [torch.compile(module.forward, fullgraph=True) for module in self._modules]

    @contextmanager
    def on(self, stores: list[torch.Tensor]) -> Iterator[None]:
        """Run the compiled forms inside; rows and slots of `stores` may change without a new compilation."""
        from torch import _dynamo as dynamo

        for store in stores:
            dynamo.mark_dynamic(store, (0, 2))
        plain = [module.forward for module in self._modules]
        for module, forward in zip(self._modules, self._compiled, strict=True):
            module.forward = forward
        try:
            with dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT, accumulated_recompile_limit=4096):
                yield
        finally:
            for module, forward in zip(self._modules, plain, strict=True):
                module.forward = forward
