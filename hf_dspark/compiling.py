"""torch.compile for functions that meet many shapes."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

# Of one function's code, over all models of a process; and of all functions together.
RECOMPILE_LIMIT, ACCUMULATED_LIMIT = 64, 4096


def many_shapes() -> AbstractContextManager[Any]:
    """Inside, a function may be compiled more often than torch allows by default.

    Lengths and batches become dynamic after the first few, with and without gradients apart. Past the limit torch would
    run the function uncompiled, in flex_attention's case with the memory of all scores.
    """
    from torch import _dynamo as dynamo

    limits = {"recompile_limit": RECOMPILE_LIMIT, "accumulated_recompile_limit": ACCUMULATED_LIMIT}
    return dynamo.config.patch(**limits)


def first_line(error: Exception) -> str:
    """Kind of an error and what it says first; compilers go on for pages, and some assertions say nothing."""
    return f"{type(error).__name__}: {error}".splitlines()[0].strip(": ")


def opaque(name: str, fake: Callable) -> Callable[[Callable], Callable]:
    """Make a function one operator that compiled code does not look inside; elsewhere it is just called, since an
    operator costs as much as a small kernel.

    Args:
        name: `namespace::name` of the operator.
        fake: the function without its work: empty outputs of the right shapes.
    """

    def decorate(function: Callable) -> Callable:
        operator: Any = torch.library.custom_op(name, function, mutates_args=())
        operator.register_fake(fake)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (operator if torch.compiler.is_compiling() else function)(*args, **kwargs)

        return call

    return decorate


@functools.cache
def compiled(function: Callable, fullgraph: bool = False) -> Callable:
    """`torch.compile(function)`, made when it is first needed."""
    return torch.compile(function, fullgraph=fullgraph)
