"""Owns what one step of a pipeline is given, and what it returns."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pydist._keywords import KeywordRoutes
from pydist._microbatches import Microbatches, Slicer, merge_outputs, shares, target_weights
from pydist._running_statistics import StageStatistics
from pydist._tied_weights import TiedWeights
from pydist.errors import UsageError
from pydist.grad_scaler import GradScaler

Loss = Callable[[Any, Any], Tensor]
Metrics = Callable[[Any, Any], Mapping[str, Any]]


class ScalesLoss(Protocol):
    """pydist.GradScaler; with one rank also torch.amp.GradScaler."""

    def get_scale(self) -> float: ...


class StepResult(NamedTuple):
    """What step() and evaluate() return where more than the loss is asked for.

    loss: detached, the same on every rank.
    metrics: by name, weighted like the loss; the same on every rank. None if not asked for.
    outputs: of the last stage, for the whole batch, detached; None on other ranks, or if not asked
        for.
    """

    loss: Tensor
    metrics: dict[str, Any] | None
    outputs: Any


class StepFrame:
    """What this rank does around the actions of a step.

    `is_cut`: tensor parallelism has cut its stages. A step that fails may leave ranks that compute
    a layer together in different collectives of it, which would then take each other's values.
    """

    def __init__(
        self, statistics: Sequence[StageStatistics], tied: TiedWeights, is_cut: bool
    ) -> None:
        self._statistics = statistics
        self._tied = tied
        self._is_cut = is_cut
        self._failed = False

    def prepare(self, training: bool) -> None:
        """Before the step begins anywhere. Raises UsageError where it must not."""
        if self._is_cut and self._failed:
            raise UsageError(
                "an earlier step failed, and this rank's stages are cut by tensor parallelism: the "
                "ranks that compute its layers together may be a collective apart, and would mix "
                "up values. End all ranks, and go on from a checkpoint."
            )
        if training:
            self._tied.check()
        self._tied.link()

    @contextmanager
    def around(self, training: bool) -> Iterator[None]:
        """From before the first action until the step has ended on all ranks."""
        try:
            for statistics in self._statistics:
                statistics.begin_step()
            if training:
                self._tied.before_step()
            yield
        except BaseException:
            self._failed = True
            for statistics in self._statistics:
                statistics.drop_step()
            if training:
                self._tied.failed_step()
            raise
        for statistics in self._statistics:
            statistics.end_step()

    def before_end(
        self,
        training: bool,
        cut: Microbatches,
        outputs: "Outputs | None",
        mean: Callable[[Tensor], None] | None = None,
    ) -> None:
        """Once this rank's gradients are there; what it raises ends the step on all ranks.

        `mean`, over replicas, is wanted for gradients of earlier steps that are not averaged yet.
        """
        cut.check_unchanged()
        if outputs is not None:
            outputs.merge()
        if training and mean is not None:
            self._tied.average_earlier(mean)
        if training:
            self._tied.after_step()


# Stands where a microbatch has no output.
_ABSENT = object()


class StepInputs:
    """One step's arguments on this rank."""

    def __init__(
        self,
        slicer: Slicer,
        routes: KeywordRoutes,
        given: tuple[tuple[Any, ...], dict[str, Any], Any],
        local_stages: Sequence[int],
    ) -> None:
        args, kwargs, target = given
        self.total_weight = 0.0  # what loss_weight gave for the whole batch
        routes.check(kwargs)
        self.cut: Microbatches = slicer.cut(args, kwargs, target)
        self.cut.watch(routes.shared(kwargs))
        self.keywords = {
            stage: [routes.of_stage(stage, some) for some in self.cut.kwargs]
            for stage in local_stages
            if kwargs
        }

    def weights(self, reduction: str, loss_weight: Callable[[Any], Any] | None) -> list[float]:
        """Of each microbatch that is present, in the loss of the batch."""
        if reduction == "sum":
            return [1.0] * self.cut.num_present
        if loss_weight is not None:
            weights = target_weights(loss_weight, self.cut.targets)
            self.total_weight = sum(weights)
            return shares(weights)
        return self.cut.row_weights()


def scale_of(loss_scale: "float | ScalesLoss", num_ranks: int) -> float:
    """The number that gradients are multiplied with."""
    is_torch_scaler = isinstance(loss_scale, torch.amp.GradScaler)
    if is_torch_scaler and not isinstance(loss_scale, GradScaler) and num_ranks > 1:
        raise UsageError(
            "loss_scale is torch's GradScaler, with which each rank would skip steps by itself; "
            "use pydist.GradScaler, whose ranks decide together"
        )
    if isinstance(loss_scale, (int, float)):
        return float(loss_scale)
    if hasattr(loss_scale, "get_scale"):
        return float(loss_scale.get_scale())
    raise UsageError(
        f"loss_scale is {type(loss_scale).__name__}; expected a number or a GradScaler"
    )


def _number(name: str, value: Any) -> Any:
    """A metric of a microbatch as something that can be weighed, summed and sent."""
    if isinstance(value, Tensor):
        return value
    item = getattr(value, "item", None)  # of a scalar of NumPy, or an array of one
    if callable(item) and getattr(value, "size", None) == 1:
        return item()
    if isinstance(value, (int, float, complex)):
        return value
    raise UsageError(
        f"metric {name!r} is of type {type(value).__name__}; metrics(output, target) gives a dict "
        "of numbers or tensors: return a mean over the microbatch's rows"
    )


class Total:
    """Sums losses and metrics of microbatches; the executor calls it once all are there."""

    def __init__(self, weights: Sequence[float], step: int) -> None:
        self._weights = weights
        self._step = step

    def __call__(
        self, losses: list[Tensor | None], metrics: list[Mapping[str, Any]] | None
    ) -> tuple[Tensor, dict[str, Any] | None, int]:
        """In ascending order of microbatches, as one process would; and the step's number, so that
        it is the same on all ranks again where one was interrupted when it had ended the last."""
        # Zero times the mean of nothing is not a number: a microbatch that weighs nothing is out.
        counted = [
            (weight, index)
            for index, (weight, loss) in enumerate(zip(self._weights, losses, strict=False))
            if weight != 0 and loss is not None
        ]
        with torch.no_grad():
            loss = self._sum([(weight, losses[index]) for weight, index in counted])
            if loss is None:
                loss = torch.zeros_like(next(each for each in losses if each is not None))
            if metrics is None:
                return loss.reshape(()), None, self._step
            for _, index in counted:
                _check_metrics(metrics[index], index)
            names = dict.fromkeys(name for _, index in counted for name in metrics[index])
            sums = {
                name: self._sum(
                    [(w, _number(name, metrics[i][name])) for w, i in counted if name in metrics[i]]
                )
                for name in names
            }
            return loss.reshape(()), sums, self._step

    @staticmethod
    def _sum(terms: Sequence[tuple[float, Any]]) -> Any:
        total = None
        for weight, value in terms:
            term = value * weight
            total = term if total is None else total + term
        return total


def _check_metrics(found: Any, microbatch: int) -> None:
    """Raises UsageError unless this is a dict with names; `_number` judges its values."""
    if not isinstance(found, Mapping):
        raise UsageError(
            f"metrics returned {type(found).__name__} for microbatch {microbatch}; expected a dict "
            "of numbers or tensors"
        )
    for name in found:
        if not isinstance(name, str):
            raise UsageError(
                f"metrics returned a dict with the key {name!r} for microbatch {microbatch}; "
                "expected a dict of numbers or tensors by name"
            )


class Outputs:
    """Collects the last stage's outputs, where this rank has that."""

    def __init__(self, num_microbatches: int, chunk_dim: int) -> None:
        self.by_microbatch: list[Any] = [_ABSENT] * num_microbatches
        self.merged: Any = None
        self._chunk_dim = chunk_dim

    def merge(self) -> None:
        """Those that are there become one."""
        there = [output for output in self.by_microbatch if output is not _ABSENT]
        self.merged = merge_outputs(there, self._chunk_dim)
