"""The one file that looks users' Triton kernels up by the numbers a captured graph has for them; torch has no public way.

In: the arguments of a `triton_kernel_wrapper_*` operator. Out: text that identifies the kernel, the same in every process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from helixrt.private_api import TRITON_KERNELS, usable


def kernel_text(arguments: Mapping[str, Any]) -> str:
    """Name and digest of the kernel's source, its settings, and its constant arguments. Numbers of graphs are left out. Where
    torch has no such table, the grid alone."""
    if not usable(TRITON_KERNELS):
        return f"kernel grid {arguments['grid']}"
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    kernel: Any = kernel_side_table.get_kernel(arguments["kernel_idx"])
    constants = kernel_side_table.get_constant_args(arguments["constant_args_idx"])
    settings = [str(config) for config in getattr(kernel, "configs", ())]
    while not hasattr(kernel, "src") and hasattr(kernel, "fn"):  # autotuned, or with heuristics, around the kernel itself
        kernel = kernel.fn
    source = hashlib.sha256(str(getattr(kernel, "src", "")).encode()).hexdigest()[:10]
    said = {key: constants[key] for key in sorted(constants) if isinstance(constants[key], bool | int | float | str)}
    return f"{getattr(kernel, '__name__', type(kernel).__name__)} {source} {settings} {said} grid {arguments['grid']}"
