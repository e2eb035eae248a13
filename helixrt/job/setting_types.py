"""Settings of another type than the one that is declared: refused by name, before they are used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from helixrt.errors import ConfigError

_WORDS = {int: "an integer", float: "a number", str: "text", bool: "True or False", Path: "a path", NoneType: "None"}


def check_types(declared: Callable[..., Any] | type, given: Mapping[str, Any], above: str = "") -> None:
    """The arguments or fields `given` of a function or dataclass, and the fields of those that are dataclasses.

    Raises ConfigError with the key, the value, and what it must be.
    """
    hints = get_type_hints(declared)
    for name, value in given.items():
        if not _fits(value, hints[name]):
            raise ConfigError(f"{above}{name}", value, f"must be {_in_words(hints[name])}, and is a {type(value).__name__}")
        for at, part in enumerate(value) if isinstance(value, tuple | list) else ((None, value),):
            if is_dataclass(part) and not isinstance(part, type):
                key = f"{above}{name}" if at is None else f"{above}{name}[{at}]"
                check_types(type(part), {field.name: getattr(part, field.name) for field in fields(part)}, f"{key}.")


def _fits(value: Any, hint: Any) -> bool:
    origin, of = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, UnionType):
        return any(_fits(value, each) for each in of)
    if origin is Literal:
        return value in of
    if origin is tuple:  # of any length; a list is as good
        return isinstance(value, tuple | list) and all(_fits(each, of[0]) for each in value)
    if hint in (int, float):
        return isinstance(value, int if hint is int else int | float) and not isinstance(value, bool)
    return isinstance(value, origin or hint)


def _in_words(hint: Any) -> str:
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(_in_words, get_args(hint)))
    if get_origin(hint) is tuple:
        return f"a tuple of {getattr(get_args(hint)[0], '__name__', 'values')}"
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, get_args(hint)))}"
    return _WORDS.get(hint) or f"a {getattr(get_origin(hint) or hint, '__name__', hint)}"
