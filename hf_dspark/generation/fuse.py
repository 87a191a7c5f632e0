"""Memory-bound savings on the twins of a pair: fused projections and compiled layers. Values stay as they are."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from .. import kernels
from ..compiling import many_shapes, opaque
from ..layers import is_plain
from ..modeling_dspark import DSparkForCausalLM
from .twin import Twin

QUERY_KEY_VALUE, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
FEW_ROWS = 16  # up to here the kernel beats the library (benchmarks/kernels_h200.json)


def _empty_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@opaque("hf_dspark::linear", _empty_linear)
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`F.linear`, for few rows of half precision on CUDA by the kernel that streams the weights."""
    rows = x.numel() // x.shape[-1]
    if rows > FEW_ROWS or not x.is_cuda or x.dtype == torch.float32 or not kernels.use_kernels(x):
        return F.linear(x, weight, bias)
    return kernels.linear(x.reshape(rows, x.shape[-1]), weight, bias).view(*x.shape[:-1], weight.shape[0])


class StreamedLinear(nn.Linear):
    """What the plain linear layers of a twin become."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


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
        self.outputs.parts = linear(x, self.fused_weight, self.fused_bias).split(self.sizes, dim=-1)
        return self.outputs.parts[0]


class FusedNext(nn.Module):
    """Hands on what `FusedFirst` computed; the last one forgets it."""

    def __init__(self, index: int, last: bool, outputs: _Outputs):
        super().__init__()
        self.index, self.last, self.outputs = index, last, outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = self.outputs.parts[self.index]
        if self.last:
            self.outputs.parts = ()
        return part


class Fused:
    """Linear layers of the twins, as few products as the weights' order allows, each streaming its weights once.

    Query, key and value (and gate and up) projections become one product a group, and their weights views of one
    matrix, in the twin and in the model that shares them: memory and values stay as they are.
    """

    def __init__(self, target: nn.Module, draft: DSparkForCausalLM, projections: bool):
        self._parameters: list[nn.Parameter] = []
        modules = [module for model in (target, draft) for module in model.modules()]
        self._uses = Counter(id(p) for module in modules for p in module._parameters.values())
        if projections:
            for module in list(target.modules()):
                self._fuse(module, QUERY_KEY_VALUE)
                self._fuse(module, GATE_UP)
            for layer in draft.layers:
                self._fuse(layer.mlp, GATE_UP)
        self._fuse_context(draft)
        for model in (target, draft):
            for module in model.modules():
                if is_plain(module):
                    module.__class__ = StreamedLinear

    def _fuse(self, module: nn.Module, names: tuple[str, ...]) -> None:
        linears = [linear for name in names if is_plain(linear := getattr(module, name, None))]
        if len(linears) < len(names):
            return
        weights = [linear.weight for linear in linears]
        biases = [linear.bias for linear in linears if linear.bias is not None]
        if len(biases) not in (0, len(linears)) or any(type(weight) is not nn.Parameter for weight in weights):
            return
        if any(self._uses[id(parameter)] > 1 for parameter in (*weights, *biases)):
            return  # a shared parameter can be a view of one matrix only
        # Parameters that were made views in inference mode could never be trained again.
        with torch.inference_mode(False), torch.no_grad():
            _replace(module, names, _as_one(weights), _as_one(biases) if biases else None)
        self._parameters += [*weights, *biases]

    def _fuse_context(self, draft: DSparkForCausalLM) -> None:
        """The draft keeps keys and values of all layers in one matrix already; each layer's part of it is a product."""
        layers = [layer.self_attn for layer in draft.layers]
        linears = [linear for layer in layers for linear in layer.key_value_projections()]
        if not all(is_plain(linear) and linear.bias is None for linear in linears):
            return  # the biases of all layers would be a copy
        weight, bias = draft.context_projection(linears)
        setattr(draft, "project_context", partial(linear, weight=weight, bias=bias))  # noqa: B010 (a method)
        if len(linears) == len(layers):  # values are keys: one projection a layer
            return
        size = len(weight) // len(layers)
        for i, layer in enumerate(layers):
            part = slice(i * size, (i + 1) * size)
            _replace(layer, ("k_proj", "v_proj"), weight[part], None)

    def undo(self) -> None:
        """Give every weight memory of its own again."""
        with torch.inference_mode(False), torch.no_grad():
            for parameter in self._parameters:
                parameter.data = parameter.data.clone()
        self._parameters.clear()


def _as_one(weights: list[nn.Parameter]) -> torch.Tensor:
    """The matrix [ΣN, K] (or vector) of which the weights [N, K] are views, from an earlier call or as of now."""
    first = weights[0].detach()
    ends = [weight.data_ptr() + weight.nbytes for weight in weights]
    storages = {weight.untyped_storage().data_ptr() for weight in weights}
    if len(storages) == 1 and ends[:-1] == [weight.data_ptr() for weight in weights[1:]]:
        return first.as_strided((sum(map(len, weights)), *first.shape[1:]), first.stride())
    one = torch.cat([weight.detach() for weight in weights])
    for parameter, view in zip(weights, one.split([len(weight) for weight in weights]), strict=True):
        parameter.data = view
    return one


def _replace(module: nn.Module, names: tuple[str, ...], weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    sizes = [getattr(module, name).out_features for name in names]
    outputs = _Outputs()
    setattr(module, names[0], FusedFirst(weight, bias, sizes, outputs))
    for i, name in enumerate(names[1:], start=1):
        setattr(module, name, FusedNext(i, i == len(names) - 1, outputs))


class Compiled:
    """Decoder layers, norms and rotary tables of the twins, compiled one by one: equal layers share one compilation.

    In two forms. Static: for the shapes at hand, faster. Dynamic: one compilation for all numbers of tokens.
    """

    def __init__(self, target: Twin, draft: DSparkForCausalLM):
        base = getattr(target.model, target.model.base_model_prefix, target.model)
        parts = [child for child in base.children() if any(kind in type(child).__name__ for kind in ("Norm", "Rotary"))]
        self._modules = [*target.layers, *parts, *draft.layers, draft.norm, draft.hidden_norm, draft.rotary_emb]
        if draft.confidence_head is not None:
            self._modules.append(draft.confidence_head)
        self._compiled = {
            static: [torch.compile(module.forward, fullgraph=True, dynamic=not static) for module in self._modules]
            for static in (True, False)
        }

    @contextmanager
    def on(self, stores: list[torch.Tensor], static: bool) -> Iterator[None]:
        """Run the compiled forms inside; rows and slots of `stores` may change without a new compilation."""
        from torch import _dynamo as dynamo

        for store in stores:
            dynamo.mark_dynamic(store, (0, 2))
        plain = [module.forward for module in self._modules]
        for module, forward in zip(self._modules, self._compiled[static], strict=True):
            module.forward = forward
        try:
            with many_shapes():
                yield
        finally:
            for module, forward in zip(self._modules, plain, strict=True):
                module.forward = forward
