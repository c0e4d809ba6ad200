"""Owns DTensor parameters under data and pipeline parallelism: ranks handle the parts they hold."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from pydist.errors import UsageError

_CUT = "_pydist_cut"  # the attribute of a local part that has its _Cut


@dataclasses.dataclass(frozen=True)
class _Cut:
    """How tensor parallelism has cut a parameter."""

    mesh: Any
    placements: Any
    shape: torch.Size
    stride: tuple[int, ...]

    def whole(self, part: Tensor) -> DTensor:
        """What this rank's and its peers' parts are together. Passes gradients on to the part."""
        return DTensor.from_local(
            part,
            self.mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=self.stride,
        )


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a module looks for one of its parameters."""

    owner: nn.Module
    name: str
    cut: _Cut

    def show(self) -> None:
        """Lets ``owner.name`` be a DTensor on the local part, for the forward to compute with."""
        local = self.owner._parameters[self.name]  # which may have been replaced
        if local is not None:
            self.owner.__dict__[self.name] = self.cut.whole(local)


def localize_parameters(*modules: nn.Module) -> bool:
    """Makes the DTensor parameters of modules plain ones that hold this rank's part. Returns
    whether there are any.

    They are what parameters() and gradients are from then on. Attribute access gives a DTensor on
    the same memory, new in each forward of one of `modules`, that passes gradients on to the part,
    in the parameter's own placements; so tensor-parallel layers compute as before, also where
    checkpointing runs them again. state_dict() has DTensors, as before: parts under one name would
    overwrite each other in a checkpoint. load_state_dict() takes these, parts, and whole tensors.
    """
    made: dict[int, nn.Parameter] = {}  # of parameters that several layers share
    for module in modules:
        places = list(_localize(module, made))
        if places:
            module.register_forward_pre_hook(_Showing(places))
    return bool(made)


def check_crossing(module: nn.Module, ranks: Sequence[int]) -> None:
    """Raises UsageError where two of `ranks`, a group of data or pipeline parallelism, hold parts
    of one parameter, which they would take for the same or for two parameters."""
    for name, parameter in module.named_parameters():
        is_whole = isinstance(parameter, DTensor)
        cut = _cut_of(parameter) if is_whole else getattr(parameter, _CUT, None)
        holders = [] if cut is None else cut.mesh.mesh.flatten().tolist()
        shared = sorted(set(holders) & set(ranks))
        if len(shared) > 1:
            raise UsageError(
                f"ranks {shared} hold parts of {name}, a DTensor, so they cannot be in one group "
                f"of data or pipeline parallelism, {list(ranks)}; such a group and one of tensor "
                "parallelism cross in one rank"
            )


def _localize(module: nn.Module, made: dict[int, nn.Parameter]) -> Iterable[_Place]:
    for owner in module.modules():
        found = {n: p for n, p in owner._parameters.items() if isinstance(p, DTensor)}
        for name, parameter in found.items():
            if id(parameter) not in made:
                made[id(parameter)] = _part_of(parameter)
            owner._parameters[name] = local = made[id(parameter)]
            yield _Place(owner, name, getattr(local, _CUT))
        if found:
            owner.register_state_dict_post_hook(_show_whole)
            owner.register_load_state_dict_pre_hook(_take_parts)


def _part_of(parameter: Any) -> nn.Parameter:
    local = nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)
    setattr(local, _CUT, _cut_of(parameter))
    return local


def _cut_of(parameter: Any) -> _Cut:
    return _Cut(parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride())


def _show_whole(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    for name, parameter in module._parameters.items():
        key = prefix + name
        # With keep_vars it is the parameter.
        if parameter is not None and state.get(key, parameter) is not parameter:
            state[key] = whole(parameter, state[key])


def _take_parts(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, parameter in module._parameters.items():
        key = prefix + name
        if parameter is not None and key in state:
            state[key] = part(parameter, state[key])


class _Showing:
    """A forward pre-hook."""

    def __init__(self, places: list[_Place]) -> None:
        self._places = places

    def __call__(self, _module: nn.Module, _inputs: Any) -> None:
        for place in self._places:
            place.show()


def whole(parameter: Tensor, value: Any) -> Any:
    """A DTensor of `value`, such as its gradient or what an optimizer keeps, where that is of the
    shape of a parameter that is the local part of one; else `value`. Shares its memory."""
    cut: _Cut | None = getattr(parameter, _CUT, None)
    if cut is None or not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    return cut.whole(value.detach()) if value.shape == parameter.shape else value


def part(parameter: Tensor, value: Any) -> Any:
    """The way back: this rank's part of a DTensor or of a tensor of the shape of the whole; what
    has another shape stays as it is."""
    cut: _Cut | None = getattr(parameter, _CUT, None)
    if cut is None or not isinstance(value, Tensor) or value.shape != cut.shape:
        return value
    with torch.no_grad():
        if isinstance(value, DTensor):
            return value.redistribute(cut.mesh, cut.placements).to_local()
        return distribute_tensor(value, cut.mesh, cut.placements, src_data_rank=None).to_local()


def norms(gradients: list[Tensor], norm_type: float, foreach: bool | None) -> list[Tensor]:
    """Of each gradient, as it is in the unsplit model. Of DTensors collective over their mesh, in
    one small all-reduce for each of its dimensions."""
    found: dict[int, Tensor] = {}
    by_mesh: dict[Any, list[int]] = {}
    for index, gradient in enumerate(gradients):
        mesh = gradient.device_mesh if isinstance(gradient, DTensor) else None
        by_mesh.setdefault(mesh, []).append(index)
    for mesh, indices in by_mesh.items():
        chosen = [gradients[index] for index in indices]
        if mesh is None:
            values = _local_norms(chosen, norm_type, foreach)
        else:
            values = _norms_over(mesh, chosen, norm_type, foreach)
        found.update(zip(indices, values, strict=True))
    return [found[index] for index in range(len(gradients))]


def _local_norms(tensors: list[Tensor], norm_type: float, foreach: bool | None) -> list[Tensor]:
    if foreach is False:
        return [torch.linalg.vector_norm(tensor, norm_type) for tensor in tensors]
    return list(torch._foreach_norm(tensors, norm_type))


def _norms_over(
    mesh: Any, gradients: list[Any], norm_type: float, foreach: bool | None
) -> list[Tensor]:
    if norm_type <= 0:
        raise UsageError(f"norms of order {norm_type} of DTensors cannot be added up; use another")
    parts = [gradient.to_local() for gradient in gradients]
    filled = [index for index, tensor in enumerate(parts) if tensor.numel() > 0]
    device = parts[0].device
    highest = norm_type == float("inf")
    powers = torch.zeros(len(parts), dtype=torch.float64, device=device)
    if filled:
        local = _local_norms([parts[index] for index in filled], norm_type, foreach)
        wide = torch.stack([norm.to(torch.float64) for norm in local])
        powers[torch.tensor(filled, device=device)] = wide if highest else wide**norm_type
    op = torch.distributed.ReduceOp.MAX if highest else torch.distributed.ReduceOp.SUM
    for dim in range(mesh.ndim):
        cut = [not gradient.placements[dim].is_replicate() for gradient in gradients]
        if not any(cut):
            continue
        together = powers.clone()
        torch.distributed.all_reduce(together, op, group=mesh.get_group(dim))
        powers = torch.where(torch.tensor(cut, device=device), together, powers)
    totals = powers if highest else powers ** (1.0 / norm_type)
    return [
        total.to(gradient.dtype) for total, gradient in zip(totals.unbind(), gradients, strict=True)
    ]
