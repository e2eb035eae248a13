"""Exchanges among the equal ranks of the replicas that take part in a step, and collectives in general.

`exchange` holds the contract of the former: flat tensors are summed over replicas out of place, so that a
broken exchange can be tried again with the survivors; `ftar` implements it. `communicator` runs plans over an endpoint.
Importing this package makes torch.distributed know the backend "helix"; `ProcessGroupHelix` is torchft's
kind of group. May stand on `transport/`, `protocol/` and `triton_kernels/`; does not depend on pipelines or on
`replica/`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from helixrt.autoload import torch_backend

if TYPE_CHECKING:
    from helixrt.collectives.torchft_group import ProcessGroupHelix

__all__ = ["ProcessGroupHelix"]

torch_backend()


def __getattr__(name: str) -> Any:
    if name == "ProcessGroupHelix":  # needs torchft
        from helixrt.collectives.torchft_group import ProcessGroupHelix

        return ProcessGroupHelix
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
