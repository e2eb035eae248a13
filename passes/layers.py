"""Layers: which layer of the model each node of a part belongs to, read off the modules' names.

In: the modules that nodes come from (`nodes.Origin`), such as `transformer.h.3.attn`. Out: a number for each, or None
outside of layers. Layers are the children of a numbered container whose children are alike, the outermost one; several
such containers (encoder and decoder) are numbered one after the other. Without one, the first number in a name counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Path = tuple[str, ...]


def layers(modules: Sequence[str], targets: Sequence[str]) -> list[int | None]:
    """The layer of each operator, from its module's qualified name and what it calls (to find equal ones)."""
    paths = [tuple(name.split(".")) if name else () for name in modules]
    containers: dict[Path, dict[int, set[str]]] = {}
    for path, target in zip(paths, targets, strict=True):
        for at, piece in enumerate(path):
            if piece.isdecimal():
                containers.setdefault(path[:at], {}).setdefault(int(piece), set()).add(target)
    repeated = [path for path, children in containers.items() if _alike(children)]
    chosen = [path for path in repeated if not any(path[: len(other)] == other and path != other for other in repeated)]
    largest = _covered(paths, chosen)
    chosen = [path for path in chosen if 4 * largest[path] >= sum(map(bool, paths))]  # experts of one layer are no layers
    first, offsets = 0, {}
    for path in chosen:
        offsets[path] = first
        first += max(containers[path]) + 1
    return [_layer(path, offsets) for path in paths]


def _alike(children: Mapping[int, set[str]]) -> bool:
    """Two of the children call the same operators."""
    kinds = [frozenset(targets) for targets in children.values()]
    return len(set(kinds)) < len(kinds)


def _covered(paths: Sequence[Path], containers: Sequence[Path]) -> dict[Path, int]:
    return {of: sum(path[: len(of)] == of and len(path) > len(of) for path in paths) for of in containers}


def _layer(path: Path, offsets: Mapping[Path, int]) -> int | None:
    for container, offset in offsets.items():
        rest = path[len(container) :]
        if path[: len(container)] == container and rest and rest[0].isdecimal():
            return offset + int(rest[0])
    return None if offsets else next((int(piece) for piece in path if piece.isdecimal()), None)
