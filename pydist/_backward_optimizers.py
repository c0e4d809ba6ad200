"""Owns optimizers that step in backward, by torch's _apply_optimizer_in_backward.

Torch runs them on each gradient as soon as it is accumulated, which is before ranks have averaged
it. Here they become post-accumulate hooks, which the reducer puts off until then.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

# Each parameter's hook, wherever it is wrapped.
_taken_over: Any = WeakTensorKeyDictionary()


def take_over_optimizers(parameters: Iterable[torch.nn.Parameter]) -> None:
    """The optimizers that these parameters have for backward step after the ranks' round."""
    for parameter in parameters:
        if hasattr(parameter, "_in_backward_optimizers"):
            _take_over(parameter)


def _take_over(parameter: torch.nn.Parameter) -> None:
    # Its import is slow, and rarely needed.
    from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

    for handle in param_to_optim_hook_handle_map.get(parameter, []):
        handle.remove()
    if parameter not in _taken_over:
        handle = parameter.register_post_accumulate_grad_hook(_step)
        assert isinstance(handle, RemovableHandle)
        _taken_over[parameter] = handle


def _step(parameter: torch.Tensor) -> None:
    for optimizer in parameter._in_backward_optimizers:  # type: ignore[attr-defined]
        optimizer.step()
    parameter.grad = None
