"""Twins of a pair on the ragged path: the same weights, other attention, taps read by hooks."""

import copy
import inspect
from collections.abc import Iterator

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from .._compat import CACHE_KEY
from ..modeling_dspark import DSparkForCausalLM
from .attention import attend_raggedly
from .ragged_cache import FlatTokens, RaggedCache

CAPTURING = "transformers.utils.output_capturing"


def own_hooks(module: nn.Module) -> Iterator[tuple[dict, int]]:
    """(table, key) of the hooks of `module` that transformers' output capturing did not set."""
    for table in (module._forward_hooks, module._forward_pre_hooks):
        for key, hook in table.items():
            if getattr(hook, "__module__", "") != CAPTURING:
                yield table, key


def fingerprint(model: nn.Module) -> tuple:
    """Changes whenever modules, tensors or hooks of `model` are exchanged; new values in the same tensors are fine."""
    parts: list = []
    for module in model.modules():
        parts.append(id(module))
        parts += [id(module.__dict__.get("forward"))] + [key for _, key in own_hooks(module)]
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            parts.append(None if tensor is None else (id(tensor), tensor.data_ptr(), tensor.dtype))
    return tuple(parts)


def _shared(model: nn.Module) -> dict[int, object]:
    """Memo with which `copy.deepcopy` copies modules and shares tensors."""
    return {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}


def draft_twin(draft: DSparkForCausalLM) -> DSparkForCausalLM:
    """A copy of the draft's modules that shares every tensor; it may be fused and compiled.

    Its vocabulary is given with every call, and what the engine keeps at the draft stays there.
    """
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
        NotImplementedError: for a target whose logits come out differently here, for whatever reason.
    """

    def __init__(self, target: PreTrainedModel, cache: RaggedCache, target_layer_ids: list[int]):
        self.model = copy.deepcopy(target, _shared(target)).eval()
        self.cache = cache
        self._taps = target_layer_ids
        self._seen: dict[int, torch.Tensor] = {}
        self._keeps_logits = "logits_to_keep" in inspect.signature(target.forward).parameters
        for module in self.model.modules():
            for table in (module._forward_hooks, module._forward_pre_hooks):
                for key in [key for key, hook in table.items() if getattr(hook, "__module__", "") == CAPTURING]:
                    del table[key]
        ids = torch.arange(1, 12, device=target.device) % target.config.get_text_config(decoder=True).vocab_size
        expected = self.model(input_ids=ids[None], use_cache=False).logits[0]
        attend_raggedly(self.model, cache)
        for i in target_layer_ids:
            if i < 0:
                self.layers[0].register_forward_pre_hook(self._keep_input, with_kwargs=True)
            else:
                self.layers[i].register_forward_hook(lambda module, inputs, output, i=i: self._keep(i, output))
        self._compare(ids, expected)

    def _compare(self, ids: torch.Tensor, expected: torch.Tensor) -> None:
        """A family may do more in its attention than the interface shows: its own logits tell."""
        spans = [(0, 0, 8)], [(0, 8, 3)]  # a prompt, and tokens that must find it in the cache
        tokens = [FlatTokens.of(span, self.cache.num_rows, ids.device) for span in spans]
        logits = torch.cat([self.forward(part, at)[0] for part, at in zip(ids.split(8), tokens, strict=True)])
        difference = (logits.float() - expected.float()).norm() / expected.float().norm()
        if not difference < (1e-3 if expected.dtype == torch.float32 else 0.1):
            raise NotImplementedError(
                f"{type(self.model).__name__} computes other logits over the ragged cache (relative difference "
                f"{float(difference):.2g})"
            )

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers in order."""
        depth = self.model.config.get_text_config(decoder=True).num_hidden_layers
        lists = [m for m in self.model.modules() if isinstance(m, nn.ModuleList) and len(m) == depth]
        return list(lists[0])

    def _keep(self, i: int, output: torch.Tensor | tuple) -> None:
        self._seen[i] = output[0] if isinstance(output, tuple) else output

    def _keep_input(self, module: nn.Module, inputs: tuple, kwargs: dict) -> None:
        self._seen[-1] = inputs[0] if inputs else kwargs["hidden_states"]

    def forward(
        self, ids: torch.Tensor, tokens: FlatTokens, keep: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Flat `ids` [T] -> logits [T, V] (of the tokens in `keep`, or all) and tapped features [1, T, n_taps · H]."""
        self.cache.tokens = tokens
        inputs = {"input_ids": ids[None], "position_ids": tokens.positions[None], CACHE_KEY: self.cache}
        if keep is not None and self._keeps_logits:
            inputs["logits_to_keep"] = keep
        outputs: ModelOutput = self.model(**inputs, use_cache=True)
        features = torch.cat([self._seen[i] for i in self._taps], dim=-1)
        self._seen.clear()
        return outputs.logits[0] if keep is None or self._keeps_logits else outputs.logits[0, keep], features
