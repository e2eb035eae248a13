"""Ranks with parts of different sizes get equal lists of operators, and compute the same as before."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn

from helixrt.passes import nodes
from helixrt.passes.paddings import PAD, padded_alike
from helixrt.passes.parts import Part, Port, Role
from tests.ranks_context import ranks_context

C10D, ATEN = torch.ops._c10d_functional, torch.ops.aten
ROWS = 3  # rank 1 has one less


def gathered(rank: int, group: str, pads: bool) -> Part:
    """The rows of all ranks; a rank that has fewer pads them, and uses its own rows again."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(ROWS - rank, 2)
    mine = graph.call_function(ATEN.mul.Tensor, (x, 2.0))
    mine.meta["val"] = torch.empty(ROWS - rank, 2)
    sent = mine
    if rank and pads:
        sent = graph.call_function(PAD, (mine, [0, 0, 0, rank]))
        sent.meta["val"] = torch.empty(ROWS, 2)
    launched = graph.call_function(C10D.all_gather_into_tensor.default, (sent, 2, group))
    all_rows = graph.call_function(C10D.wait_tensor.default, (launched,))
    launched.meta["val"] = all_rows.meta["val"] = torch.empty(2 * ROWS, 2)
    again = graph.call_function(ATEN.sum.default, (mine,))
    again.meta["val"] = torch.empty(())
    graph.output((all_rows, again))
    ports = Port(Role.OUTPUT, "rows"), Port(Role.OUTPUT, "again")
    return Part(fx.GraphModule(nn.Module(), graph), (Port(Role.INPUT, "x"),), ports)


def rank_main(rank: int, port: int, found: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    group = dist.group.WORLD
    assert group is not None
    part = gathered(rank, group.group_name, pads=True)
    alike = padded_alike(part, group)
    values = {Port(Role.INPUT, "x"): torch.arange(2.0 * (ROWS - rank)).view(-1, 2) + 10 * rank}
    results = [{port.name: value.tolist() for port, value in each.run(values).items()} for each in (part, alike)]
    own_rows_from = [str(each.graph.output_node().args[0][1].args[0].target) for each in (part, alike)]
    nothing = gathered(0, group.group_name, pads=False)
    unchanged = padded_alike(nothing, group) is nothing
    operators = [str(node.target) for node in alike.graph.nodes if node.op == "call_function"]
    told = all("val" in node.meta for node in alike.graph.nodes if node.op == "call_function")
    places = [nodes.origin(node).source for node in alike.graph.nodes if node.target is PAD]
    found.put((rank, operators, results, own_rows_from, unchanged and told and len(places) == 1))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.system
def test_a_rank_with_as_many_rows_as_any_pads_by_nothing() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = ranks_context().SimpleQueue()
    ranks = [ranks_context().Process(target=rank_main, args=(rank, store.port, found)) for rank in range(2)]
    for each in ranks:
        each.start()
    (_, first, *one), (_, second, *other) = sorted(found.get() for _ in ranks)
    for each in ranks:
        each.join(60)
        each.kill()
    assert first == second and first.count(str(PAD)) == 1
    for (before, after), own_rows_from, sound in (one, other):
        assert before == after and sound
        assert own_rows_from == [str(ATEN.mul.Tensor)] * 2, "what was not sent is not padded"
