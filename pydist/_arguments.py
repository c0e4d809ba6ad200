"""Owns what DataParallel's arguments mean: groups, devices, buffers and bucket sizes."""

import dataclasses
import math
import os
import warnings
from typing import Any

import torch
import torch.distributed as dist

from pydist._engine import check_group
from pydist.errors import UsageError

_MIB = 1024 * 1024
# As torch: 25 MiB, and a first bucket of 1 MiB, so that communication starts early.
_DEFAULT_BUCKET_NBYTES = 25 * _MIB
_DEFAULT_FIRST_BUCKET_NBYTES = 1 * _MIB

# Of a warning here: through the constructor to the line that wrapped the module.
_USER_STACKLEVEL = 3


def default_group() -> dist.ProcessGroup:
    """The default process group; RuntimeError where there is none."""
    if not dist.is_initialized():
        raise RuntimeError(
            "Default process group has not been initialized, please make sure to call "
            "init_process_group before wrapping a module in pydist.DataParallel."
        )
    group = dist.distributed_c10d._get_default_group()
    assert isinstance(group, dist.ProcessGroup)
    return group


def resolve_group(
    process_group: dist.ProcessGroup | None, device_mesh: Any, module: torch.nn.Module
) -> dist.ProcessGroup:
    """The ranks to train with. A slice of a larger mesh makes DTensor parameters local ones."""
    if process_group is not None and device_mesh is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh is None:
        check_group(process_group)
        return process_group if process_group is not None else default_group()
    if device_mesh.ndim != 1:
        raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
    if device_mesh._get_root_mesh() != device_mesh:
        # The other dimensions are tensor parallelism. Its import is slow, and rarely needed.
        from pydist._mesh import localize_parameters

        localize_parameters(module)
    group = device_mesh.get_group(mesh_dim=0)
    assert isinstance(group, dist.ProcessGroup)
    return group


@dataclasses.dataclass(frozen=True)
class Devices:
    """Where the module is, in torch's terms.

    Attributes:
        device_ids: the one device that inputs are moved to, or None: they stay where they are.
        output_device: kept for compatibility.
        device: of the first parameter.
        multi: parameters are on several devices.
    """

    device_ids: list[int] | None
    output_device: int | None
    device: torch.device
    multi: bool


def resolve_devices(
    device_ids: list[int | torch.device] | None,
    output_device: int | torch.device | None,
    parameters: list[torch.nn.Parameter],
) -> Devices:
    """Checks the arguments against where the parameters are; the errors are torch's."""
    if device_ids is not None and len(device_ids) > 1:
        raise UsageError("device_ids can only be None or contain a single element.")
    devices = {parameter.device for parameter in parameters}
    types = {device.type for device in devices}
    if len(types) > 1:
        raise UsageError(
            "DataParallel's input module must be on the same type of devices, but its parameters "
            f"are on {sorted(types)}"
        )
    device = parameters[0].device
    multi = len(devices) > 1
    if device_ids and device.type != "cpu" and not multi:
        first = _device_index(device_ids[0])
        output = first if output_device is None else _device_index(output_device)
        return Devices([first], output, device, multi)
    if device_ids or output_device:
        raise UsageError(
            "device_ids and output_device only work with modules on a single GPU, but got "
            f"device_ids {device_ids}, output_device {output_device}, and parameters on "
            f"{sorted(map(str, devices))}; leave both at None"
        )
    return Devices(None, None, device, multi)


def _device_index(device: int | torch.device) -> int:
    index = torch._utils._get_device_index(device, optional=True)
    assert isinstance(index, int)
    return index


def resolve_buffer_sync(broadcast: bool | None, forward_sync: bool | None) -> bool:
    """Whether buffers follow the first rank's before forwards. At the start they always do, also
    where torch's deprecated broadcast_buffers=False leaves them apart."""
    if broadcast is not None:
        warnings.warn(
            "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead"
            + ("." if forward_sync is None else ", which is given too and wins."),
            FutureWarning,
            stacklevel=_USER_STACKLEVEL,
        )
    if forward_sync is not None:
        return forward_sync
    return True if broadcast is None else broadcast


@dataclasses.dataclass(frozen=True)
class BucketCaps:
    """Sizes at which buckets are closed.

    Attributes:
        cap_nbytes: of a bucket.
        first_cap_nbytes: of the first one.
        is_default: nobody asked for a size.
    """

    cap_nbytes: int
    first_cap_nbytes: int
    is_default: bool


def resolve_bucket_caps(cap_mb: float | None) -> BucketCaps:
    """Sizes from MiB; less than a byte means every parameter alone."""
    if cap_mb is None:
        return BucketCaps(_DEFAULT_BUCKET_NBYTES, _DEFAULT_FIRST_BUCKET_NBYTES, True)
    if not (isinstance(cap_mb, (int, float)) and math.isfinite(cap_mb)):
        raise UsageError(f"bucket_cap_mb must be a finite number of MiB, got {cap_mb!r}")
    nbytes = max(1, int(cap_mb * _MIB))
    return BucketCaps(nbytes, nbytes, False)


def resolve_wire_dtype(wire_dtype: torch.dtype | None) -> str | None:
    """The name of the half type that wider gradients travel in; None: they travel as they are."""
    if wire_dtype is None:
        return None
    if wire_dtype not in (torch.bfloat16, torch.float16):
        raise UsageError(
            f"wire_dtype must be torch.bfloat16, torch.float16 or None, got {wire_dtype!r}"
        )
    return str(wire_dtype).removeprefix("torch.")


def check_environment() -> None:
    """Raises UsageError where a variable that DataParallel reads has no meaning."""
    allocator = os.environ.get("PYDIST_ALLOCATOR", "")
    if allocator not in ("", "0", "1"):
        raise UsageError(f"PYDIST_ALLOCATOR is {allocator!r}; expected 0, 1 or unset")


def check_parameter(name: str, parameter: torch.Tensor) -> None:
    """Raises where a parameter can not be averaged over ranks."""
    if torch.nn.parameter.is_lazy(parameter):
        raise RuntimeError(
            f"parameter {name} is uninitialized, and modules with uninitialized parameters can't "
            "be wrapped; run a dummy forward pass first to initialize the module"
        )
    if parameter.device.type == "meta":
        raise UsageError(
            f"parameter {name} is on the meta device and has no data; "
            "materialize the module (module.to_empty(device='cpu')) before wrapping it"
        )
    if parameter.device.type != "cpu":
        raise NotImplementedError(
            f"parameter {name} is on {parameter.device}; DataParallel trains on the CPU for now"
        )
    if parameter.layout != torch.strided:
        raise UsageError(f"parameter {name} is sparse; parameters must be dense")
    if any(
        n > 1 and step == 0 for n, step in zip(parameter.shape, parameter.stride(), strict=True)
    ):
        raise UsageError(
            f"parameter {name} is expanded: several of its elements share memory; "
            "clone() it before wrapping the module"
        )
