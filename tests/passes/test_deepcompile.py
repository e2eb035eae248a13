"""The DeepCompile pass on graphs as DeepSpeed's own passes leave them, with the schemas and the contracts of the installed one.

DeepCompile itself runs on CUDA alone, so its operators are defined here from the text of its sources, and are not run.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import fx, nn
from torch._inductor import config as inductor

from helixrt.passes import deepcompile
from helixrt.passes.deepcompile import NAME, contract, hide_collectives

deepspeed = pytest.importorskip("deepspeed")
ATEN = torch.ops.aten
ROWS, BYTES = 8, 8 * 8 * 4


@pytest.fixture(scope="module", autouse=True)
def operators() -> Iterator[None]:
    """`torch.ops.dc`, with the schemas of DeepSpeed's extension."""
    source = (Path(deepspeed.__file__).parent / "ops" / "csrc" / "compile" / "init.cpp").read_text()
    block = re.search(r"TORCH_LIBRARY\(dc, m\)\s*\{(.*?)\n\}", source, re.S)
    assert block is not None
    schemas = ["".join(re.findall(r'"([^"]*)"', each)) for each in re.findall(r"m\.def\((.*?)\);", block.group(1), re.S)]
    library = torch.library.Library("dc", "DEF")
    for schema in schemas:
        library.define(schema)
    yield
    library._destroy()


def forward(layers: int) -> fx.GraphModule:
    """ZeRO 3: each parameter is gathered right before its product, and released after it."""
    found = fx.Graph()
    x = found.placeholder("x")
    parameters = [found.placeholder(f"primals_{number}") for number in range(layers)]
    for node in (x, *parameters):
        node.meta["val"] = torch.empty(ROWS, ROWS, device="meta")
    for number, parameter in enumerate(parameters):
        x = gathered_product(found, x, parameter, number, layers)
    found.output((x,))
    return fx.GraphModule(nn.Module(), found)


def gathered_product(graph: fx.Graph, x: fx.Node, parameter: fx.Node, number: int, layers: int) -> fx.Node:
    dc = torch.ops.dc
    gather = graph.call_function(dc.allgather_param.default, (parameter, 7, number), {"dtype": torch.float32})
    gather.meta["allgather_allocation_bytes"] = BYTES
    whole = graph.call_function(dc.wait_allgather.default, (gather, 7, number))
    product = graph.call_function(ATEN.mm.default, (x, whole))
    result = graph.call_function(dc.release_param.default, (product, 7, number, 1))
    for node in (gather, whole, product, result):
        node.meta["val"] = torch.empty(ROWS, ROWS, device="meta")
    return result


def run(module: fx.GraphModule, bwd: bool = False) -> fx.GraphModule:
    return hide_collectives(module, 7, [(7, True)], {}, lambda: (), 0.0, {}, bwd)


def order(module: fx.GraphModule) -> list[str]:
    return [node.target._opname for node in module.graph.nodes if node.op == "call_function"]


def test_the_signature_and_the_contract_are_those_that_deepcompile_asks_for() -> None:
    from deepspeed.compile import backend
    from deepspeed.compile.passes.contract import PassContractError, register_pass_contract, validate_schedule
    from deepspeed.compile.passes.prefetch import CONTRACT, schedule_prefetch
    from deepspeed.compile.passes.zero3_compile import CONTRACT as GATHERS

    names = list(inspect.signature(schedule_prefetch).parameters)
    assert list(inspect.signature(hide_collectives).parameters) == names

    class Engine:
        register_compile_pass = deepspeed.DeepSpeedEngine.register_compile_pass

    for name, given in (("zero3_compile", GATHERS), ("prefetch", CONTRACT)):
        register_pass_contract(name, given)
    try:
        with inductor.patch(reorder_for_peak_memory=True):
            deepcompile.register(Engine())
            assert not inductor.reorder_for_peak_memory, "it would undo the order"
        assert backend.opt_passes[NAME] is hide_collectives
        validate_schedule([(0, ["zero3_compile", NAME])])
        validate_schedule([(0, ["zero1_compile", NAME])])
        with pytest.raises(PassContractError, match="conflicts"):
            validate_schedule([(0, ["zero3_compile", "prefetch", NAME])])
    finally:
        for name in (NAME, "zero3_compile", "prefetch"):
            register_pass_contract(name, None)
        backend.opt_passes.pop(NAME, None)
    assert contract().phase == "both"


def test_gathers_are_launched_ahead_within_the_bound_on_memory() -> None:
    module = forward(5)
    before = {node.name: node for node in module.graph.nodes}
    given = run(module)
    assert given is module, "DeepCompile goes on with the graph of the module that it gave"
    given.graph.lint()
    assert {node.name for node in given.graph.nodes} == set(before), "profiles are by name"
    assert all(node.meta.get("val") is before[node.name].meta.get("val") for node in given.graph.nodes)
    named = order(given)
    assert named[:2] == ["allgather_param", "allgather_param"], named
    under_way = most = 0
    for name in named:
        under_way += (name == "allgather_param") - (name == "wait_allgather")
        most = max(most, under_way)
    assert most == 2
    first = named.index("mm")
    assert named.index("allgather_param", 2) < named.index("mm", first + 1), "the third is behind the first product"
    numbers = [node.args[2] for node in given.graph.nodes if node.name.startswith("allgather")]
    assert numbers == list(range(5)), "all ranks gather in the same order"
    for name in ("release_param", "mm"):
        assert [node.name for node in given.graph.nodes if node.name.startswith(name)] == [
            node for node in before if node.startswith(name)
        ]


def test_reductions_keep_their_order_and_what_has_untold_effects_its_place() -> None:
    dc, found = torch.ops.dc, fx.Graph()
    x = found.placeholder("x")
    parameters = [found.placeholder(f"primals_{number}") for number in range(2)]
    for node in (x, *parameters):
        node.meta["val"] = torch.empty(ROWS, ROWS, device="meta")
    sine = found.call_function(ATEN.sin.default, (x,))
    reduced = [found.call_function(dc.reduce_grad.default, (sine, 7, 2))]
    found.call_function(dc.reload_parameter.default, (parameters[0], 7, 0))  # must come before the gather, and nothing says so
    product = x
    for number, parameter in enumerate(parameters):
        product = gathered_product(found, product, parameter, number, 2)
        reduced.append(found.call_function(dc.reduce_grad.default, (product, 7, number)))
    found.call_function(dc.end_backward.default, (reduced, 7, True))
    found.output((product,))
    for node in (sine, *reduced):
        node.meta["val"] = torch.empty(ROWS, ROWS, device="meta")
    module = run(fx.GraphModule(nn.Module(), found), bwd=True)
    named = order(module)
    assert named.index("reload_parameter") < named.index("allgather_param")
    gathers = [place for place, name in enumerate(named) if name == "allgather_param"]
    assert gathers[1] < named.index("mm"), "the second gather passes the reduction of the first product"
    assert [node.args[2] for node in module.graph.nodes if node.name.startswith("reduce_grad")] == [2, 0, 1]
    assert named[-1] == "end_backward"
