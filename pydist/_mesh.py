"""Owns DTensor parameters under data parallelism: ranks average the parts that they hold."""

import dataclasses
from typing import Any

import torch
from torch.distributed.tensor import DTensor


@dataclasses.dataclass(frozen=True)
class _Shard:
    """One parameter that tensor parallelism has cut, and where its local part stays."""

    owner: torch.nn.Module
    name: str
    local: torch.nn.Parameter
    whole: DTensor  # its mesh, placements, shape and stride

    def show(self) -> None:
        """Lets ``owner.name`` be a DTensor on the local part, for the forward to compute with."""
        self.owner.__dict__[self.name] = DTensor.from_local(
            self.local,
            self.whole.device_mesh,
            self.whole.placements,
            run_check=False,
            shape=self.whole.shape,
            stride=self.whole.stride(),
        )


def localize_parameters(module: torch.nn.Module) -> None:
    """Makes the DTensor parameters of `module` plain ones that hold this rank's part.

    They are what parameters(), state_dict() and gradients are from then on. Attribute access gives
    a DTensor on the same memory, new in each forward, that passes gradients on to the part; so
    tensor-parallel layers compute as before, also where checkpointing runs them again.
    """
    shards: list[_Shard] = []
    made: dict[int, torch.nn.Parameter] = {}  # of parameters that several layers share
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if not isinstance(parameter, DTensor):
                continue
            if id(parameter) not in made:
                made[id(parameter)] = torch.nn.Parameter(
                    parameter.to_local().detach(), requires_grad=parameter.requires_grad
                )
            owner._parameters[name] = local = made[id(parameter)]
            shards.append(_Shard(owner, name, local, parameter.detach()))
    if not shards:
        return

    def show_all(_module: torch.nn.Module, _inputs: Any) -> None:
        for shard in shards:
            shard.show()

    module.register_forward_pre_hook(show_all)
