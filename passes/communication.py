"""Communication: which operators of a graph send something to other ranks, and what passes must know of each.

In: operators, by their schemas. Out: how each communicates, or that it does not; an error for one without a description.

An operator counts as communicating if it takes a process group: an argument of the type ProcessGroup, a process group as a
value, or a string called like a group (`group_name`). Such an operator must be known: if ranks took it for compute they
would run different numbers of it while they profile, and wait for each other. The functional collectives of torch and
those of symmetric memory are known, and `helixrt_ring_shift`, by which ring attention sends and receives: every rank calls
it alike, so it is ordered, measured and hidden as a collective is. `register` describes others, at import, on all
ranks. An operator that takes no group and communicates nonetheless cannot be recognized by its schema: register it, too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from helixrt.errors import ConfigError
from helixrt.passes.errors import VerifyError

FUNCTIONAL = frozenset({"_c10d_functional", "c10d_functional", "_c10d_functional_autograd"})
OWN = frozenset({"aten", "prims", "prim", "rngprims", "inductor", "higher_order"})  # of torch; they take no group
GROUP_NAMED = re.compile(r"(.*_)?(group|group_name|process_group|pg|pg_name)")
TEXT_TYPES = ("str", "Any", "PyObject", "t")  # of an argument that may name a group


class How(StrEnum):
    """How an operator communicates."""

    LAUNCHES = "launches"  # its result may be used after `_c10d_functional.wait_tensor`, once
    BLOCKS = "blocks"  # its result can be used at once, as a kernel's on the current stream
    NOT = "does not communicate"  # it takes a group and sends nothing


class Pattern(StrEnum):
    """What is on the wire, for estimates; each rank brings its operands."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    RING_SHIFT = "ring_shift"  # to one neighbour, from the other one


@dataclass(frozen=True, slots=True)
class Communication:
    """How an operator communicates. `group` is the argument that names the group.

    `runnable`: it can be run on arguments made up from shapes, by all ranks of the group at once, to be measured. Not so
    operators whose arguments must lie in registered memory, or of which ranks have different ones (send and receive).
    """

    how: How
    group: str = "group_name"
    pattern: Pattern = Pattern.ALL_TO_ALL
    runnable: bool = True


LAUNCH = {pattern: Communication(How.LAUNCHES, pattern=pattern) for pattern in Pattern}
POINT_TO_POINT = Communication(How.LAUNCHES, runnable=False)
IN_REGISTERED_MEMORY = Communication(How.BLOCKS, pattern=Pattern.ALL_REDUCE, runnable=False)

KNOWN: dict[str, Communication] = {
    "_c10d_functional::isend": POINT_TO_POINT,
    "_c10d_functional::irecv": POINT_TO_POINT,
    "_c10d_functional::batch_p2p_ops": POINT_TO_POINT,
    "_c10d_functional::helixrt_ring_shift": LAUNCH[Pattern.RING_SHIFT],
    "_dtensor::shard_dim_alltoall": Communication(How.BLOCKS),
    "_dtensor::mesh_get_process_group": Communication(How.NOT),
    "symm_mem::one_shot_all_reduce": IN_REGISTERED_MEMORY,
    "symm_mem::one_shot_all_reduce_copy": IN_REGISTERED_MEMORY,
    "symm_mem::multimem_one_shot_all_reduce": IN_REGISTERED_MEMORY,
    "symm_mem::_low_contention_all_gather": LAUNCH[Pattern.ALL_GATHER],
    "symm_mem::_low_contention_reduce_scatter": LAUNCH[Pattern.REDUCE_SCATTER],
    "symm_mem::fused_all_gather_matmul": Communication(How.BLOCKS, pattern=Pattern.ALL_GATHER),
    "symm_mem::fused_all_gather_scaled_matmul": Communication(How.BLOCKS, pattern=Pattern.ALL_GATHER),
    "symm_mem::fused_matmul_reduce_scatter": Communication(How.BLOCKS, pattern=Pattern.REDUCE_SCATTER),
    "symm_mem::fused_scaled_matmul_reduce_scatter": Communication(How.BLOCKS, pattern=Pattern.REDUCE_SCATTER),
    # of DeepSpeed's DeepCompile, which identifies parameters by number; the result of a reduction is not used
    "dc::allgather_param": Communication(How.LAUNCHES, "", Pattern.ALL_GATHER, runnable=False),
    "dc::reduce_grad": Communication(How.BLOCKS, "", Pattern.REDUCE_SCATTER, runnable=False),
}
WAITS = frozenset({"dc::wait_allgather"})  # besides that of the functional collectives
AMONG_COMPUTE = frozenset({"dc::release_param"})  # views by their schemas, with an effect; in order with compute
DEFERRED = frozenset({"dc::reduce_grad"})  # fills a bucket that is sent later: gathers behind it may be launched before it
UNTOLD = frozenset({"dc"})  # namespaces whose other operators have effects that their schemas do not tell
REGISTERED: dict[str, Communication] = {}  # by `register`; of this process, as torch's operators are


def register(
    operator: str,
    how: How | str,
    *,
    group: str = "group_name",
    pattern: Pattern | str = Pattern.ALL_TO_ALL,
    runnable: bool = True,
) -> None:
    """Describe a communicating operator, `namespace::name`, before graphs that have it are captured; the same on all ranks.

    See `How`, `Pattern` and `Communication`. Raises ConfigError for other words, and for an operator that is known
    otherwise already.
    """
    if "::" not in operator:
        raise ConfigError("operator", operator, "must be namespace::name")
    for key, value, words in (("how", how, How), ("pattern", pattern, Pattern)):
        if value not in tuple(words):
            raise ConfigError(key, value, f"must be one of {', '.join(words)}")
    said = Communication(How(how), group, Pattern(pattern), runnable)
    if KNOWN.get(operator, REGISTERED.get(operator, said)) != said:
        raise ConfigError("operator", operator, "is described otherwise already")
    REGISTERED[operator] = said


def communication(node: fx.Node) -> Communication | None:
    """How a node communicates; None if it does not. Raises VerifyError for one that takes a group and is not known."""
    found = described(node)
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        check_functionalized(node)
    if found is None and (argument := group_argument(node)) is not None:
        assert isinstance(node.target, torch._ops.OpOverload), "only operators have schemas"
        name = node.target._schema.name
        raise VerifyError(
            f"{node} calls {name}, which takes a process group ({argument}) and is not known: ranks that took it for compute "
            f"could wait for each other. Say how it communicates, before capture: helixrt.passes.communication.register("
            f"{name!r}, how, group={argument!r}), with how one of {', '.join(map(repr, map(str, How)))}"
        )
    return None if found is None or found.how is How.NOT else found


def check_functionalized(node: fx.Node) -> None:
    """Raises VerifyError where a higher-order operator runs a communicating one, that writes into its arguments, on copies."""
    for target in node.args:
        if isinstance(target, torch._ops.OpOverload):
            alone = fx.Graph().call_function(target)
            if communication(alone) is not None:
                name = target._schema.name
                raise VerifyError(
                    f"{node} runs {name}, which communicates and writes into its arguments; call one that returns its result"
                )


def described(node: fx.Node) -> Communication | None:
    """What is known of a node's operator; None if nothing is."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return None
    name = target._schema.name
    if name in REGISTERED or name in KNOWN:
        return REGISTERED.get(name) or KNOWN[name]
    namespace, _, short = name.partition("::")
    if namespace not in FUNCTIONAL or short == "wait_tensor" or short.startswith("_"):
        return None
    pattern = next((pattern for pattern in Pattern if short.startswith(pattern)), Pattern.ALL_TO_ALL)
    return LAUNCH[pattern]


def group_argument(node: fx.Node) -> str | None:
    """The argument of a node's operator that is a process group or names one, by schema and value; None without one."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace in OWN:
        return None
    given = arguments(node)
    for argument in target._schema.arguments:
        of_type = str(argument.type)
        named = GROUP_NAMED.fullmatch(argument.name) and re.sub(r"Optional\[(.*)\]", r"\1", of_type) in TEXT_TYPES
        if "ProcessGroup" in of_type or named or _is_group(given.get(argument.name)):
            return argument.name
    return None


def arguments(node: fx.Node) -> dict[str, Any]:
    """What a node gives its operator, by the schema's names; what is left out is not there."""
    assert isinstance(node.target, torch._ops.OpOverload), "only operators have schemas"
    return {a.name: value for a, value in zip(node.target._schema.arguments, node.args, strict=False)} | node.kwargs


def _is_group(value: object) -> bool:
    """Whether a constant in a graph is a process group."""
    return dist.is_available() and isinstance(value, dist.ProcessGroup)
