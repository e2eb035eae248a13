"""Casts of parameters that graphs share: each is made once after its parameter has changed.

In: the parameters by port, and which casts graphs take in (`passes.lift`). Out: the casts among the same values by port. A
cast is made again, in the same memory, when the version counter of its parameter has changed, or after `forget`:
changes through `parameter.data` count no version. Together casts are as large as the weights are in their type (with float32
parameters under a bfloat16 autocast half of the matrices' bytes), and stay allocated between steps.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from helixrt.passes.lift import Cast
from helixrt.passes.parts import Port, Role, local
from helixrt.pipeline.held import Values

_Version = tuple[int, int]  # of a parameter's contents: its memory and its version counter


class Casts:
    """Of all graphs that read `lasting`, the values by port of parameters and buffers; casts are put in there, too.

    `made` counts casts that were computed.
    """

    def __init__(self, lasting: Values, casts: Iterable[Cast] = ()) -> None:
        self.lasting = lasting
        self.made = 0
        self._versions: dict[Cast, _Version | None] = {}
        self.add(casts)

    def add(self, casts: Iterable[Cast]) -> None:
        """Also make these; there may be some that are known."""
        for cast in casts:
            self._versions.setdefault(cast, None)

    def forget(self) -> None:
        """All parameters may have changed."""
        self._versions = dict.fromkeys(self._versions)

    @property
    def size_bytes(self) -> int:
        """Of those that were made."""
        return sum(local(self.lasting[cast.port]).nbytes for cast in self._versions if cast.port in self.lasting)

    @torch.no_grad()
    def refresh(self) -> None:
        """Make those whose parameters have changed; call it before graphs run."""
        for cast, known in self._versions.items():
            parameter = local(self.lasting[Port(Role.PARAMETER, cast.name)]).detach()
            version = parameter.data_ptr(), parameter._version
            if version == known:
                continue
            held = self.lasting.get(cast.port)
            if held is None:
                self.lasting[cast.port] = parameter.to(cast.dtype)
            else:
                held.copy_(parameter)
            self._versions[cast] = version
            self.made += 1
