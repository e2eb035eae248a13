"""What tests of graph passes share: the values of a part's ports, taken from a module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from helixrt.passes.parts import Part, Port, Role, local

Values = dict[Port, torch.Tensor]


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None: ...


@pytest.fixture
def values_of() -> Callable[..., Values]:
    """`values_of(module, inputs, tangents)`: every port a captured module may take in, by copies of its state."""

    def make(module: nn.Module, inputs: Mapping[str, torch.Tensor], **tangents: Any) -> Values:
        values = {Port(Role.INPUT, name): value.detach() for name, value in inputs.items()}
        if "target" in inputs:
            values[Port(Role.TARGET, "target")] = inputs["target"]
        for name, parameter in module.named_parameters():
            values[Port(Role.PARAMETER, name)] = local(parameter.detach())
        for name, buffer in module.named_buffers():
            values[Port(Role.BUFFER, name)] = buffer.clone()
        for name, tangent in (tangents or {"loss": torch.ones(())}).items():
            values[Port(Role.TANGENT, name)] = tangent
        return values

    return make


@pytest.fixture
def gradients_equal() -> Callable[..., None]:
    """`gradients_equal(part_outputs, module, ...)`: the module's `.grad` and the part's GRADIENT ports, all of them."""

    def check(outputs: Mapping[Port, torch.Tensor], module: nn.Module, rtol: float = 1e-10, atol: float = 1e-12) -> None:
        expected = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        found = {port.name: value for port, value in outputs.items() if port.role is Role.GRADIENT}
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, local(expected[name]), rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")

    return check


@pytest.fixture
def in_three() -> Callable[[Any, Values], Values]:
    """`in_three(split, values)`: what F, B and W give one after the other."""

    def run(split: Any, values: Values) -> Values:
        values = dict(values)
        results: Values = {}
        for part in (split.forward, split.backward, split.weight):
            outputs = part.run(values)
            values |= {port: value for port, value in outputs.items() if port.role is Role.SAVED}
            results |= {port: value for port, value in outputs.items() if port.role is not Role.SAVED}
        return results

    return run


@pytest.fixture
def bitwise_equal() -> Callable[[Part, Values, Values], None]:
    def check(joint: Part, first: Values, second: Values) -> None:
        assert first.keys() == second.keys() == set(joint.outputs)
        for port in joint.outputs:
            assert torch.equal(first[port], second[port]), port

    return check
