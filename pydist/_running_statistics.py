"""Owns the running statistics of normalisation layers while a pipeline trains.

A layer's forward may run once more in backward, where a checkpoint recomputes it: that must not
count. And instead of once for each microbatch, they may be updated once a step ("deferred").
Outside of the pipeline's steps layers do as they always did.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from pydist.errors import UsageError

NAMES = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True)
class Moments:
    """Of one microbatch, by channel."""

    count: int  # elements in each channel
    mean: Tensor
    variance: Tensor  # unbiased


class RunningStatistics:
    """Those of one layer; its hooks run around the layer's forward, and act in steps only."""

    def __init__(self, layer: _NormBase, deferred: bool) -> None:
        self._layer = layer
        self._deferred = deferred
        self._in_step = False
        self._undo: Callable[[Tensor | None], None] | None = None
        self._moments: list[Moments] = []
        _remove_hooks(layer)
        layer.register_forward_pre_hook(self._before)
        # Also where the forward raises, as a checkpoint does once it has recomputed enough.
        layer.register_forward_hook(self._after, always_call=True)

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the layer is in no step."""
        return {**self.__dict__, "_in_step": False, "_undo": None, "_moments": []}

    def begin_step(self) -> None:
        self.drop_step()
        self._in_step = True

    def end_step(self) -> None:
        """Updates them from all microbatches as if these had been one."""
        if self._moments:
            self._update(merge(self._moments))
        self.drop_step()

    def drop_step(self) -> None:
        """The step is over; its microbatches do not count from here on."""
        self._finish(None)
        self._moments.clear()
        self._in_step = False

    def _before(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        self._finish(None)
        if not self._in_step or not self._layer.training or self._layer.running_mean is None:
            return
        if torch._C._current_graph_task_id() != -1:
            self._keep_from_recomputation()
        elif self._deferred:
            self._measure(args[0])

    def _after(self, layer: nn.Module, args: tuple[Any, ...], output: Tensor | None) -> None:
        self._finish(output)

    def _finish(self, output: Tensor | None) -> None:
        """After a forward. Torch calls no hook after a KeyboardInterrupt in it: then this is made
        up for before the next forward, or at the end of the step."""
        if self._undo is not None:
            self._undo(output)
            self._undo = None

    def _keep_from_recomputation(self) -> None:
        """The update becomes x = 1 * x + 0 * new. (Not without statistics: a checkpoint insists on
        saving as many tensors as the first time.)"""
        layer = self._layer
        momentum, count = layer.momentum, layer.num_batches_tracked
        count_before = count.clone() if count is not None else None

        def undo(_: Tensor | None) -> None:
            layer.momentum = momentum
            if count is not None and count_before is not None:
                count.copy_(count_before)

        self._undo = undo  # first, as an interrupt may come anywhere
        layer.momentum = 0.0

    def _measure(self, input: Tensor) -> None:
        """The layer's own update, x = 0 * x + 1 * new, on other buffers gives the moments."""
        layer = self._layer
        momentum = layer.momentum
        buffers = {name: layer._buffers[name] for name in NAMES}
        measured = {
            name: None if buffer is None else torch.zeros_like(buffer)
            for name, buffer in buffers.items()
        }

        def undo(output: Tensor | None) -> None:
            layer.momentum = momentum
            layer._buffers.update(buffers)
            mean, variance = measured["running_mean"], measured["running_var"]
            if output is not None and mean is not None and variance is not None:
                count = input.numel() // input.shape[1]
                self._moments.append(Moments(count, mean, variance))

        self._undo = undo  # first, as an interrupt may come anywhere
        layer.momentum = 1.0
        layer._buffers.update(measured)

    @torch.no_grad()
    def _update(self, moments: Moments) -> None:
        layer = self._layer
        mean, variance = layer.running_mean, layer.running_var
        factor = layer.momentum
        if layer.num_batches_tracked is not None:
            layer.num_batches_tracked.add_(1)
            if factor is None:
                factor = 1.0 / float(layer.num_batches_tracked)
        if mean is None or variance is None or factor is None:
            return
        mean.lerp_(moments.mean.to(mean), factor)
        variance.lerp_(moments.variance.to(variance), factor)


def _remove_hooks(layer: nn.Module) -> None:
    """Those of a pipeline that the layer was in before, or that the layer was copied from."""
    for hooks in (layer._forward_pre_hooks, layer._forward_hooks):
        for key, hook in list(hooks.items()):
            if isinstance(getattr(hook, "__self__", None), RunningStatistics):
                del hooks[key]
                layer._forward_hooks_always_called.pop(key, None)


def merge(parts: list[Moments]) -> Moments:
    """The moments of all elements together (Chan, Golub, LeVeque 1979)."""
    count = sum(part.count for part in parts)
    means = [part.mean.double() for part in parts]
    mean = sum((m * p.count for m, p in zip(means, parts, strict=True)), torch.zeros(())) / count
    squares = torch.zeros_like(mean)
    for own, part in zip(means, parts, strict=True):
        squares += part.variance.double() * (part.count - 1) + (own - mean) ** 2 * part.count
    return Moments(count, mean, squares / (count - 1))


class StageStatistics:
    """Those of all layers of a stage. Names in state_dict stay as they are."""

    def __init__(self, stage: nn.Module, deferred: bool = False) -> None:
        """Registers hooks on the layers. A stage has one of these, for as long as it lives."""
        self._layers: list[RunningStatistics] = []
        for name, module in stage.named_modules():
            if not isinstance(module, _NormBase):
                continue
            if deferred and isinstance(module, nn.SyncBatchNorm):
                raise UsageError(
                    f"deferred_batch_norm is not for {name}, a {type(module).__name__}, whose "
                    "microbatches are normalised together with other ranks'; use nn.BatchNorm, or "
                    "leave deferred_batch_norm out"
                )
            own = RunningStatistics(module, deferred and isinstance(module, _BatchNorm))
            self._layers.append(own)

    def begin_step(self) -> None:
        """Before the first forward of a step; forgets what a failed step has left."""
        for statistics in self._layers:
            statistics.begin_step()

    def end_step(self) -> None:
        """After the last forward of a step that succeeded."""
        for statistics in self._layers:
            statistics.end_step()

    def drop_step(self) -> None:
        """After a step that failed."""
        for statistics in self._layers:
            statistics.drop_step()
