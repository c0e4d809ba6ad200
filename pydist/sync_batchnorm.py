"""Owns SyncBatchNorm on the CPU: batch normalisation over the batches of all ranks together."""

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.nn.modules.batchnorm import _BatchNorm

from pydist._dynamo import untraced_with_callees
from pydist._engine import Engine, check_group, group_engine
from pydist._process_group import SUM
from pydist.errors import UsageError

_PARAMETERS = ("weight", "bias")
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
_Running = tuple[Tensor | None, Tensor | None]  # mean and variance
_NOT_KEPT: _Running = (None, None)


class SyncBatchNorm(torch.nn.SyncBatchNorm):
    """Normalises as one process would that had the batches of all ranks as one batch.

    Takes the arguments of :class:`torch.nn.SyncBatchNorm`, and is an instance of it. In training
    on the CPU it needs one all-gather in forward and, where the input requires a gradient, one
    all-reduce in backward. Batches may differ in size between ranks, and be empty. The gradients of
    weight and bias are this rank's share, for DataParallel to average. Statistics are float32 for
    half inputs. Gradients of gradients are right, at the price of more communication. In eval()
    it never communicates. On other devices it is torch's layer.

    Shape: (N, C, ...) with two dimensions or more; the output has the input's.

    Raises:
        ValueError: an input of one dimension or without channels; one value per channel on all
            ranks together.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not (self.training and input.is_cpu and dist.is_available() and dist.is_initialized()):
            return super().forward(input)
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        momentum = self._count_batch()
        check_group(self.process_group)
        engine = group_engine(self.process_group)
        running = (self.running_mean, self.running_var) if self.track_running_stats else _NOT_KEPT
        if engine.size == 1:
            return F.batch_norm(input, *running, self.weight, self.bias, True, momentum, self.eps)
        return _over_ranks(input, self.weight, self.bias, running, momentum, self.eps, engine)

    def _count_batch(self) -> float:
        """Notes one more batch; returns its weight in the running statistics."""
        if self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                return 1.0 / float(self.num_batches_tracked)
        return 0.0 if self.momentum is None else self.momentum

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_group: dist.ProcessGroup | None = None
    ) -> torch.nn.Module:
        """See :func:`pydist.convert_sync_batchnorm`."""
        return convert_sync_batchnorm(module, process_group)


def convert_sync_batchnorm(
    module: torch.nn.Module, process_group: dist.ProcessGroup | None = None
) -> torch.nn.Module:
    """Replaces all BatchNorm layers of `module`, in place, by :class:`SyncBatchNorm` layers.

    They keep the parameters and buffers themselves. A layer that occurs in several places is
    replaced by one in all of them.

    Args:
        process_group: the ranks whose batches are one batch; default: all.

    Returns:
        `module`; where it is a BatchNorm layer itself, its replacement.

    Raises:
        UsageError: a lazy layer that has not seen an input yet.
    """
    check_group(process_group)
    return _converted(module, process_group, {})


def _converted(
    module: torch.nn.Module,
    process_group: dist.ProcessGroup | None,
    done: dict[int, torch.nn.Module],
) -> torch.nn.Module:
    if id(module) in done:
        return done[id(module)]
    result = _replacement(module, process_group) if isinstance(module, _BatchNorm) else module
    done[id(module)] = result
    for name, child in list(module._modules.items()):
        if child is not None:
            result.add_module(name, _converted(child, process_group, done))
    return result


def _replacement(layer: _BatchNorm, process_group: dist.ProcessGroup | None) -> SyncBatchNorm:
    if isinstance(layer, torch.nn.modules.lazy.LazyModuleMixin):
        raise UsageError(
            f"{type(layer).__name__} does not know its number of features yet; "
            "run a forward before you convert it"
        )
    result = SyncBatchNorm(
        layer.num_features, layer.eps, layer.momentum, False, False, process_group
    )
    result.affine, result.track_running_stats = layer.affine, layer.track_running_stats
    for name in _PARAMETERS:
        result.register_parameter(name, getattr(layer, name))
    for name in _BUFFERS:
        result.register_buffer(name, getattr(layer, name))
    result.training = layer.training
    if hasattr(layer, "qconfig"):
        result.qconfig = layer.qconfig
    return result


def adopt_sync_batchnorm(module: torch.nn.Module) -> None:
    """Lets torch's own SyncBatchNorm layers, which refuse the CPU, work there: they become ours."""
    for layer in module.modules():
        if type(layer) is torch.nn.SyncBatchNorm:
            layer.__class__ = SyncBatchNorm


@untraced_with_callees
def _over_ranks(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running: _Running,
    momentum: float,
    eps: float,
    engine: Engine,
) -> Tensor:
    statistics = _gather_statistics(input, engine)
    if statistics.count == 0:
        return F.batch_norm(input, None, None, weight, bias, True, momentum, eps)
    statistics.move(*running, momentum)
    output: Tensor = _Normalise.apply(input, weight, bias, statistics, eps, engine)  # type: ignore[no-untyped-call]
    return output


@dataclasses.dataclass(frozen=True)
class _Statistics:
    """Of all ranks' batches together."""

    mean: Tensor  # per channel, float64
    var: Tensor  # per channel, float64, biased
    count: int  # values per channel

    def move(self, mean: Tensor | None, var: Tensor | None, momentum: float) -> None:
        """Moves running statistics, where they are kept, towards these."""
        with torch.no_grad():
            if mean is not None:
                mean.lerp_(self.mean.to(mean.dtype), momentum)
            if var is not None:
                unbiased = self.var * (self.count / (self.count - 1))
                var.lerp_(unbiased.to(var.dtype), momentum)


def _gather_statistics(input: Tensor, engine: Engine) -> _Statistics:
    """Mean, variance and count of each rank are gathered, and merged in rank order in float64.

    The merge is Chan's (Updating Formulae and a Pairwise Algorithm for Computing Sample Variances,
    1979), which loses nothing where the means are large.
    """
    channels = input.size(1)
    mine = torch.zeros(2 * channels + 1, dtype=torch.float64)
    count = input.numel() // channels
    if count > 0:
        mine[:channels], mine[channels:-1] = _local_statistics(input.detach())
        mine[-1] = count
    everybody = torch.empty(engine.size * mine.numel(), dtype=torch.float64)
    engine.side_operations.all_gather(everybody, mine, False)
    means, variances, counts = everybody.view(engine.size, -1).split([channels, channels, 1], 1)
    total = int(counts.sum())
    if total == 1:
        raise ValueError(
            "Expected more than 1 value per channel when training, got one on all "
            f"{engine.size} ranks together, input size {tuple(input.shape)} on rank {engine.rank}"
        )
    shares = counts / max(total, 1)
    mean = (shares * means).sum(0)
    var = (shares * (variances + (means - mean).square())).sum(0)
    return _Statistics(mean, var, total)


def _local_statistics(input: Tensor) -> tuple[Tensor, Tensor]:
    dtype = _statistics_dtype(input)
    # Torch's kernel makes statistics of the dtype of the running ones that it is given.
    unused = [torch.zeros(input.size(1), dtype=dtype) for _ in range(2)]
    mean, var = torch.batch_norm_update_stats(_dense(input), unused[0], unused[1], 0.0)
    return mean, var


def _statistics_dtype(input: Tensor) -> torch.dtype:
    return torch.float64 if input.dtype == torch.float64 else torch.float32


def _dense(tensor: Tensor) -> Tensor:
    """In an order that torch's kernels are fast for; a copy of what is transposed."""
    for memory_format in (torch.channels_last, torch.channels_last_3d):
        if tensor.is_contiguous(memory_format=memory_format):
            return tensor
    return tensor.contiguous()


class _Normalise(Function):
    """(input - mean) / sqrt(var + eps) * weight + bias, where mean and var depend on the input."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        statistics: _Statistics,
        eps: float,
        engine: Engine,
    ) -> Tensor:
        dtype = _statistics_dtype(input)
        mean, var = statistics.mean.to(dtype), statistics.var.to(dtype)
        ctx.save_for_backward(input, weight, bias, mean, var)
        ctx.count, ctx.eps, ctx.engine = statistics.count, eps, engine
        if input.numel() == 0:
            return torch.empty_like(input)
        weight, bias = (None if t is None else t.to(dtype) for t in (weight, bias))
        return F.batch_norm(_dense(input), mean, var, weight, bias, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        if torch.is_grad_enabled():  # create_graph
            return *_gradients_with_graph(ctx, grad_outputs[0]), None, None, None
        return *_gradients(ctx, grad_outputs[0]), None, None, None


def _gradients(ctx: Any, grad_output: Tensor) -> list[Tensor | None]:
    """With b, w the gradients of bias and weight from all ranks, x^ the normalised input:

    grad_input = weight / sqrt(var + eps) * (grad_output - b / count - x^ * w / count)
    """
    input, weight, bias, mean, var = ctx.saved_tensors
    grad_input, channels = None, input.size(1)
    grad_weight, grad_bias = torch.zeros_like(mean), torch.zeros_like(mean)
    if input.numel() > 0:
        input, grad_output = _dense(input), _dense(grad_output)
        _, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
            grad_output, input, None, mean, var, None, None, False, ctx.eps, [False, True, True]
        )
    if ctx.needs_input_grad[0]:
        sums = torch.cat([grad_bias, grad_weight]).to(torch.float64)
        ctx.engine.side_operations.all_reduce(sums, SUM, False)
        mean_bias, mean_weight = (sums / ctx.count).split(channels)
        inverse = (var.to(torch.float64) + ctx.eps).rsqrt()
        scale = inverse if weight is None else inverse * weight
        shape = [1, channels] + [1] * (input.dim() - 2)
        factors = (-inverse * mean_weight * scale, scale, -mean_bias * scale)
        slope, scale, shift = (factor.to(mean.dtype).view(shape) for factor in factors)
        result = input - mean.view(shape)
        result.mul_(slope).addcmul_(grad_output.to(result.dtype), scale).add_(shift)
        grad_input = result.to(input.dtype)
    return [
        grad_input,
        grad_weight.to(weight.dtype) if ctx.needs_input_grad[1] else None,
        grad_bias.to(bias.dtype) if ctx.needs_input_grad[2] else None,
    ]


def _gradients_with_graph(ctx: Any, grad_output: Tensor) -> list[Tensor | None]:
    """The same through autograd of a forward made of differentiable steps."""
    input, weight, bias = ctx.saved_tensors[:3]
    # Views of their own: the input itself may depend on weight and bias.
    views: list[Any] = [None if t is None else t.view_as(t) for t in (input, weight, bias)]
    needed = list(ctx.needs_input_grad[:3])
    output = _differentiable(views, ctx.count, ctx.eps, ctx.engine)
    wanted = [view for view, needs in zip(views, needed, strict=True) if needs]
    found = iter(torch.autograd.grad(output, wanted, grad_output, create_graph=True))
    return [next(found) if needs else None for needs in needed]


def _differentiable(views: list[Any], count: int, eps: float, engine: Engine) -> Tensor:
    input, weight, bias = views
    dims = [d for d in range(input.dim()) if d != 1]
    shape = [1, input.size(1)] + [1] * (input.dim() - 2)
    output = input.to(_statistics_dtype(input))
    output = output - (_sum_over_ranks(output.sum(dims), engine) / count).view(shape)
    var = _sum_over_ranks(output.square().sum(dims), engine) / count
    output = output * (var + eps).rsqrt().view(shape)
    if weight is not None:
        output = output * weight.view(shape)
    if bias is not None:
        output = output + bias.view(shape)
    result: Tensor = output.to(input.dtype)
    return result


def _sum_over_ranks(tensor: Tensor, engine: Engine) -> Tensor:
    total: Tensor = _SumOverRanks.apply(tensor, engine)  # type: ignore[no-untyped-call]
    return total


class _SumOverRanks(Function):
    """The sum of all ranks' tensors, of which every rank's loss is a function."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, engine: Engine) -> Tensor:
        ctx.engine = engine
        total = tensor.to(torch.float64, copy=True).contiguous()
        engine.side_operations.all_reduce(total, SUM, False)
        return total.to(tensor.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        return _sum_over_ranks(grad_outputs[0], ctx.engine), None
