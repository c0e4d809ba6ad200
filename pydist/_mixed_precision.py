"""Owns mixed_precision: a wrapped module computes with copies of its parameters in another type.

Casts are part of the graph: a module's forward sees parameters cast from the real ones, so that
autograd casts their gradients back, and optimizers, state dicts and the reducer see the real ones
only. The real ones are in place again when the forward returns.

Hooks on every submodule see to it that a submodule that runs outside of the whole, as activation
checkpointing makes it in backward, computes with cast parameters too.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel.distributed import _MixedPrecision

from pydist.errors import UsageError

_HALF_TYPES = (torch.bfloat16, torch.float16)


def check_mixed_precision(config: Any) -> _MixedPrecision | None:
    """Raises UsageError unless this is torch's configuration, or None."""
    if config is not None and not isinstance(config, _MixedPrecision):
        raise UsageError(
            "mixed_precision must be a torch.nn.parallel.distributed._MixedPrecision, got "
            f"{type(config).__name__}"
        )
    return config


def reduction_dtype(config: _MixedPrecision | None) -> torch.dtype | None:
    """The half type that gradients travel in; None: they travel as they are."""
    if config is None:
        return None
    dtype = config.reduce_dtype or config.param_dtype
    return dtype if dtype in _HALF_TYPES else None


def apply_mixed_precision(module: nn.Module, config: _MixedPrecision, ignored: set[str]) -> None:
    """Casts buffers for good, and parameters in every forward of the module or a part of it."""
    for name, buffer in module.named_buffers():
        if name not in ignored and config.buffer_dtype and buffer.is_floating_point():
            buffer.data = buffer.to(config.buffer_dtype)
    for name, parameter in module.named_parameters():
        if name in ignored:
            parameter._ddp_ignored = True  # type: ignore[attr-defined]
        elif config.param_dtype is not None:
            # Torch's names, for who asks which types there are.
            placeholder = torch.empty(0, dtype=config.param_dtype, device=parameter.device)
            parameter._mp_param = placeholder  # type: ignore[attr-defined]
            parameter._fp_param = parameter.detach()  # type: ignore[attr-defined]
    if config.param_dtype is not None:
        casts = ParameterCasts(config.param_dtype)
        for submodule in module.modules():
            submodule.register_forward_pre_hook(casts.begin)
            submodule.register_forward_hook(casts.end, always_call=True)


class ParameterCasts:
    """Puts casts in the place of a module's parameters while its forward runs."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._outermost: nn.Module | None = None
        self._depth = 0  # of calls of the outermost module within itself
        self._replaced: list[tuple[nn.Module, str, nn.Parameter]] = []

    def begin(self, module: nn.Module, _inputs: Any) -> None:
        """Before a forward: does nothing within that of a module around it."""
        if self._outermost is None:
            self._outermost = module
            self._replace(module)
        if module is self._outermost:
            self._depth += 1

    def end(self, module: nn.Module, _inputs: Any, _output: Any) -> None:
        """After it, whether it returned or raised."""
        if module is not self._outermost:
            return
        self._depth -= 1
        if self._depth == 0:
            self._outermost = None
            while self._replaced:
                submodule, name, parameter = self._replaced.pop()
                submodule._parameters[name] = parameter

    def _replace(self, module: nn.Module) -> None:
        casts: dict[nn.Parameter, Tensor] = {}
        for submodule in module.modules():
            for name, parameter in submodule._parameters.items():
                if parameter is None or not self._is_cast(parameter):
                    continue
                if parameter not in casts:
                    casts[parameter] = parameter.to(self._dtype)
                self._replaced.append((submodule, name, parameter))
                submodule._parameters[name] = casts[parameter]  # type: ignore[assignment]

    def _is_cast(self, parameter: nn.Parameter) -> bool:
        wanted = parameter.is_floating_point() and parameter.dtype != self._dtype
        return wanted and not hasattr(parameter, "_ddp_ignored")
