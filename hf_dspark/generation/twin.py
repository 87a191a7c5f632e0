"""The twin of a target on the ragged path: the same weights, other attention, its taps read by hooks."""

import copy

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from .._compat import CACHE_KEY
from .attention import attend_raggedly
from .ragged_cache import FlatTokens, RaggedCache

CAPTURING = "transformers.utils.output_capturing"


class Twin:
    """A copy of the target's modules that shares every tensor, reads and writes `cache` and attends raggedly.

    The target itself is not touched: other calls may use it at the same time. Hidden states are taken by hooks around
    the decoder layers; transformers' own capturing hooks sit inside layers, where a compiled layer cannot run them.
    """

    def __init__(self, target: PreTrainedModel, cache: RaggedCache, target_layer_ids: list[int]):
        tensors = [*target.parameters(), *target.buffers()]
        self.model = copy.deepcopy(target, {id(tensor): tensor for tensor in tensors}).eval()
        self.cache = cache
        self._taps = target_layer_ids
        self._seen: dict[int, torch.Tensor] = {}
        for module in self.model.modules():
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                for key in [key for key, hook in hooks.items() if getattr(hook, "__module__", "") == CAPTURING]:
                    del hooks[key]
        attend_raggedly(self.model, cache)
        for i in target_layer_ids:
            if i < 0:
                self.layers[0].register_forward_pre_hook(self._keep_input, with_kwargs=True)
            else:
                self.layers[i].register_forward_hook(lambda module, inputs, output, i=i: self._keep(i, output))

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
        outputs: ModelOutput = self.model(**inputs, use_cache=True)
        features = torch.cat([self._seen[i] for i in self._taps], dim=-1)
        self._seen.clear()
        return outputs.logits[0] if keep is None else outputs.logits[0, keep], features
