"""What a captured graph depends on besides the batch and the Python values that it was captured with (`guards_private`).

In: a module, or the process. Out: a hashable key of the module's parameters and buffers (layouts, ties, freezing), and of
torch's settings that choose operators (autocast, attention kernels, determinism).
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from helixrt.errors import ConfigError
from helixrt.passes.autocast import device_types


def tensors_key(module: nn.Module) -> Hashable:
    """Its parameters and buffers: names, layouts, ties, freezing; and which modules have them."""
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    for name, tensor in named:
        if is_lazy(tensor):
            raise ConfigError(name, "not initialized", "lazy modules get shapes from a first forward: call model(...) once")
    first: dict[int, int] = {}
    return tuple(
        (name, t.shape, t.dtype, t.device, t.requires_grad, first.setdefault(id(t), place), getattr(t, "placements", None))
        for place, (name, t) in enumerate(named)
    )


def ambient_key() -> Hashable:
    """Settings of the process and the thread that choose what operators a graph has."""
    autocast = tuple((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in device_types())
    cuda = torch.backends.cuda
    kernels = [cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()]
    determinism = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    return autocast, torch.get_default_dtype(), torch.get_default_device(), tuple(kernels), determinism
