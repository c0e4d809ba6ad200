"""Owns the GradScaler whose ranks skip a step together."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from pydist._engine import check_group
from pydist.collectives import all_reduce


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler for models whose parameters are on several ranks.

    Infinities in one stage's gradients make every rank skip the optimizer's step and lower its
    scale; with torch's own scaler, stages would go on from different steps. All methods that take
    an optimizer are collective: call them on all ranks, for the same number of optimizers in the
    same order; a rank whose stages have no parameters passes None.

    device: as torch's, but "cpu" by default.
    process_group: the group, or groups, whose ranks agree; the default group where None. Ranks of a
        pipeline must be in one, replicas that average their gradients find the same anyway.
    """

    def __init__(
        self,
        device: str = "cpu",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        process_group: dist.ProcessGroup | Sequence[dist.ProcessGroup] | None = None,
    ) -> None:
        super().__init__(
            device,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        several = isinstance(process_group, Sequence)
        groups: list[Any] = list(process_group) if several else [process_group]  # type: ignore[arg-type]
        for group in groups:
            check_group(group)
        self._groups: list[dist.ProcessGroup | None] = groups
        self._no_optimizer: Optimizer | None = None

    def unscale_(self, optimizer: Optimizer | None) -> None:
        """As torch's, and collective."""
        super().unscale_(self._standing_in_for(optimizer))

    def step(self, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> float | None:
        """As torch's, and collective: on all ranks the optimizers step, or none."""
        return super().step(self._standing_in_for(optimizer), *args, **kwargs)

    def _standing_in_for(self, optimizer: Optimizer | None) -> Optimizer:
        if optimizer is not None:
            return optimizer
        if self._no_optimizer is None:
            self._no_optimizer = _NoParameters()
        return self._no_optimizer

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        """Ranks without the last stage have no loss that they would have scaled."""
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        found: tuple[Tensor, Tensor] = super()._check_scale_growth_tracker(funcname)
        return found

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Both ways to look for infinities, torch's own optimizers' and the others', end here."""
        problem: Exception | None = None
        found: dict[torch.device, Tensor] = {}
        try:
            found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        except Exception as error:
            problem = error
        # 0 or 1 as torch counts; 2 where a rank raised, and the others must not wait for it.
        own = sum(
            (value.to(found_inf.device) for value in found.values()), torch.zeros_like(found_inf)
        )
        largest = torch.full_like(own, 2.0) if problem is not None else own.clamp(max=1.0)
        for group in self._groups:
            all_reduce(largest, dist.ReduceOp.MAX, group)
        if problem is not None:
            raise problem
        if float(largest) > 1:
            raise RuntimeError("another rank raised while it unscaled its gradients; see its error")
        if not found:
            found = {found_inf.device: largest}
        for value in found.values():
            value.copy_(largest)
        return found


class _NoParameters(Optimizer):
    """What a rank without parameters steps."""

    def __init__(self) -> None:
        placeholder = torch.zeros(())
        super().__init__([placeholder], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        return None
