"""Twins of a pair on the ragged path: the same weights, other attention, taps read by hooks."""

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from .._compat import CACHE_KEY
from ..layers import is_plain
from ..modeling_dspark import DSparkForCausalLM
from .attention import attend_raggedly
from .pair import CAPTURING
from .ragged_cache import FlatTokens, RaggedCache


def _shared(model: nn.Module) -> dict[int, object]:
    """Memo with which `copy.deepcopy` copies modules and shares tensors."""
    return {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}


def draft_twin(draft: DSparkForCausalLM) -> DSparkForCausalLM:
    """A copy of the draft's modules that shares every tensor; it may be fused and compiled.

    Its vocabulary is given with every call, and what the engine keeps at the draft stays there.
    """
    linears = [linear for layer in draft.layers for linear in layer.self_attn.key_value_projections()]
    if all(is_plain(linear) for linear in linears):
        draft.context_projection(linears)  # made once at the draft itself, so that all its twins share it
    memo = _shared(draft)
    memo |= {id(vars(draft).get(name)): None for name in ("_vocabulary", "_engines")}
    if draft._fused is not None:
        memo[id(draft._fused)] = draft._fused
    return copy.deepcopy(draft, memo).eval()


class Twin:
    """A copy of the target's modules that shares every tensor, reads and writes `cache` and attends raggedly.

    The target itself is not touched: other calls may use it at the same time. Hidden states are taken by hooks around
    the decoder layers; transformers' own capturing hooks sit inside layers, where a compiled layer cannot run them.

    Raises:
        NotImplementedError: for a target whose layers give something else here, for whatever reason.
    """

    def __init__(self, target: PreTrainedModel, cache: RaggedCache, target_layer_ids: list[int]):
        self.model = copy.deepcopy(target, _shared(target)).eval()
        for config in (self.model.config, self.model.config.get_text_config(decoder=True)):
            if getattr(config, "output_router_logits", False):
                config.output_router_logits = False  # a loss for training, computed from masks that are not here
        self.cache = cache
        self._taps = target_layer_ids
        self._seen: dict[int, torch.Tensor] = {}
        self._keeps_logits = "logits_to_keep" in inspect.signature(target.forward).parameters
        for module in self.model.modules():
            for table in (module._forward_hooks, module._forward_pre_hooks):
                for key in [key for key, hook in table.items() if getattr(hook, "__module__", "") == CAPTURING]:
                    del table[key]
        self._try()
        for i in target_layer_ids:
            if i < 0:
                self.layers[0].register_forward_pre_hook(self._keep_input, with_kwargs=True)
            else:
                # transformers' last entry is the state after the final norm.
                module = self.layers[i] if i < len(self.layers) - 1 else self._stack[0]
                module.register_forward_hook(lambda module, inputs, output, i=i: self._keep(i, output))

    def _try(self) -> None:
        ids = torch.arange(1, 12, device=self.model.device)
        ids = ids % self.model.config.get_text_config(decoder=True).vocab_size
        try:
            expected = self._layer_states(lambda: self.model(input_ids=ids[None], use_cache=False))
            attend_raggedly(self.model, self.cache)
            self._compare(ids, expected)
        except (torch.OutOfMemoryError, NotImplementedError):
            raise
        except Exception as error:  # whatever a model's own code raises: it cannot run here, but elsewhere
            message = f"a trial of {type(self.model).__name__} failed ({type(error).__name__}: {error})"
            raise NotImplementedError(message) from error

    def _layer_states(
        self, run: Callable[[], Any], given: list[torch.Tensor] | None = None
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Input and output [T, H] of every layer while `run` runs; with `given`, layers get these inputs instead."""
        states: list[tuple[torch.Tensor, torch.Tensor]] = []

        def replace(module: nn.Module, inputs: tuple, kwargs: dict) -> tuple[tuple, dict]:
            here = (inputs[0] if inputs else kwargs["hidden_states"]) if given is None else given[len(states)][None]
            module._entered = here[0]
            return ((here, *inputs[1:]), kwargs) if inputs else (inputs, kwargs | {"hidden_states": here})

        def note(module: nn.Module, inputs: tuple, output: torch.Tensor | tuple) -> None:
            states.append((vars(module).pop("_entered"), (output[0] if isinstance(output, tuple) else output)[0]))

        hooks = [layer.register_forward_pre_hook(replace, with_kwargs=True) for layer in self.layers]
        hooks += [layer.register_forward_hook(note) for layer in self.layers]
        try:
            run()
        finally:
            for hook in hooks:
                hook.remove()
        return states

    def _compare(self, ids: torch.Tensor, expected: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """A family may do more in its attention than the interface shows: what its own layers give tells.

        Layer by layer, each from the same input: over a whole model the rounding of half precision may become large.
        """
        half = expected[0][0].dtype != torch.float32
        for span in [(0, 0, 8)], [(0, 8, 3)]:  # a prompt, and tokens that must find it in the cache
            part = slice(span[0][1], span[0][1] + span[0][2])
            self.cache.tokens = FlatTokens.of(span, self.cache.num_rows, ids.device)
            inputs = self._inputs(ids[part], self.cache.tokens)
            given = [entered[part] for entered, _ in expected]
            if len(expected) != len(self.layers):
                raise NotImplementedError(f"the layers of {type(self.model).__name__} cannot be watched")
            found = self._layer_states(partial(self.model, **inputs), given)
            for i, ((entered, left), (_, mine)) in enumerate(zip(expected, found, strict=True)):
                change = (left[part].float() - entered[part].float()).norm(dim=-1)
                error = (mine.float() - left[part].float()).norm(dim=-1)
                size = left[part].float().norm(dim=-1)
                if not (error <= (5e-2 if half else 1e-3) * change + (1e-2 if half else 1e-4) * size).all():
                    raise NotImplementedError(f"layer {i} of {type(self.model).__name__} differs over the ragged cache")

        self._check_windows()

    def _check_windows(self) -> None:
        """Windows must come to the attention function as its argument; in a mask or a cache they would be lost."""
        text = self.model.config.get_text_config(decoder=True)
        kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * len(self.layers)
        expected = kinds.count("sliding_attention") if getattr(text, "sliding_window", None) else 0
        told = sum(getattr(module, "ragged_window", None) is not None for module in self.model.modules())
        if told < expected:
            name = type(self.model).__name__
            raise NotImplementedError(f"{expected - told} layers of {name} do not tell the attention function a window")

    def _inputs(self, ids: torch.Tensor, tokens: FlatTokens) -> dict[str, Any]:
        positions = tokens.positions[None]
        return {"input_ids": ids[None], "position_ids": positions, CACHE_KEY: self.cache, "use_cache": True}

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers in order."""
        return list(self._stack[1])

    @property
    def _stack(self) -> tuple[nn.Module, nn.ModuleList]:
        """The module that runs the decoder layers and the final norm, and the layers."""
        depth = self.model.config.get_text_config(decoder=True).num_hidden_layers
        for module in self.model.modules():
            for child in module.children():
                if isinstance(child, nn.ModuleList) and len(child) == depth:
                    return module, child
        raise NotImplementedError(f"{type(self.model).__name__} has no list of {depth} decoder layers")

    def _keep(self, i: int, output: torch.Tensor | tuple | ModelOutput) -> None:
        self._seen[i] = output if isinstance(output, torch.Tensor) else output[0]

    def _keep_input(self, module: nn.Module, inputs: tuple, kwargs: dict) -> None:
        self._seen[-1] = inputs[0] if inputs else kwargs["hidden_states"]

    def forward(
        self, ids: torch.Tensor, tokens: FlatTokens, keep: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Flat `ids` [T] -> logits [T, V] (of the tokens in `keep`, or all) and tapped features [1, T, n_taps · H]."""
        self.cache.tokens = tokens
        inputs = self._inputs(ids, tokens)
        if keep is not None and self._keeps_logits:
            inputs["logits_to_keep"] = keep
        outputs: ModelOutput = self.model(**inputs)
        features = torch.cat([self._seen[i] for i in self._taps], dim=-1)
        self._seen.clear()
        return outputs.logits[0] if keep is None or self._keeps_logits else outputs.logits[0, keep], features
