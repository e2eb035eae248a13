"""Guards: which Python values a capture read, and whether they are still what they were. Uses torch's private interfaces.

In: what Dynamo captured of a `Traced` module. Out: `Guards`. They cover what the captured Python read, but for tensors of the
model and arguments of the call: global names, variables of closures, defaults, attributes of modules, classes and settings
objects, lengths and keys of containers, functions, hooks; other tensors by identity. Torch compares them in native code, in
0.1 ms for a model with 3,000 such values.

Where this torch has other guards, nothing is watched, and a line says so.
"""

from __future__ import annotations

import dataclasses
import re
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from helixrt.private_api import GUARDS, tell_once, usable

Scope = Callable[[], Mapping[str, Any] | None]  # the local names of the traced call by now; None once its module is gone

_OURS = r"L\['self'\]\.(own_outputs|assigned|_parameters|_buffers)\b"  # of `Traced`
_LEFT = re.compile(rf"({_OURS}|L\['(args|kwargs|target)'\]|G\['__builtins_dict__)")
_OF_MODULES = re.compile(r"\._(parameters|buffers)(\[|$)")  # keys and `Watch` have these tensors
_NEW: dict[str, Any] = dict.fromkeys(("guard_types", "code_list", "obj_weakref", "guarded_class_weakref"))
_MODEL = "L['self']._modules['module']"
_SETTINGS = {  # of the process and the thread: `state_key.ambient_key`
    "SHAPE_ENV",
    "DETERMINISTIC_ALGORITHMS",
    "GRAD_MODE",
    "DEFAULT_DEVICE",
    "GLOBAL_STATE",
    "TORCH_FUNCTION_STATE",
    "AUTOGRAD_SAVED_TENSORS_HOOKS",
    "FSDP_TRAINING_STATE",
    "DUAL_LEVEL",
    "FUNCTORCH_STACK_MATCH",
}


class Guards:
    """Compares nothing before `build`."""

    def __init__(self, captured: Any) -> None:
        output = captured._dynamo_bytecode_flatten.out.graph_capture_output
        self._read = [guard for guard in output.output_graph.guards if _is_kept(guard)]
        state = output.output_graph.dump_guards_state()
        self._state = dataclasses.replace(state, local_scope={}, skip_guards_check=True)
        self._code = output.bytecode
        self._globals: dict[str, Any] = state.global_scope
        self._names: list[str] = []
        self._tensors: list[tuple[str, Any, weakref.ref[torch.Tensor]]] = []
        self._manager: Any = None
        self._scope: Scope = lambda: None
        self.in_model = False  # whether what has changed is an attribute of the model, or behind one

    def build(self, scope: Scope, modes: bool = True) -> None:
        """What `scope` gives now are the values of the capture. It may be of another model than the captured one, whose copy
        that was; then what it has not is not compared. `modes`: also the training modes of modules."""
        local = scope()
        assert local is not None
        self._scope, here = scope, self._names_at(local)
        self._read = [guard for guard in self._read if modes or not guard.name.endswith(".training")]
        values = [(guard, guard.create_fn_name(), _value(guard, here)) for guard in self._read]
        found = [each for each in values if each[2] is not _MISSING]
        tensors = [(guard.name, value) for guard, kind, value in found if kind == "TENSOR_MATCH"]
        self._tensors = [(name, compile(name, name, "eval"), weakref.ref(value)) for name, value in tensors]
        kept = [guard for guard, kind, _ in found if kind not in ("TENSOR_MATCH", "DUPLICATE_INPUT")]
        self._names = sorted({guard.name for guard in kept}, key=len, reverse=True)
        new = [dataclasses.replace(guard, **_NEW) for guard in kept]  # torch gives the same ones to several captures
        guards = torch._guards.GuardsSet(torch.utils._ordered_set.OrderedSet(new))
        state = dataclasses.replace(self._state, local_scope=dict(local), _guards=guards, _aotautograd_guards=[])
        try:
            with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
                self._manager = torch._dynamo.guards.CheckFunctionManager(self._code, state).guard_manager
            if not (changed := self.changed()):
                return
            why: object = f"finds {changed!r} another right after the capture"
        except Exception as error:  # training goes on without them
            why = error
        self._manager = None
        tell_once(GUARDS, why)

    def renew(self) -> None:
        """The values of now are those of the capture."""
        if self.changed():
            self.build(self._scope)

    def changed(self) -> str:
        """The name of a value that is another than at the capture; empty where all are the same."""
        local = self._scope() if self._manager is not None else None
        if local is None:
            return ""
        if not self._manager.check(local):
            said = " ".join(map(str, self._manager.check_verbose(local).verbose_code_parts))
            name = next((name for name in self._names if name in said), said)
            return self._told(name, self._names_at(local))
        if self._tensors:
            here = self._names_at(local)
            for name, code, held in self._tensors:
                if _evaluated(code, here) is not held():
                    return self._told(name, here)
        return ""

    def _told(self, name: str, here: dict[str, Any]) -> str:
        self.in_model = _MODEL in name
        return in_words(name, here)

    def _names_at(self, local: Mapping[str, Any]) -> dict[str, Any]:
        return {"G": self._globals, "L": local}


def guards_of(captured: Any) -> Guards | None:
    """Of what `dynamo_graph_capture_for_export` returned."""
    if not usable(GUARDS):
        return None
    try:
        return Guards(captured)
    except (AttributeError, TypeError) as error:
        tell_once(GUARDS, error)
        return None


def _is_kept(guard: Any) -> bool:
    if guard.create_fn_name() in _SETTINGS or not guard.name or _LEFT.match(guard.name):
        return False
    return not _OF_MODULES.search(guard.name)


_MISSING = object()


def _value(guard: Any, here: dict[str, Any]) -> Any:
    """What it is about; an attribute that a module must not have counts as there."""
    value = _evaluated(guard.name, here)
    if value is _MISSING and guard.create_fn_name() == "HASATTR":
        value = _evaluated(guard.name.rpartition(".")[0], here)
    return value


def _evaluated(name: Any, here: dict[str, Any]) -> Any:
    try:
        return eval(name, here)  # an expression of Dynamo's, of attributes and items
    except Exception:  # whatever a lookup of a user's object raises
        return _MISSING


def in_words(name: str, here: dict[str, Any]) -> str:
    """`G['__import_a_dot_b'].c` as `a.b.c`, `L['self']._modules['module'].d` as `d`: as the user's code has it."""
    cell = re.search(r"(.*)\.__closure__\[(\d+)\]\.cell_contents", name)
    if cell is not None:
        function = _evaluated(cell[1], here)
        free = getattr(getattr(function, "__code__", None), "co_freevars", ())
        variable = free[int(cell[2])] if int(cell[2]) < len(free) else "a variable"
        return f"{variable}{name[cell.end() :]} in the closure of {in_words(cell[1], here)}"
    name = re.sub(r"dict\(type\((.*?)\)\.__dict__\)\['(\w+)'\]", r"\1.\2", name)
    name = re.sub(r"^type\((.*?)\)(?=\.)", r"\1", name)
    name = re.sub(r"G\['__import_(\w+)'\]", lambda found: found[1].replace("_dot_", "."), name)
    name = re.sub(r"[GL]\['(\w+)'\]", r"\1", name)
    name = re.sub(r"^__(main|helixrt_script)__\.", "", name)
    name = re.sub(r"\.(_modules|__dict__)\['?(\w+)'?\]", r".\2", name)
    name = re.sub(r"\.__kwdefaults__\['(\w+)'\]", r".\1", name)
    name = re.sub(r"^self\.(module\b\.?)?", "", name)
    return re.sub(r"\.__(code|defaults|dict)__\b", "", name) or "the model"
