"""The frozen target of a training run: taps of whole texts in one forward, logits of the slots that are asked for."""

import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from .._compat import hidden_states_request
from ..compiling import many_shapes
from ..target import context_features, decoder_layers
from .anchors import gather_positions
from .rows import LogitRows, total


class Teacher:
    """Features and distributions of a target, computed as they are needed; nothing is stored.

    The target's parameters are frozen. Its head runs on the slots of the blocks only: all logits of 32 texts of 512
    tokens and 49,152 entries would take 3.2 GB.

    Args:
        compiled: compile the target's layers, one compilation for all that are equal. The target is then for this
            purpose only.

    Raises:
        ValueError: for a target whose logits are more than a function of its last hidden states, or whose layers are
            not found.
    """

    def __init__(self, target: PreTrainedModel, target_layer_ids: list[int], *, compiled: bool = False):
        self.target = target.eval().requires_grad_(False)
        self.size = target.config.get_text_config(decoder=True).vocab_size
        self._taps = list(target_layer_ids)
        self._head = _head_alone(target)
        self._seen: dict[int, torch.Tensor] | None = {} if compiled else None
        if compiled:
            self._compile()
        self._check_head()

    @torch.no_grad()
    def read(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Taps [B, S, n_taps · H] and last hidden states [B, S, H] of texts [B, S] that are padded on the right.

        No mask is passed: the target is causal, so padding behind a text cannot reach it, and attention without a mask
        is faster.
        """
        if self._seen is None:
            outputs = self.target.base_model(
                input_ids=input_ids, output_hidden_states=hidden_states_request(self._taps), use_cache=False
            )
            return context_features(outputs, self._taps), outputs.last_hidden_state
        with many_shapes():
            outputs = self.target.base_model(input_ids=input_ids, use_cache=False)
        features = torch.cat([self._seen[i] for i in self._taps], dim=-1)
        self._seen.clear()
        return features, outputs.last_hidden_state

    def _compile(self) -> None:
        """Compile the layers and read their outputs by hooks of our own around them.

        transformers' way to collect hidden states puts hooks into the layers too, where compiled code cannot run them.
        """
        layers = decoder_layers(self.target)
        if layers is None:
            raise ValueError(f"{type(self.target).__name__} has no list of its layers. Set `compile=False`.")
        for i, layer in enumerate(layers):
            layer.forward = torch.compile(layer.forward)
            if i in self._taps:
                layer.register_forward_hook(lambda module, inputs, output, i=i: self._keep(i, output))
        if -1 in self._taps:
            layers[0].register_forward_pre_hook(
                lambda module, args, kwargs: self._keep(-1, args[0] if args else kwargs["hidden_states"]),
                with_kwargs=True,
            )

    def _keep(self, i: int, output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        assert self._seen is not None
        self._seen[i] = output[0] if isinstance(output, tuple) else output

    def slot_logits(self, last_hidden: torch.Tensor, anchor_positions: torch.Tensor, num_slots: int) -> LogitRows:
        """Logits for the labels of the slots, [B, A, γ, V]: those at positions a, ..., a+γ-1 after anchors a [B, A]."""
        positions = anchor_positions.unsqueeze(-1) + torch.arange(num_slots, device=anchor_positions.device)
        hidden = gather_positions(last_hidden, positions)
        return LogitRows(self._logits, (hidden.flatten(0, 2),), (), torch.Size((*positions.shape, self.size)))

    @torch.no_grad()
    def _logits(self, hidden: torch.Tensor) -> tuple[torch.Tensor]:
        return (self._head(inputs_embeds=hidden[None], use_cache=False).logits[0],)

    @torch.no_grad()
    def _check_head(self) -> None:
        ids = torch.arange(8, device=self.target.device).unsqueeze(0) % self.size
        expected = self.target(input_ids=ids, use_cache=False).logits[0].float()
        _, last_hidden = self.read(ids)
        found = total(self._logits(last_hidden[0]))
        # Products of other shapes round differently, in bfloat16 by up to a few units of its 8 bits.
        if found.shape != expected.shape or (found - expected).abs().max() > 0.05 * expected.abs().max():
            raise ValueError(
                f"The logits of {type(self.target).__name__} are no function of its last hidden states alone: this "
                "target cannot be trained for yet."
            )


class _GivenOutput(BaseModelOutputWithPast):
    """What the layers of some families return besides (router logits, say) is `None` here."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _GivenStates(nn.Module):
    """In place of the layers: the hidden states it is given as embeddings are those after the last layer."""

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> "_GivenOutput":
        return _GivenOutput(last_hidden_state=inputs_embeds)


def _head_alone(target: PreTrainedModel) -> PreTrainedModel:
    """The target without its layers: head, scale and cap of the logits as the family has them.

    A shallow copy, which shares head and config with the target and leaves it unchanged.
    """
    name = target.base_model_prefix
    if name not in target._modules:
        raise ValueError(f"{type(target).__name__} has no module {name!r} with its layers: it cannot be trained for.")
    head = copy.copy(target)
    head._modules = target._modules | {name: _GivenStates()}
    return head
