"""The one file that uses torch's private capture interfaces: a module and its arguments become a joint graph.

In: a module, arguments that are tensors or constants in any pytree. Out: the flat ATen graph of its forward and
backward, as ahead-of-time autograd makes it from what Dynamo captures, with a typed `End` for every placeholder and
output. Errors of either become `CaptureError`. Names that differ between torch 2.13 and 2.15 are looked for, never assumed;
where others are missing, the import of this module or `trace_joint` raises ConfigError. Dynamo runs in front because
without it, mask building in `transformers` models branches on tensors.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import logging
import math
import re
import threading
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils.checkpoint import CheckpointPolicy

from helixrt.passes.errors import CaptureError
from helixrt.passes.guards_private import Guards, guards_of
from helixrt.passes.parts import Layout, Role
from helixrt.private_api import CAPTURE, require, unusable

try:
    from torch._dynamo import output_graph
    from torch._dynamo.functional_export import dynamo_graph_capture_for_export
    from torch._functorch import config as functorch_config
    from torch._functorch._aot_autograd import descriptors as aot
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
    from torch._guards import tracing
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
except ImportError as error:
    raise unusable(CAPTURE, error) from error

TORCH_FOLDER = inspect.getfile(torch).rsplit("/", 1)[0]
ONE_AT_A_TIME = threading.Lock()  # what capture sets in torch is the process's, not the thread's


@dataclass(frozen=True, slots=True)
class End:
    """One placeholder or output. `key` is a qualified name, for an INPUT or OUTPUT the index among the leaves of the arguments
    or of the output.

    `of`: what a TANGENT or GRADIENT belongs to. An output that is a PARAMETER, BUFFER or INPUT is its new value. `role` is None
    for the mesh of a DTensor and the like; `aliased`: the output is a view that torch would rebuild outside the graph.
    """

    role: Role | None
    key: str | int
    of: Role | None = None
    aliased: bool = False


@dataclass(frozen=True)
class Joint:
    """`graph`'s placeholders and flat outputs; outputs that are no tensors are None."""

    graph: fx.Graph
    root: nn.Module
    inputs: tuple[End, ...]
    outputs: tuple[End | None, ...]
    output_paths: tuple[str, ...]
    layouts: dict[str, Layout]
    side_effects: tuple[str, ...]
    guards: Guards | None


def trace_joint(module: nn.Module, arguments: tuple[Any, ...], described: nn.Module) -> Joint:
    """Capture `module(*arguments)` and its backward, in the ambient autocast and training mode.

    `described` is the user's module, for messages. No state of the module and of random generators changes.
    Raises CaptureError, and ConfigError where this torch has other interfaces.
    """
    require(CAPTURE)
    where = location_of(described)
    with ONE_AT_A_TIME, quiet_dynamo(where) as caught, nothing_installed(module), torch.enable_grad():
        try:
            captured = dynamo_graph_capture_for_export(module)(*arguments)
        except (torch._dynamo.exc.TorchDynamoException, GuardOnDataDependentSymNode) as error:
            raise from_dynamo(error, where) from error
        except AssertionError as error:
            if "backend_input" in str(error):
                raise CaptureError(where, "forward has no tensor operators", "give it something to compute") from error
            raise
        with contextlib.ExitStack() as stack:
            stack.enter_context(tracing(captured.meta["tracing_context"]))
            try:
                joint = aot_export_joint_with_descriptors(stack, captured, arguments, {})
            except (RuntimeError, NotImplementedError, AssertionError) as error:
                first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
                if "mutating a non-functional tensor" in first or "entirely functional graph" in first:
                    first = "forward changes a tensor in place that is neither argument nor buffer"
                    raise CaptureError(where, first, "make it a buffer: register_buffer") from error
                raise CaptureError(where, first, "see the error above this one for the operator") from error
    graph = joint.graph_module.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    output = graph.output_node()
    inputs = tuple(input_end(node.meta["desc"]) for node in placeholders)
    return Joint(
        graph=graph,
        root=joint.graph_module,
        inputs=inputs,
        outputs=tuple(None if d is None else output_end(d) for d in output.meta["desc"]),
        output_paths=tuple(paths_of(joint.out_spec)),
        layouts=gradient_layouts(joint),
        side_effects=tuple(caught),
        guards=guards_of(captured),
    )


@contextlib.contextmanager
def quiet_dynamo(where: str) -> Iterator[list[str]]:
    """Dynamo's settings for one exact capture; yields where it saw the module change outside tensors.

    Loggers are ignored (transformers logs in forward); the backward is traced without autocast, as
    `loss.backward()` after an autocast block runs.
    """
    found: list[str] = []
    loggers = {f for f in vars(logging.Logger).values() if callable(f)}
    wanted: dict[str, Any] = {
        "ignore_logging_functions": loggers,
        "ignore_logger_methods": loggers,
        "assume_static_by_default": True,
        "automatic_dynamic_shapes": False,
        "specialize_int": True,
        "specialize_float": True,
    }
    have = torch._dynamo.config
    settings = {name: value for name, value in wanted.items() if hasattr(have, name)}
    if "ignore_logging_functions" in settings:
        del settings["ignore_logger_methods"]  # the older name of the same setting
    aot_settings = {"functionalize_rng_ops": False}
    if hasattr(functorch_config, "backward_pass_autocast"):
        aot_settings["backward_pass_autocast"] = "off"  # type: ignore[assignment]
    with (
        torch._dynamo.config.patch(settings),
        functorch_config.patch(aot_settings),
        recorded_side_effects() as sources,
        warnings.catch_warnings(record=True) as raised,
    ):
        warnings.simplefilter("always")
        yield found
    for warning in raised:
        if warning.filename != output_graph.__file__ or not issubclass(warning.category, UserWarning):
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        elif sources is None:
            found.extend(map(qualified, said_side_effects(str(warning.message), where)))
    found.extend(qualified(source) for source in dict.fromkeys(sources or ()) if source.startswith("L["))


SIDE_EFFECTS = "get_replayed_side_effect_source_refs"  # of Dynamo's output graph: where forward changes Python objects


@contextlib.contextmanager
def recorded_side_effects() -> Iterator[list[str] | None]:
    """Yields what Dynamo's own list of side effects has; None where this torch has no such list, only a warning."""
    method = getattr(output_graph.OutputGraph, SIDE_EFFECTS, None)
    if method is None:
        yield None
        return
    found: list[str] = []

    def recording(graph: Any, *args: Any, **kwargs: Any) -> Any:
        sources = method(graph, *args, **kwargs)
        found.extend(sources)
        return sources

    setattr(output_graph.OutputGraph, SIDE_EFFECTS, recording)
    try:
        yield found
    finally:
        setattr(output_graph.OutputGraph, SIDE_EFFECTS, method)


def said_side_effects(text: str, where: str) -> list[str]:
    """The sources in a warning of Dynamo's. Raises CaptureError for a wording that is not known: state may change unseen."""
    try:
        sources = ast.literal_eval(text[text.rindex(": [") + 2 :])
        return [source for source in sources if source.startswith("L[")]
    except (ValueError, SyntaxError, AttributeError) as error:
        reason = f"Dynamo reports side effects of forward in words that are not known of torch {torch.__version__}: {text}"
        raise CaptureError(where, reason, "use a tested version of torch") from error


@contextlib.contextmanager
def nothing_installed(module: nn.Module) -> Iterator[None]:
    """Dynamo leaves its graph, and the module in it, among the globals of the forward it traced: let go of them."""
    scope = type(module).forward.__globals__
    try:
        yield
    finally:
        for name in scope:
            if name.startswith("__compiled_fn_"):
                scope[name] = None  # not deleted: that is up to Dynamo


def input_end(desc: Any) -> End:
    if isinstance(desc, aot.SubclassGetAttrAOTInput):
        return input_end(desc.base) if desc.attr == "_local_tensor" else End(None, desc.attr)
    if isinstance(desc, aot.ParamAOTInput):
        return End(Role.PARAMETER, desc.target)
    if isinstance(desc, aot.BufferAOTInput):
        return End(Role.BUFFER, desc.target)
    if isinstance(desc, aot.PlainAOTInput):
        return End(Role.INPUT, desc.idx)
    if isinstance(desc, aot.TangentAOTInput):
        base = output_end(desc.output)
        return End(Role.TANGENT, base.key, of=base.role)
    return End(None, desc.expr())


def output_end(desc: Any) -> End:
    if isinstance(desc, aot.SubclassGetAttrAOTOutput):
        return output_end(desc.base) if desc.attr == "_local_tensor" else End(None, desc.attr)
    if isinstance(desc, aot.PlainAOTOutput):
        return End(Role.OUTPUT, desc.idx)
    if isinstance(desc, aot.InputMutationAOTOutput):
        base = input_end(desc.mutated_input)
        return base if base.role is not None else End(Role.INPUT, base.key)
    if isinstance(desc, aot.GradAOTOutput):
        base = input_end(desc.grad_of)
        return End(Role.GRADIENT, base.key, of=base.role)
    if isinstance(desc, aot.IntermediateBaseAOTOutput):
        return End(None, desc.expr(), aliased=True)
    return End(None, desc.expr())


def paths_of(spec: Any) -> Iterator[str]:
    """The pytree path of each leaf of the output, as `['output'][0]`."""
    tree = torch.utils._pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    for path, _ in torch.utils._pytree.tree_flatten_with_path(tree)[0]:
        yield torch.utils._pytree.keystr(path)


def gradient_layouts(joint: Any) -> dict[str, Layout]:
    """Layouts of the gradients of DTensor parameters, by the parameter's name; it need not be the parameter's own."""
    subclasses = joint._aot_graph_capture.maybe_subclass_meta
    if subclasses is None or not subclasses.grad_input_metas:
        return {}
    layouts = {}
    for desc, meta in zip(flat_descs(joint), subclasses.grad_input_metas, strict=True):
        sample = getattr(meta, "original_subclass", None)
        if isinstance(desc, aot.ParamAOTInput) and sample is not None:
            placements, shape, stride = tuple(sample.placements), tuple(sample.shape), tuple(sample.stride())
            layouts[desc.target] = Layout(sample.device_mesh, placements, shape, stride)
    return layouts


def flat_descs(joint: Any) -> list[Any]:
    """Descriptors of the arguments before DTensors were taken apart, in order."""
    seen: list[Any] = []
    for node in joint.graph_module.graph.find_nodes(op="placeholder"):
        desc = node.meta["desc"]
        while isinstance(desc, aot.SubclassGetAttrAOTInput | aot.SubclassSizeAOTInput | aot.SubclassStrideAOTInput):
            desc = desc.base
        if isinstance(desc, aot.TangentAOTInput):
            break
        if not seen or seen[-1] != desc:
            seen.append(desc)
    return seen


def module_path(node: fx.Node) -> str | None:
    """The qualified name, below the traced module, of the module a node belongs to; None when torch does not say."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return None
    return qualified(str(list(stack.values())[-1][0]))


def qualified(source: str) -> str:
    """`L['self']._modules['layers']._modules['0'].name` as a qualified name, also where a wrapper forwards attributes."""
    source = re.sub(r"^L\[['\"]\w+['\"]\]\.?", "", source)
    source = re.sub(r"\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", source)
    return ".".join(piece for piece in source.split(".") if piece not in ("", "_modules", "__dict__"))


def is_backward(node: fx.Node) -> bool | None:
    """Whether tracing made the node in the backward; None when torch does not say."""
    tag = node.meta.get("partitioner_tag")
    return None if tag is None else tag in ("is_backward", "must_be_in_backward")


def forward_ends(joint: fx.Graph) -> float:
    """The place after which a joint graph is the backward's, also where nodes carry no tag and need no tangent (what an
    `autograd.Function` makes of saved values in its backward); infinite where torch does not say."""
    tagged = [order for order, node in enumerate(joint.nodes) if node.meta.get("partitioner_tag") == "is_forward"]
    return max(tagged, default=math.inf)


RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def region(node: fx.Node, policies: tuple[Any, ...] = tuple(CheckpointPolicy)) -> int | None:
    """The region of `torch.utils.checkpoint` that a forward node is in with one of these policies; None without."""
    return int(node.meta.get("ac_graph_id", 0)) if node.meta.get("recompute") in policies else None


def autograd_number(node: fx.Node) -> int | None:
    """The number of an operator's node in autograd, which its backward has, too; None when torch does not say."""
    return node.meta.get("seq_nr")


# ------------------------------------------------------------------------------------------------ errors


def check_static(node: fx.Node, fallback: str) -> None:
    """Raise CaptureError where a number or a size comes out of a tensor's values; it would not be in the graph."""
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        reason, remedy = "a number is read from a tensor", KEEP
    elif isinstance(value, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape):
        reason, remedy = "a size depends on the value of a tensor", FIX
    else:
        return
    raise CaptureError(place_of(node) or fallback, reason, remedy)


def place_of(node: fx.Node) -> str:
    """FILE:LINE of the user's that made the node, as far as torch knows it."""
    return innermost(node.meta.get("stack_trace") or "")


def innermost(stack_trace: str) -> str:
    """FILE:LINE of the last frame in a text that is not torch's; empty without one."""
    lines = re.findall(r'File "([^"]+)", line (\d+)', stack_trace)
    own = [f"{name}:{line}" for name, line in lines if not name.startswith(TORCH_FOLDER)]
    return own[-1] if own else ""


KEEP = "keep the value a tensor, or compute it outside forward and pass it in"
FIX = "give the result a fixed size (a mask instead of selected rows, a capacity)"
OWN_ERROR = re.compile(r"raised exception (\w+\(.*\))|Dynamo failed to run FX node with fake tensors: .*: got (\w+\(.*\))")
UNFIT = re.compile(r"TypeError\(.?(Unexpected keyword|[Mm]issing required|Too many positional)")
REMEDIES = (
    ("register_fake", "give the custom operator one: register_fake"),
    ("rnn, gru, or lstm", "use nn.LSTMCell, nn.GRUCell or nn.RNNCell in a loop over time"),
    ("pytree-flattenable", "pass tensors, numbers, strings, and lists, tuples and dictionaries of them"),
    ("autograd.grad", "write the derivative out as operators of forward"),
    ("torchscript", "use the module it was made from"),
    ("random.random", "draw by torch.rand and choose by torch.where"),
    (".item()", KEEP),
    ("could not extract specialized integer", FIX),
    ("data-dependent", "compute both sides and choose with torch.where, or move the choice out of forward"),
    ("dynamic shape operator", FIX),
    ("backwards hooks", "hook tensors instead: output.register_hook in a forward hook"),
    ("print", "move the print out of forward"),
    ("graph_break", "remove the graph break"),
    ("torch._dynamo.disable", "remove the decorator that excludes this function from capture"),
    ("skip", "call something torch can trace, or register it with torch.library.custom_op"),
)


def location_of(module: nn.Module) -> str:
    """FILE:LINE of the module's forward."""
    try:
        forward = inspect.unwrap(type(module).forward)
        return f"{inspect.getsourcefile(forward)}:{inspect.getsourcelines(forward)[1]}"
    except (TypeError, OSError):
        return type(module).__qualname__


def from_dynamo(error: Any, fallback: str) -> CaptureError:
    """Dynamo's message, in one sentence, with the innermost frame that is not torch's."""
    text = str(getattr(error, "msg", None) or error)
    stack = getattr(error, "real_stack", None) or traceback.StackSummary()
    frames = [frame for frame in stack if not frame.filename.startswith(TORCH_FOLDER)]
    frames = [frame for frame in frames if not frame.filename.endswith("passes/capture.py")]
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else innermost(text) or fallback
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    reason = lines[0] if lines else type(error).__name__
    if "data-dependent expression" in reason:
        reason = "a size, loop or branch depends on the value of a tensor"
    explanation = next((line for line in lines if line.startswith("Explanation:")), "")
    if explanation:
        reason = f"{reason.rstrip('.')} ({explanation.removeprefix('Explanation:').strip()})"
    own = OWN_ERROR.search(text)
    if own is not None and UNFIT.match(own[1] or own[2]):  # from torch 2.14
        reason = f"it is not called with the arguments it takes: {own[1] or own[2]}"
    elif own is not None:
        reason = f"it raises {own[1] or own[2]}"
    elif "bind arguments" in reason:
        reason = f"it is not called with the arguments it takes: {error.__cause__}"
    if reason.startswith("it ") and "register_fake" not in text:
        return CaptureError(where, reason, "this is so without capture, too; mend it first")
    lowered = text.lower()
    remedy = next((advice for word, advice in REMEDIES if word.lower() in lowered), "")
    if not remedy:
        hints = [line.removeprefix("Hint:").strip() for line in lines if line.startswith("Hint:")]
        remedy = hints[0] if hints else "rewrite the line with operators torch can trace"
    return CaptureError(where, reason, remedy)
