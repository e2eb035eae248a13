"""The one file that uses torch's inductor directly: a graph without autograd becomes a compiled function.

`torch._inductor.compile` is named private and has been stable from torch 2.0 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from helixrt.errors import HelixError
from helixrt.private_api import FAKE_TENSORS, INDUCTOR, INDUCTOR_ORDER, require, usable


class CompileError(HelixError):
    """Inductor could not compile a group of operators (no C++ compiler, an operator it does not know)."""


def compiled(module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
    """A function of `module`'s inputs, to a tuple; `examples` are fake tensors. Raises CompileError, and ConfigError where this
    torch has no such compiler."""
    require(INDUCTOR)
    require(FAKE_TENSORS)
    from torch._inductor import compile as compile_graph
    from torch._subclasses.fake_tensor import FakeTensorMode

    # Of a mode of their own: that of the capture knows numbers inside tensors without dimensions, which inductor would ask
    # Dynamo to capture again.
    with FakeTensorMode():
        fresh: list[Any] = [torch.empty_strided(e.shape, e.stride(), dtype=e.dtype, device=e.device) for e in examples]
    try:
        with torch.no_grad():
            function = compile_graph(module, fresh)
    except Exception as error:  # inductor raises of every kind
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CompileError(f'codegen="inductor" failed: {first}; codegen="eager" needs no compiler') from error
    strides = [example.stride() for example in examples]
    return lambda *values: function(*map(laid_out, values, strides))


def laid_out(value: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """`value` in the layout it was compiled for: that of a fake tensor, which real operators do not always keep to."""
    if value.stride() == stride:
        return value
    return torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device).copy_(value)


def keep_order() -> None:
    """Have inductor keep the order of graphs, in this process from now on: its pass for peak memory puts a gather right before
    the wait for it."""
    if not usable(INDUCTOR_ORDER):
        return
    from torch._inductor import config

    config.reorder_for_peak_memory = False
