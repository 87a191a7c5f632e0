"""Forward and backward of a training step as CUDA graphs, one for each shape of the texts."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from .losses import LossOutput

Forward = Callable[..., LossOutput]


class RecordedStep:
    """Adds the gradients of an objective to `parameters`, by replaying what was recorded for the inputs' shapes.

    A step launches more than a thousand small kernels, which takes longer than to run them. Recordings share one memory
    pool and the room for their inputs. Gradients stay where they are: clear them with `zero_grad(set_to_none=False)`.

    Args:
        forward: computes the loss of tensors on the device; no value of theirs may decide what is computed.
        parameters: those with gradients.
        scale: factor of the gradients.
    """

    def __init__(self, forward: Forward, parameters: Sequence[nn.Parameter], scale: float = 1.0):
        self._forward, self._parameters, self._scale = forward, list(parameters), scale
        self._recorded: dict[Any, tuple[torch.cuda.CUDAGraph, tuple[torch.Tensor, ...], LossOutput]] = {}
        self._room: list[torch.Tensor] = []
        self._pool: Any = None

    def __call__(self, *inputs: torch.Tensor) -> LossOutput:
        """The loss, without gradients, which are in the parameters then.

        Raises:
            RuntimeError: on the first use of a shape, for what cannot be recorded. Gradients are as before.
        """
        self.record(*inputs)
        graph, static, output = self._recorded[_shapes(inputs)]
        for own, given in zip(static, inputs, strict=True):
            own.copy_(given)
        graph.replay()
        return _map(output, torch.clone)

    def __len__(self) -> int:
        """Number of recordings."""
        return len(self._recorded)

    def record(self, *inputs: torch.Tensor) -> None:
        """Make sure that there is a recording for the inputs' shapes.

        The largest come best first: it takes memory that is enough for the smaller ones.
        """
        if _shapes(inputs) in self._recorded:
            return
        static = self._fixed(inputs)
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        before = [parameter.grad.clone() for parameter in self._parameters]
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph, stream, main = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.cuda.current_stream()
        try:
            stream.wait_stream(main)
            with torch.cuda.stream(stream):  # a backward runs on the stream of its forward
                for _ in range(2):  # compiles and tunes
                    self._run(static)
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                output = self._run(static)
        finally:
            main.wait_stream(stream)  # which may have failed between two kernels
            for parameter, gradient in zip(self._parameters, before, strict=True):
                parameter.grad.copy_(gradient)
        self._recorded[_shapes(inputs)] = graph, static, output

    def _fixed(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Copies of `inputs`, at the place where those of the next recordings will be."""
        if not self._room or any(own.numel() < x.numel() for own, x in zip(self._room, inputs, strict=True)):
            self._room = [x.new_empty(x.numel()) for x in inputs]
        static = tuple(own[: x.numel()].view(x.shape) for own, x in zip(self._room, inputs, strict=True))
        for own, given in zip(static, inputs, strict=True):
            own.copy_(given)
        return static

    def _run(self, inputs: tuple[torch.Tensor, ...]) -> LossOutput:
        output = self._forward(*inputs)
        (output.loss * self._scale).backward()
        return _map(output, torch.Tensor.detach)


def _shapes(inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Size, ...]:
    return tuple(x.shape for x in inputs)


def _map(output: LossOutput, function: Callable[[torch.Tensor], torch.Tensor]) -> LossOutput:
    values = (getattr(output, field.name) for field in dataclasses.fields(output))
    return LossOutput(*(function(value) for value in values))
