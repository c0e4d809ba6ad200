"""Owns the tests of torch's own communication hooks: each of them trains as it does with torch.

Hooks that work element by element are compared bit for bit with torch's class under the same hook;
the others with what they must come to in one process.
"""

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    ddp_zero_hook,
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import (
    _hook_then_optimizer,
    _OptimizerHookState,
)
from torch.distributed.optim import ZeroRedundancyOptimizer, as_functional_optim
from torch.nn.parallel import DistributedDataParallel

from conftest import Transport
from models import mlp, wavy_loss
from pydist import DataParallel
from reference import (
    OneProcess,
    assert_parameters_match,
    assert_reduced,
    assert_same_on_all_ranks,
    digest,
    draw,
    gradients,
)

WIDTH = 24
SEVERAL_BUCKETS_MB = 0.002  # a layer each


def loss_of(module: nn.Module, rank: int, step: int) -> Tensor:
    return wavy_loss(module(draw(rank, step, 4, WIDTH)))


def allreduce(model: DistributedDataParallel) -> None:
    model.register_comm_hook(None, default_hooks.allreduce_hook)


def allreduce_in_a_group(model: DistributedDataParallel) -> None:
    model.register_comm_hook(dist.new_group(), default_hooks.allreduce_hook)


def builtin_allreduce(model: DistributedDataParallel) -> None:
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)


def builtin_fp16(model: DistributedDataParallel) -> None:
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)


def fp16(model: DistributedDataParallel) -> None:
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)


def wrapped_in_fp16(model: DistributedDataParallel) -> None:
    hook = default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
    model.register_comm_hook(None, hook)


def nothing(model: DistributedDataParallel) -> None:
    model.register_comm_hook(None, debugging_hooks.noop_hook)


def local_sgd(model: DistributedDataParallel) -> None:
    state = post_localSGD_hook.PostLocalSGDState(None, dist.group.WORLD, 2)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)


def local_sgd_without_averaging(model: DistributedDataParallel) -> None:
    state = post_localSGD_hook.PostLocalSGDState(None, dist.group.WORLD, 2, False)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)


LIKE_TORCH: list[Callable[[DistributedDataParallel], None]] = [
    allreduce,
    allreduce_in_a_group,
    builtin_allreduce,
    builtin_fp16,
    fp16,
    wrapped_in_fp16,
    nothing,
    local_sgd,
    local_sgd_without_averaging,
]


def compare_with_torch(rank: int, world_size: int) -> None:
    for register in LIKE_TORCH:
        digests = []
        for wrapper in (DataParallel, DistributedDataParallel):
            model = wrapper(mlp(WIDTH, 3), bucket_cap_mb=SEVERAL_BUCKETS_MB)
            register(model)
            digests.append([])
            for step in range(4):
                model.zero_grad()
                loss_of(model, rank, step).backward()
                digests[-1].append(digest(gradients(model)))
        assert digests[0] == digests[1], register.__name__


def test_hooks_give_the_bits_that_they_give_with_torch(transport: Transport) -> None:
    """The default hooks, their wrapper, torch's built-in ones, the one that does nothing and
    post-local SGD before and after its start, four steps each: with two ranks, every element of
    every gradient is what torch's class makes of it."""
    transport.pool(2).run(compare_with_torch)


def compress_to_bf16(rank: int, world_size: int) -> None:
    module = mlp(WIDTH, 3)
    expected = OneProcess(module, world_size)
    hooks = (
        default_hooks.bf16_compress_hook,
        default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook),
    )
    for hook in hooks:
        model = DataParallel(copy.deepcopy(module), bucket_cap_mb=SEVERAL_BUCKETS_MB)
        model.register_comm_hook(None, hook)
        expected.zero_grad()
        loss_of(model, rank, 0).backward()
        expected.backward(loss_of, 0, synced=False)
        locals_of = zip(*(gradients(replica) for replica in expected.replicas), strict=True)
        for found, parts in zip(gradients(model), locals_of, strict=True):
            halves = [
                part.to(torch.bfloat16).div_(world_size) for part in parts if part is not None
            ]
            assert found is not None
            assert torch.equal(found, (halves[0] + halves[1]).float())


def test_bf16_hooks_work_on_the_cpu(transport: Transport) -> None:
    """Torch refuses them without CUDA. Here they are what they say: the sum of the shares of all
    ranks, in bfloat16."""
    transport.pool(2).run(compress_to_bf16)


class Stacked:
    """Work on an all-gather whose future is what NCCL's is: a list with a stack of all tensors."""

    def __init__(self, work: dist.Work, outputs: list[Tensor]) -> None:
        self._work, self._outputs = work, outputs

    def get_future(self) -> Any:
        return self._work.get_future().then(lambda _: [torch.stack(self._outputs)])


def stacking_all_gather(outputs: list[Tensor], *args: Any, **kwargs: Any) -> Stacked | None:
    work = all_gather(outputs, *args, **kwargs)
    return None if work is None else Stacked(work, outputs)


all_gather = dist.all_gather
orthogonalize = powerSGD_hook._orthogonalize


def orthogonalize_also_one(matrices: Tensor, epsilon: float = 0) -> None:
    """Torch 2.13's asserts three dimensions, and its batched hook calls it with two."""
    orthogonalize(matrices if matrices.dim() == 3 else matrices.unsqueeze(0), epsilon)


def approximate(rank: int, world_size: int) -> None:
    # What torch's hooks need where they have only been tried on GPUs.
    with (
        mock.patch.object(dist, "all_gather", stacking_all_gather),
        mock.patch.object(powerSGD_hook, "_orthogonalize", orthogonalize_also_one),
    ):
        approximate_all(rank, world_size)


def approximate_all(rank: int, world_size: int) -> None:
    power: dict[str, Any] = {
        "matrix_approximation_rank": WIDTH,
        "start_powerSGD_iter": 2,
        "min_compression_rate": 0.01,
    }
    tries: list[tuple[Any, Any, float]] = [
        (powerSGD_hook.PowerSGDState(None, **power), powerSGD_hook.powerSGD_hook, 1e-4),
        (
            powerSGD_hook.PowerSGDState(None, warm_start=False, **power),
            powerSGD_hook.powerSGD_hook,
            1e-4,
        ),
        (
            powerSGD_hook.PowerSGDState(None, **power),
            powerSGD_hook.batched_powerSGD_hook,
            1e-3,
        ),
        (None, quantization_hooks.quantization_pertensor_hook, 1 / 255),
        (None, quantization_hooks.quantization_perchannel_hook, 1 / 255),
    ]
    for state, hook, tolerance in tries:
        module = mlp(WIDTH, 3)
        expected = OneProcess(module, world_size)
        model = DataParallel(module, bucket_cap_mb=SEVERAL_BUCKETS_MB)
        model.register_comm_hook(state, hook)
        for step in range(5):
            model.zero_grad()
            expected.zero_grad()
            loss_of(model, rank, step).backward()
            expected.backward(loss_of, step, synced=False)
            scale = max(float(g.abs().max()) for r in expected.replicas for g in gradients(r))
            expected.average()
            for found, right in zip(gradients(model), gradients(expected.module), strict=True):
                assert found is not None
                assert float((found - right).abs().max()) <= 2 * scale * tolerance, hook
            assert_same_on_all_ranks(gradients(model))
        if state is not None:
            assert state.iter == 5
            assert state.p_memory_dict or not state.warm_start, "nothing was compressed"


def test_hooks_that_approximate_come_close(transport: Transport) -> None:
    """PowerSGD (with and without warm start, and batched) at full rank, and both quantizations,
    over several buckets, although their callbacks communicate: close to the mean, and the same bits
    on all ranks. PowerSGD counts every backward once."""
    transport.pool(2).run(approximate)


def step_in_the_hook(rank: int, world_size: int) -> None:
    kinds: list[tuple[Any, dict[str, Any]]] = [
        (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
        (torch.optim.Adam, {"lr": 0.01, "betas": (0.9, 0.99)}),
        (torch.optim.AdamW, {"lr": 0.01}),
    ]
    for kind, options in kinds:
        module = mlp(WIDTH, 3)
        expected = OneProcess(module, world_size, lambda ps, k=kind, o=options: k(ps, **o))
        model = DataParallel(module, bucket_cap_mb=SEVERAL_BUCKETS_MB)
        model._register_fused_optim(kind, **options)
        for step in range(4):
            model.zero_grad()
            loss_of(model, rank, step).backward()
            expected.step(loss_of, step)
        assert_parameters_match(model, expected.module)
        assert_same_on_all_ranks(module.parameters())

    module = mlp(WIDTH, 3)
    first = module[0].weight
    before = [parameter.clone() for parameter in module.parameters()]
    state = _OptimizerHookState(as_functional_optim(torch.optim.SGD, lr=0.1), [first])
    model = DataParallel(module)
    hook = _hook_then_optimizer(default_hooks.allreduce_hook, state)
    model.register_comm_hook(None, hook)
    loss_of(model, rank, 0).backward()
    assert not torch.equal(first, before[0])
    assert digest(list(module.parameters())[1:]) == digest(before[1:])


def test_optimizers_in_the_hook_step_on_means(transport: Transport) -> None:
    """_register_fused_optim with SGD, Adam and AdamW: after four backwards parameters are those of
    an optimizer in one process; and a hook that steps chosen parameters only leaves the others."""
    transport.pool(2).run(step_in_the_hook)


def step_with_zero(rank: int, world_size: int, interleaved: bool, shard: bool) -> None:
    make_hook = (
        ddp_zero_hook.hook_with_zero_step_interleaved
        if interleaved
        else ddp_zero_hook.hook_with_zero_step
    )
    module = mlp(WIDTH, 4)
    expected = OneProcess(module, world_size, lambda ps: torch.optim.SGD(ps, lr=0.05))
    model = DataParallel(module, bucket_cap_mb=SEVERAL_BUCKETS_MB)
    zero = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.SGD, overlap_with_ddp=True, lr=0.05
    )
    with mock.patch.object(ddp_zero_hook.dist, "get_backend", return_value="another"):
        hook = make_hook(default_hooks.allreduce_hook, model, zero, shard_buckets=shard)
    model.register_comm_hook(None, hook)
    for step in range(6):
        model.zero_grad()
        loss_of(model, rank, step).backward()
        if step >= 2:  # as with torch, it first looks at the buckets of two backwards
            expected.step(loss_of, step)
    assert_parameters_match(model, expected.module)
    assert_same_on_all_ranks(module.parameters())


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_zero_steps_in_the_hook(transport: Transport, interleaved: bool, shard: bool) -> None:
    """Both hooks that overlap ZeRO's optimizer with backward. Torch refuses to make them over Gloo,
    since they may hang there with its class; that refusal is switched off here, and parameters are
    those of SGD in one process after the two backwards in which they look at the buckets."""
    transport.pool(2).run(step_with_zero, interleaved, shard)


def average_hierarchically(rank: int, world_size: int) -> None:
    module = mlp(WIDTH, 3)
    expected = OneProcess(module, world_size)
    model = DataParallel(module, bucket_cap_mb=SEVERAL_BUCKETS_MB)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    state = post_localSGD_hook.PostLocalSGDState(None, pairs[rank // 2], 1)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    loss_of(model, rank, 0).backward()
    expected.backward(loss_of, 0)
    assert_reduced(model, expected)
    model.zero_grad()
    loss_of(model, rank, 1).backward()
    pair = OneProcess(mlp(WIDTH, 3), 2)
    pair.backward(lambda m, r, step: loss_of(m, r + rank // 2 * 2, step), 1)
    for found, right in zip(gradients(model), gradients(pair.module), strict=True):
        assert found is not None
        torch.testing.assert_close(found, right)
    assert_same_on_all_ranks(gradients(model), pairs[rank // 2])


def test_local_sgd_averages_in_its_subgroup(transport: Transport) -> None:
    """Four ranks in two pairs: the first backward averages over all, later ones over each pair."""
    transport.pool(4).run(average_hierarchically)
