"""Capture: a module, its loss and one micro-batch's arguments become one graph of forward and backward.

In: `capture(module, args, kwargs, loss=..., target=...)`, called in the training mode, autocast and process groups
the graph is to have. Out: a `Part` of functional ATen operators whose ports are named:

- PARAMETER and BUFFER by qualified name (`loss.NAME` for those of a loss that is a module). A tied parameter is one
  port, under its first name, with one gradient. Parameters that get no gradient have no GRADIENT port.
- INPUT by position or keyword: `0`, `attention_mask`, `0['x']` inside containers. Numbers, None and other constants
  are part of the graph and have no port; neither has a tensor nothing uses. TARGET is named `target`.
- OUTPUT `loss` if there is a loss: `loss(output, target)`, else the output's `.loss` (transformers), else an output
  without dimensions. Otherwise OUTPUT `output` (`output[0]`, ... in containers), a chunk in the middle of a pipeline.
  Each differentiable one has a TANGENT of its name.
- INPUT_GRADIENT for every input that requires grad; BUFFER outputs are new values, for the caller to copy in.
- Tensors that are DTensors are their local tensors at the ports; see `Part.layouts`.

`Part.guards` tell when a Python value that was read is another, once they are built (`watched`).

Operators keep the order of eager execution, random ones and collectives included: run from the same generator state
the graph draws the same numbers. Collectives are functional, each with one wait. Regions of `torch.utils.checkpoint` are
computed again in the backward (`recompute`). What Python does besides tensors happens once, at capture.

Follows DHelix, section 4 (operators of a strand); each step that needs private interfaces is in `aot_private`.
"""

from __future__ import annotations

import operator
import re
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from helixrt.passes import nodes
from helixrt.passes.aot_private import (
    End,
    Joint,
    check_static,
    forward_ends,
    is_backward,
    location_of,
    module_path,
    place_of,
    trace_joint,
)
from helixrt.passes.errors import CaptureError
from helixrt.passes.guards_private import Guards
from helixrt.passes.higher_order import check_higher_order
from helixrt.passes.nodes import Origin
from helixrt.passes.parts import Part, Port, Role
from helixrt.passes.recompute import recompute
from helixrt.passes.rewriter import GraphRewriter
from helixrt.passes.verify import verify

Loss = Callable[[Any, Any], torch.Tensor]

ASSIGNED = "buffers['"  # at the start of the name of what `Traced` gives besides outputs
HIDDEN = ".__dict__"  # what it puts before that if the buffer was None
BUFFERS = "._buffers"  # at the end of Dynamo's name for a module that assigns a buffer


def capture(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Loss | None = None,
    target: Any = None,
) -> Part:
    """The joint forward and backward graph of `module(*args, **kwargs)`; ports as in the module's docstring.

    Arguments are examples of a micro-batch; their shapes and dtypes are the graph's. Inputs of a chunk in the middle
    that need a gradient must require grad. Raises CaptureError with the user's line, the reason and a remedy.
    """
    began = time.perf_counter()
    kwargs = dict(kwargs or {})
    check_gathered(module)
    check_contents(module)
    check_names(module, loss)
    call = distinct((tuple(args), kwargs, target), module)
    joint = trace_joint(Traced(module, loss), call, module)
    aliased = any(end is not None and end.aliased for end in joint.outputs)
    owners = tuple(name.split(HIDDEN)[0].removesuffix(BUFFERS) for name in joint.side_effects if name.endswith(BUFFERS))
    if aliased or owners:
        joint = trace_joint(Traced(module, loss, own_outputs=aliased, assigned=owners), call, module)
    check_constants(joint, Traced(module, loss))
    check_side_effects([name for name in joint.side_effects if not name.endswith(BUFFERS)], joint, Traced(module, loss))
    part = Flattening(module, loss, joint, call).part()
    check_higher_order(part.module, location_of(module))
    verify(part)
    return recompute(part.stamped("capture", time.perf_counter() - began))


def watched(part: Part, module: nn.Module, loss: Loss | None, modes: bool = True) -> Guards | None:
    """The guards of a captured part, by the values that `module` and `loss` have now. `module` is what the user changes: the
    captured one, or what that is a copy of; it is held weakly. `modes`: also the training modes of modules."""
    held = weakref.ref(module)

    def scope() -> dict[str, Any] | None:
        return None if (now := held()) is None else {"self": Traced(now, loss)}

    if part.guards is not None:
        part.guards.build(scope, modes)
    return part.guards


def check_gathered(module: nn.Module) -> None:
    """Raise CaptureError for a module that torch's FSDP, of either kind, gathers the parameters of in hooks."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # where it was not imported, no module is one of its
    kinds = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel) if fsdp is not None else ()
    if any(isinstance(part, kinds) for part in module.modules()):
        reason, remedy = "fully sharded parameters are gathered in hooks, outside of any graph", "use DistributedDataParallel"
        raise CaptureError(location_of(module), reason, f"{remedy}, tensor or expert parallelism")


def check_contents(module: nn.Module) -> None:
    """Raise CaptureError for a module on the meta device, where losses have no gradient."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.device.type == "meta":
            reason, remedy = f"{name} is on the meta device", "give it memory (to_empty, then its values)"
            raise CaptureError(location_of(module), reason, f"{remedy}, or capture it by capture_whole")


def distinct(call: Any, module: nn.Module) -> Any:
    """`call` with a copy of each tensor that is there twice, or is the module's: one tensor would become one port.

    (Labels that are the input ids in the example need not be so in the next micro-batch.)
    """
    seen = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}

    def apart(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in seen:
            tensor = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        seen.add(id(tensor))
        return tensor

    return pytree.tree_map_only(torch.Tensor, apart, call)


def check_constants(joint: Joint, traced: Traced) -> None:
    """Raise CaptureError if a tensor that is no parameter requires a gradient: the graph would not compute it."""
    for node in joint.graph.find_nodes(op="get_attr"):
        value = getattr(joint.root, str(node.target), None)
        if isinstance(value, torch.Tensor) and value.requires_grad:
            what = f"a tensor of shape {list(value.shape)} that is no parameter of the model requires grad"
            remedy = "make it a parameter of the model, or of a loss that is a module"
            raise CaptureError(place_of(node) or location_of(traced.module), what, remedy)


def check_side_effects(names: list[str], joint: Joint, traced: Traced) -> None:
    """Warn of Python objects that forward changes. Raises CaptureError when one is a tensor that it reads, too."""
    where = location_of(traced.module)
    constants = [getattr(joint.root, str(node.target), None) for node in joint.graph.find_nodes(op="get_attr")]
    for name in names:
        owner = dict(traced.named_modules()).get(name)
        for attribute, value in vars(owner).items() if owner is not None else ():
            if any(value is constant for constant in constants if constant is not None):
                what = f"forward may change the tensor {local_name(f'{name}.{attribute}')!r}, which it reads"
                raise CaptureError(where, what, "make it a buffer: register_buffer")
    if names:
        changed = ", ".join(dict.fromkeys(repr(name).replace("'module", "'model") for name in names))
        warnings.warn(f"{where}: forward changes Python objects ({changed}); a captured graph does not", stacklevel=3)


class Traced(nn.Module):
    """What is traced: the module, then its loss, with one argument tree and one output tree.

    `assigned` names modules that assign new tensors to their buffers; those come out, too.
    """

    def __init__(self, module: nn.Module, loss: Loss | None, own_outputs: bool = False, assigned: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.module, self.loss, self.own_outputs = module, loss, own_outputs
        self.training = module.training
        self.assigned = [(path, name) for path in assigned for name in self.get_submodule(path)._buffers]

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> dict[str, Any]:
        result = self.called(args, kwargs, target)
        if self.assigned:
            values = {f"{path}.{name}": getattr(self.get_submodule(path), name) for path, name in self.assigned}
            result["buffers"] = {name: value.detach().clone() for name, value in values.items() if value is not None}
        return result

    def called(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> dict[str, Any]:
        output = self.module(*args, **kwargs)
        if self.loss is not None:
            loss = self.loss(output, target)
            if not isinstance(loss, torch.Tensor):
                raise TypeError(f"the loss is no tensor but of type {type(loss).__name__}")
            return {"loss": loss}
        if output is None:
            raise TypeError("forward returns nothing")
        if isinstance(output, torch.Tensor):
            if output.dim() == 0:
                return {"loss": output}
        elif getattr(output, "loss", None) is not None:
            return {"loss": output.loss}
        if self.own_outputs:  # outputs that are views of one another get memory of their own
            output = pytree.tree_map_only(torch.Tensor, torch.clone, output)
        return {"output": output}


class Flattening:
    """Copies the traced graph to one with flat, named placeholders and outputs, and tidies it on the way."""

    def __init__(self, module: nn.Module, loss: Loss | None, joint: Joint, call: tuple[Any, ...]) -> None:
        self.joint, self.where = joint, location_of(module)
        self.arguments = [argument_port(path) for path, _ in pytree.tree_flatten_with_path(call)[0]]
        self.first_names = first_names(module, loss)
        self.buffers = all_buffers(module, loss)
        self.rewriter = GraphRewriter()
        self.graph, self.copies = self.rewriter.graph, self.rewriter.made
        self.inputs: dict[Port, fx.Node] = {}
        self.waits: dict[fx.Node, fx.Node] = {}
        self.forward_ends = forward_ends(joint.graph)

    def part(self) -> Part:
        placeholders = self.joint.graph.find_nodes(op="placeholder")
        for node, end in zip(placeholders, self.joint.inputs, strict=True):
            self.place(node, end)
        for order, node in enumerate(self.joint.graph.nodes):
            if node.op not in ("placeholder", "output"):
                self.copy(node, order)
        outputs = self.outputs()
        self.graph.output(tuple(node for _, node in outputs))
        self.drop_unused()
        if any(port == Port(Role.OUTPUT, "loss") for port, _ in outputs) and Port(Role.TANGENT, "loss") not in self.used():
            raise CaptureError(self.where, "the loss has no gradient", "let it be made of differentiable operators")
        module = self.rewriter.module(self.joint.root, "Joint")
        inputs = self.used()
        layouts = {self.parameter_name(name): layout for name, layout in self.joint.layouts.items()}
        return Part(module, inputs, tuple(port for port, _ in outputs), layouts=layouts, guards=self.joint.guards)

    # inputs

    def place(self, node: fx.Node, end: End) -> None:
        if end.role is None:
            if node.users and any(user.op != "output" for user in node.users):
                raise CaptureError(self.where, f"{end.key} enters the graph", "pass it as a tensor, or make it a constant")
            return
        port = self.input_port(end)
        if port not in self.inputs:
            prefix = "" if port.name.startswith(port.role.name.lower()) else f"{port.role.name.lower()}_"
            copy = self.graph.placeholder(identifier(prefix + port.name))
            copy.meta = {key: value for key, value in node.meta.items() if key != "desc"}
            nodes.set_origin(copy, Origin(backward=port.role is Role.TANGENT, source=copy.name))
            self.inputs[port] = copy
        self.copies[node] = self.inputs[port]

    def input_port(self, end: End) -> Port:
        if end.role is Role.PARAMETER:
            return Port(Role.PARAMETER, self.parameter_name(str(end.key)))
        if end.role is Role.BUFFER:
            return Port(Role.BUFFER, local_name(str(end.key)))
        if end.role is Role.INPUT:
            return self.arguments[int(end.key)]
        if end.of is not Role.OUTPUT:
            raise CaptureError(
                self.where, f"forward changes {local_name(str(end.key))!r} in place, for autograd to see", "clone it first"
            )
        return Port(Role.TANGENT, self.output_name(int(end.key)))

    def parameter_name(self, traced: str) -> str:
        name = local_name(traced)
        return self.first_names.get(name, name)

    def output_name(self, index: int) -> str:
        return re.sub(r"^\['(\w+)'\]", r"\1", self.joint.output_paths[index])

    # operators

    def copy(self, node: fx.Node, order: int) -> None:
        check_static(node, self.where)
        if node.target in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            self.copies[node] = self.copies[node.args[0]]  # type: ignore[index]
            return
        if nodes.is_wait(node):
            source = self.copies[node.args[0]]  # type: ignore[index]
            if source in self.waits or nodes.launched_by(source) is None:  # waited for already, or nothing to wait for
                self.copies[node] = self.waits.get(source, source)
                return
        backward, path = self.placed(node, order)
        what = verb(node)
        name = identifier("_".join(filter(None, (path, what, "grad" if backward and "backward" not in what else ""))))
        # Fake tensors can have other strides than real ones (batch norm's), for which a view may have to copy.
        target = torch.ops.aten.reshape.default if node.target is torch.ops.aten.view.default else None
        copy = self.rewriter.copy(node, name=name, target=target)
        nodes.set_origin(copy, Origin(path, backward, order, copy.name))
        if nodes.is_wait(copy):
            self.waits[nodes.tensor_arguments(copy)[0]] = copy

    def placed(self, node: fx.Node, order: int) -> tuple[bool, str]:
        """Backward or not, and the module's path: torch's word, else what its arguments say."""
        before = [nodes.origin(self.copies[n]) for n in node.all_input_nodes]
        said = is_backward(node)
        backward = any(o.backward for o in before) or (order > self.forward_ends if said is None else said)
        path = module_path(node)
        if path is None:
            latest = max((o for o in before if o.module and o.backward), key=lambda o: o.order, default=Origin())
            return backward, latest.module
        return backward, local_name(path) if path != "module" else ""

    # outputs

    def outputs(self) -> list[tuple[Port, fx.Node]]:
        values = pytree.tree_leaves(self.joint.graph.output_node().args[0])
        found: dict[Port, fx.Node] = {}
        for value, end in zip(values, self.joint.outputs, strict=True):
            if end is None or not isinstance(value, fx.Node) or end.role is None:
                continue
            port, node = self.output_port(end), self.copies[value]
            if port.role is Role.BUFFER and not self.changes(port, node):
                continue
            if port.role is Role.BUFFER and port in found:  # changed in place before: what is assigned stands at the end
                if end.role is Role.OUTPUT and not _copies(node, found[port]):
                    found[port] = node
                continue
            if port in found:  # torch gave a tied parameter two gradients
                first = found[port]
                node = self.graph.call_function(torch.ops.aten.add.Tensor, (first, node))
                node.meta["val"] = first.meta.get("val")
                nodes.set_origin(node, Origin("", True, len(self.joint.graph.nodes), node.name))
            found[port] = node
        if not any(port.role in (Role.GRADIENT, Role.INPUT_GRADIENT) for port in found):
            raise CaptureError(self.where, "no output depends on anything that requires grad", "let a parameter require grad")
        return [(port, self.owned(node, found)) if port.role is Role.GRADIENT else (port, node) for port, node in found.items()]

    def changes(self, port: Port, node: fx.Node) -> bool:
        """Whether this is a new value for a buffer. Raises CaptureError when it does not fit in."""
        before, after = self.buffers[port.name], node.meta["val"]
        if before is None or before.shape != after.shape or before.dtype != after.dtype:
            what = f"forward replaces the buffer {port.name!r} by a tensor of another shape or dtype"
            raise CaptureError(self.where, what, "create the buffer as it will be")
        return not _copies(node, self.inputs.get(port))

    def output_port(self, end: End) -> Port:
        if end.role is Role.OUTPUT and (assigned := self.output_name(int(end.key))).startswith(ASSIGNED):
            return Port(Role.BUFFER, local_name(assigned.removeprefix(ASSIGNED).removesuffix("']")))
        if end.role is Role.OUTPUT:
            return Port(Role.OUTPUT, self.output_name(int(end.key)))
        if end.role is not Role.GRADIENT:
            if end.role is not Role.BUFFER:
                name = self.arguments[int(end.key)].name if isinstance(end.key, int) else local_name(end.key)
                raise CaptureError(self.where, f"forward changes its {end.role} {name!r} in place", "clone it first")
            return Port(Role.BUFFER, local_name(str(end.key)))
        if end.of is Role.PARAMETER:
            return Port(Role.GRADIENT, self.parameter_name(str(end.key)))
        return Port(Role.INPUT_GRADIENT, self.input_port(End(end.of or Role.INPUT, end.key)).name)

    def owned(self, node: fx.Node, outputs: dict[Port, fx.Node]) -> fx.Node:
        """`node`, or a copy of it where its memory is not a gradient's alone."""
        if nodes.has_own_memory(node, outputs.values()):
            return node
        copy = self.graph.call_function(torch.ops.aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
        copy.meta["val"] = node.meta.get("val")
        nodes.set_origin(copy, Origin(nodes.origin(node).module, True, len(self.joint.graph.nodes), copy.name))
        return copy

    def used(self) -> tuple[Port, ...]:
        kept = set(self.graph.nodes)
        return tuple(port for port, node in self.inputs.items() if node in kept)

    def drop_unused(self) -> None:
        for node in reversed(list(self.graph.nodes)):
            if node.op != "output" and not node.users and not nodes.is_pinned(node):
                self.graph.erase_node(node)


def argument_port(path: Any) -> Port:
    """The port of a leaf of (args, kwargs, target)."""
    where, rest = path[0].idx, path[1:]
    if where == 2:
        return Port(Role.TARGET, "target" + pytree.keystr(rest))
    head = rest[0]
    return Port(Role.INPUT, str(getattr(head, "idx", getattr(head, "key", head))) + pytree.keystr(rest[1:]))


def first_names(module: nn.Module, loss: Loss | None) -> dict[str, str]:
    """Of each parameter's qualified name the first one that names the same parameter."""
    names: dict[int, str] = {}
    result = {}
    parameters = list(module.named_parameters(remove_duplicate=False))
    if isinstance(loss, nn.Module):
        parameters += [(f"loss.{name}", parameter) for name, parameter in loss.named_parameters(remove_duplicate=False)]
    for name, parameter in parameters:
        result[name] = names.setdefault(id(parameter), name)
    return result


def all_buffers(module: nn.Module, loss: Loss | None) -> dict[str, torch.Tensor | None]:
    """Buffers by qualified name, those that are None included."""
    found: dict[str, torch.Tensor | None] = {}
    for prefix, owner in (("", module), ("loss.", loss)):
        for path, part in owner.named_modules() if isinstance(owner, nn.Module) else ():
            found |= {f"{prefix}{path}.{name}" if path else f"{prefix}{name}": value for name, value in part._buffers.items()}
    return found


def _copies(node: fx.Node, of: fx.Node | None) -> bool:
    return node is of or (node.target is torch.ops.aten.clone.default and node.args[0] is of)


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers(remove_duplicate=False))}


def check_names(module: nn.Module, loss: Loss | None) -> None:
    """Raise CaptureError where a submodule called `loss` has tensors of the names of the loss's own: ports go by name."""
    inner = getattr(module, "loss", None)
    if not isinstance(loss, nn.Module) or not isinstance(inner, nn.Module):
        return
    own, there = _tensors(loss), _tensors(inner)
    if same := sorted(name for name in own.keys() & there.keys() if own[name] is not there[name]):
        reason = f"the model's submodule 'loss' and the loss function both have {same[0]!r}, and they are two tensors"
        raise CaptureError(location_of(module), reason, "rename the submodule, or give it as the loss (loss=model.loss)")


def local_name(traced: str) -> str:
    return traced.removeprefix("module.")


def identifier(name: str) -> str:
    """`name` as a Python name."""
    cleaned = re.sub(r"\W+", "_", name).strip("_") or "value"
    return f"n_{cleaned}" if cleaned[0].isdigit() else cleaned


def verb(node: fx.Node) -> str:
    """What a node is called after: its operator, an item's number, an attribute's name."""
    if node.target is operator.getitem:
        return f"item{node.args[1]}"
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._opname.strip("_")
    return str(getattr(node.target, "__name__", node.target)).strip("_")
