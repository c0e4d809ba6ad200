"""Owns what DataParallel's arguments mean: groups, devices, buffers and bucket sizes."""

import dataclasses
import math
import os
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pydist._device import on_device, require_device
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
        from pydist._mesh import check_crossing, localize_parameters

        check_crossing(module, device_mesh.mesh.tolist())
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
    names: list[str],
    parameters: list[torch.Tensor],
) -> Devices:
    """Checks the arguments against where the parameters are; the errors are mostly torch's."""
    if device_ids is not None and len(device_ids) > 1:
        raise UsageError("device_ids can only be None or contain a single element.")
    devices = {parameter.device for parameter in parameters}
    types = {device.type for device in devices}
    device = parameters[0].device if parameters else torch.device("cpu")
    multi = len(devices) > 1
    if multi:
        other = next(i for i, p in enumerate(parameters) if p.device != device)
        raise UsageError(
            "DataParallel's input module must be on the same type of devices, but its parameters "
            f"are on {sorted(types)}, and on one device per process: parameter {names[0]} is on "
            f"{device}, parameter {names[other]} on {parameters[other].device}. Move the module "
            "to one device, or split it with PipelineParallel"
        )
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
        caps_nbytes: of successive buckets of one dtype; the last is that of all further ones.
        given_nbytes: those of bucket_cap_mb_list.
        is_default: nobody asked for a size.
    """

    caps_nbytes: list[int]
    given_nbytes: list[int]
    is_default: bool

    @property
    def largest_nbytes(self) -> int:
        return max(self.caps_nbytes)


def resolve_bucket_caps(cap_mb: float | None, cap_mb_list: Sequence[float] | None) -> BucketCaps:
    """Sizes from MiB; a list wins. Less than a byte means every parameter alone."""
    for name, sizes in (("bucket_cap_mb", [cap_mb]), ("bucket_cap_mb_list", cap_mb_list or [])):
        for size in sizes:
            finite = isinstance(size, (int, float)) and math.isfinite(size)
            if size is not None and not (finite and size >= 0):
                raise UsageError(f"{name} must be a finite number of MiB from 0 on, got {size!r}")
    if cap_mb_list:
        nbytes = [max(1, int(size * _MIB)) for size in cap_mb_list]
        return BucketCaps(nbytes, nbytes, False)
    if cap_mb is None:
        return BucketCaps([_DEFAULT_FIRST_BUCKET_NBYTES, _DEFAULT_BUCKET_NBYTES], [], True)
    return BucketCaps([max(1, int(cap_mb * _MIB))], [], False)


@dataclasses.dataclass(frozen=True)
class Delayed:
    """Parameters whose reduction starts with another's gradient; none by default.

    Attributes:
        names: of the parameters, in the module where it has them.
        gate: the name of the parameter that is waited for.
        outside: those that the module does not have, or ignores.
    """

    names: frozenset[str] = frozenset()
    gate: str | None = None
    outside: dict[str, torch.nn.Parameter] = dataclasses.field(default_factory=dict)

    def settings(self, names: list[str]) -> dict[str, Any]:
        """Indices of the delayed ones and of the gate in the names of all parameters."""
        delayed = [index for index, name in enumerate(names) if name in self.names]
        return {"delayed": delayed, "gate": -1 if self.gate is None else names.index(self.gate)}


def resolve_delayed(
    named: Iterable[tuple[str, torch.nn.Parameter]] | None,
    gate: torch.nn.Parameter | None,
    module: torch.nn.Module,
    ignored: set[str],
) -> Delayed:
    """What is delayed and until when; UsageError where that cannot work."""
    if (named is None) != (gate is None):
        raise UsageError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce "
            "need to be set at the same time."
        )
    if named is None or gate is None:
        return Delayed()
    known = {id(p): name for name, p in module.named_parameters() if name not in ignored}
    delayed = set()
    outside = {}
    for name, parameter in named:
        if id(parameter) not in known:
            if name in known.values():
                raise UsageError(
                    f"delay_all_reduce_named_params names {name}, but another parameter has this "
                    "name"
                )
            known[id(parameter)] = name
            outside[name] = parameter
        delayed.add(known[id(parameter)])
    if id(gate) not in known or not gate.requires_grad:
        found = f"{known[id(gate)]}, which does not" if id(gate) in known else "none of them"
        raise UsageError(
            "param_to_hook_all_reduce must be a parameter of the module, or one of "
            f"delay_all_reduce_named_params, that requires a gradient; got {found}"
        )
    return Delayed(frozenset(delayed), known[id(gate)], outside)


def resolve_wire_dtype(wire_dtype: torch.dtype | None) -> str | None:
    """The name of the type that wider gradients travel in; None: they travel as they are."""
    if wire_dtype is None:
        return None
    if wire_dtype not in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        raise UsageError(
            "wire_dtype must be torch.bfloat16, torch.float16 or None, or torch.float8_e4m3fn on "
            f"GPUs; got {wire_dtype!r}"
        )
    return str(wire_dtype).removeprefix("torch.")


ALGORITHMS = ("auto", "nccl", "ring", "slices")


def resolve_algorithm(algorithm: str) -> str:
    """How means are computed on GPUs."""
    if algorithm not in ALGORITHMS:
        raise UsageError(f"algorithm is {algorithm!r}; expected one of {', '.join(ALGORITHMS)}")
    return algorithm


def check_device_options(
    parameters: Sequence[torch.Tensor], wire_dtype: str | None, algorithm: str
) -> bool:
    """Whether the module is trained on a device; UsageError for what only devices have."""
    if parameters and on_device(parameters[0]):
        if wire_dtype == "float8_e4m3fn" and algorithm == "nccl":
            raise UsageError(
                'algorithm="nccl" cannot send gradients as torch.float8_e4m3fn; take "auto", '
                '"slices" or "ring"'
            )
        return True
    if wire_dtype == "float8_e4m3fn":
        raise UsageError(
            "wire_dtype=torch.float8_e4m3fn is for modules on GPUs, and this one is on the CPU; "
            "give torch.bfloat16 or torch.float16"
        )
    if algorithm != "auto":
        raise UsageError(
            f"algorithm={algorithm!r} is for modules on GPUs, and this one is on the CPU; leave it "
            'at "auto"'
        )
    return False


UNUSED_PARAMETERS = ("warn", "ignore", "error")


def resolve_unused(unused_parameters: str, find_unused_parameters: bool) -> str:
    """What to do about parameters that a step does not use: find_unused_parameters expects them."""
    if unused_parameters not in UNUSED_PARAMETERS:
        raise UsageError(
            f"unused_parameters is {unused_parameters!r}; expected one of "
            f"{', '.join(UNUSED_PARAMETERS)}"
        )
    if find_unused_parameters and unused_parameters == "error":
        raise UsageError(
            "find_unused_parameters=True says that unused parameters are expected, and "
            'unused_parameters="error" that they are an error; give one of them only'
        )
    return "ignore" if find_unused_parameters else unused_parameters


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
        require_device(parameter, f"parameter {name}")
    if hasattr(parameter, "device_mesh"):
        raise UsageError(
            f"parameter {name} is a DTensor; instead of process_group give device_mesh, one "
            'dimension of the mesh that has its as another: device_mesh=mesh["dp"]'
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
