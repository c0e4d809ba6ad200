"""Owns the tests of SyncBatchNorm: the numbers of one process that has all ranks' batches."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pydist
from conftest import Transport
from pydist import DataParallel, UsageError
from ranks import RankPool
from reference import assert_same_on_all_ranks, difference, draw, expect_error

CHANNELS = 3
# Of one process's kernel and ours, which add in another order; of float64, after rounding.
FACTORS = {torch.float64: 100.0, torch.float32: 20.0, torch.bfloat16: 1.0, torch.float16: 1.0}


@dataclasses.dataclass(frozen=True)
class Case:
    """One layer, and the batches of all ranks."""

    rows: tuple[int, ...] = (4, 4)
    tail: tuple[int, ...] = ()  # the input's dimensions after the channels
    dtype: torch.dtype = torch.float64
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    arrange: Callable[[Tensor], Tensor] | None = None  # the same values, other strides
    offset: float = 0.0  # of the inputs' mean
    steps: int = 1

    def batch(self, rank: int, step: int) -> Tensor:
        drawn = draw(rank, step, self.rows[rank], CHANNELS, *self.tail, dtype=torch.float64)
        drawn = drawn * (1 + rank) + self.offset + rank
        return drawn.to(self.dtype)


def transposed(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def channels_last_3d(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last_3d)


def layer_of(case: Case) -> nn.Module:
    kind = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
    parameters = torch.float64 if case.dtype == torch.float64 else torch.float32
    layer = kind[len(case.tail)](CHANNELS, dtype=parameters, **case.settings)
    if layer.affine:
        with torch.no_grad():
            layer.weight.copy_(torch.tensor([0.5, -1.5, 2.0]))
            layer.bias.copy_(torch.tensor([1.0, 0.25, -3.0]))
    return layer


def check(found: Tensor | None, expected: Tensor | None, what: str, case: Case) -> None:
    factor = FACTORS[case.dtype]
    problem = difference(found, expected, factor)
    assert problem is None, f"{what} of {case}: {problem}"


def compare(rank: int, world_size: int, case: Case) -> None:
    """Output, gradients and running statistics; weight and bias gradients add up over ranks."""
    reference = layer_of(case)
    layer = pydist.convert_sync_batchnorm(copy.deepcopy(reference))
    assert type(layer) is pydist.SyncBatchNorm
    begin = sum(case.rows[:rank])
    mine = slice(begin, begin + case.rows[rank])
    for step in range(case.steps):
        batches = [case.batch(r, step) for r in range(world_size)]
        whole = torch.cat(batches).requires_grad_()
        x = batches[rank] if case.arrange is None else case.arrange(batches[rank])
        x.requires_grad_()
        expected, found = reference(whole), layer(x)
        check(found, expected[mine], "output", case)
        assert found.dtype == x.dtype
        weights = torch.cos(torch.arange(whole.numel()).view(whole.shape)).to(case.dtype)
        given = weights[mine] if case.arrange is None else case.arrange(weights[mine])
        expected.backward(weights)
        found.backward(given)
        assert whole.grad is not None
        check(x.grad, whole.grad[mine], "input's gradient", case)
        if case.arrange is not None:
            assert x.grad is not None
            assert found.is_contiguous(memory_format=torch.channels_last) == x.is_contiguous(
                memory_format=torch.channels_last
            )
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        check(parameter.grad, reference.get_parameter(name).grad, f"{name}'s gradient", case)
    for name, buffer in reference.named_buffers():
        found_buffer = layer.get_buffer(name)
        if name == "num_batches_tracked":
            assert torch.equal(found_buffer, buffer)
        else:
            assert difference(found_buffer, buffer, 20.0) is None, f"{name} of {case}"
    assert_same_on_all_ranks(layer.buffers())


CASES = {
    "2-D": Case(),
    "3-D": Case(tail=(5,)),
    "4-D": Case(tail=(5, 4), dtype=torch.float32),
    "5-D": Case(tail=(2, 3, 4), dtype=torch.float32),
    "one channel's rows are one value": Case(rows=(1, 1), tail=(1, 1)),
    "unequal": Case(rows=(2, 5), tail=(3,)),
    "momentum=None": Case(rows=(2, 5), settings={"momentum": None}, steps=3),
    "momentum": Case(rows=(2, 5), settings={"momentum": 0.7, "eps": 0.1}, steps=3),
    "affine=False": Case(tail=(5, 4), settings={"affine": False}),
    "track_running_stats=False": Case(settings={"track_running_stats": False}),
    "channels last": Case((3, 2), (5, 4), torch.float32, arrange=channels_last),
    "channels last 3d": Case((3, 2), (2, 5, 4), torch.float32, arrange=channels_last_3d),
    "large mean": Case(rows=(40, 24), tail=(7,), dtype=torch.float32, offset=30.0),
    "bfloat16": Case((3, 6), (5, 4), torch.bfloat16),
    "bfloat16, channels last": Case((3, 6), (5, 4), torch.bfloat16, arrange=channels_last),
    "float16": Case((3, 6), (5, 4), torch.float16),
}


def compare_all(rank: int, world_size: int) -> None:
    for case in CASES.values():
        compare(rank, world_size, case)


def test_a_layer_has_the_numbers_of_one_process(transport: Transport) -> None:
    transport.pool(2).run(compare_all)


def test_c52_batches_may_differ_in_size(transport: Transport) -> None:
    """Ranks counted as equals whatever the size of their batches, so that running variances and
    input gradients were wrong."""
    transport.pool(2).run(compare, Case(rows=(2, 5), steps=2))


def test_c53_one_row_per_rank_is_enough(transport: Transport) -> None:
    """A row per rank was refused, although two ranks together have a variance."""
    transport.pool(2).run(compare, Case(rows=(1, 1), steps=2))


def one_value(rank: int, world_size: int) -> None:
    layer = pydist.SyncBatchNorm(CHANNELS)
    x = torch.ones(1 - rank, CHANNELS)
    error = expect_error(ValueError, lambda: layer(x))
    assert f"one on all {world_size} ranks together" in str(error), error


def test_one_value_per_channel_raises_on_every_rank(pool2: RankPool) -> None:
    """The variance of one value would be zero; the rank without any must not go on alone."""
    pool2.run(one_value)


def forward_in_eval(rank: int, world_size: int, track: bool) -> None:
    layer = pydist.SyncBatchNorm(CHANNELS, track_running_stats=track).eval()
    plain = nn.BatchNorm1d(CHANNELS, track_running_stats=track).eval()
    if rank == 0:
        x = draw(0, 0, 6, CHANNELS)
        assert torch.equal(layer(x), plain(x))
    dist.barrier()


@pytest.mark.parametrize("track", [True, False], ids=["running", "batch"])
def test_c54_eval_never_communicates(pool2: RankPool, track: bool) -> None:
    """Validation on the first rank alone hung in a collective."""
    pool2.run(forward_in_eval, track)


def all_empty(rank: int, world_size: int) -> None:
    layer = pydist.SyncBatchNorm(CHANNELS)
    before = copy.deepcopy(layer.state_dict())
    x = torch.ones(0, CHANNELS, 2, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == x.shape
    assert x.grad is not None
    after = layer.state_dict()
    assert torch.equal(after["running_mean"], before["running_mean"])
    assert torch.equal(after["running_var"], before["running_var"])


def test_c55_a_batch_may_be_empty(transport: Transport) -> None:
    """One rank's empty batch made everything NaN."""
    for tail in ((), (4, 2)):
        transport.pool(2).run(compare, Case(rows=(0, 2), tail=tail, steps=2))
    transport.pool(3).run(compare, Case(rows=(3, 0, 1), dtype=torch.float32, tail=(4,)))
    transport.pool(2).run(all_empty)


def test_c56_a_transposed_input_is_fine(transport: Transport) -> None:
    """Gradients were wrong where the input was a transposed view."""
    transport.pool(2).run(compare, Case((3, 2), tail=(5,), arrange=transposed))


def penalize(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """A loss on outputs, and the square of its gradient by the input."""
    x.requires_grad_()
    loss = torch.sin(module(x)).sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss, gradient.square().sum()


class TwiceNormalised(nn.Module):
    """One layer used twice: its second input depends on its own weight."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.norm = kind(CHANNELS).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.sin(self.norm(x)))  # type: ignore[no-any-return]


def double_backward(rank: int, world_size: int, rows: list[int]) -> None:
    reference = TwiceNormalised(nn.BatchNorm1d)
    with torch.no_grad():
        reference.norm.get_parameter("weight").copy_(torch.tensor([0.5, -1.5, 2.0]))
    module = pydist.convert_sync_batchnorm(copy.deepcopy(reference))
    batches = [draw(r, 0, rows[r], CHANNELS, dtype=torch.float64) for r in range(world_size)]
    whole, x = torch.cat(batches), batches[rank]
    for part in (0, 1):
        penalize(reference, whole)[part].backward()
        penalize(module, x)[part].backward()
    begin = sum(rows[:rank])
    assert whole.grad is not None
    problem = difference(x.grad, whole.grad[begin : begin + rows[rank]], 1000)
    assert problem is None, problem
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        problem = difference(parameter.grad, reference.get_parameter(name).grad, 1000)
        assert problem is None, f"{name}: {problem}"


def test_c56_gradients_of_gradients_are_right(transport: Transport) -> None:
    """A gradient penalty through synchronised layers could not be had."""
    transport.pool(2).run(double_backward, [3, 6])
    transport.pool(2).run(double_backward, [0, 5])


class Branches(nn.Module):
    """Two normalisations, and between them a branch that the first rank alone takes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into = nn.Linear(4, width, bias=False)  # a bias would have no effect
        self.first = nn.SyncBatchNorm(width)
        self.branch = nn.Linear(width, width)
        self.second = nn.SyncBatchNorm(width)
        self.out = nn.Linear(width, 2)

    def forward(self, x: Tensor, taken: bool) -> Tensor:
        x = self.first(self.into(x))
        if taken:
            x = x + torch.tanh(self.branch(x))
        return self.out(self.second(x))  # type: ignore[no-any-return]


def whole_batch(module: Branches, xs: list[Tensor]) -> Tensor:
    """What ranks compute together, in one process: the first part of the batch takes the branch."""
    hidden = torch.nn.functional.batch_norm(
        module.into(torch.cat(xs)), None, None, module.first.weight, module.first.bias, True
    )
    first, rest = hidden.split([len(xs[0]), len(hidden) - len(xs[0])])
    hidden = torch.cat([first + torch.tanh(module.branch(first)), rest])
    hidden = torch.nn.functional.batch_norm(
        hidden, None, None, module.second.weight, module.second.bias, True
    )
    return module.out(hidden)  # type: ignore[no-any-return]


def train_branches(rank: int, world_size: int, width: int) -> None:
    reference = Branches(width)
    module = copy.deepcopy(reference)
    model = DataParallel(module, bucket_cap_mb=1e-6, find_unused_parameters=True)
    assert type(module.first) is pydist.SyncBatchNorm
    for step in range(3):
        xs = [draw(r, step, 5, 4) for r in range(world_size)]
        reference.zero_grad()
        whole_batch(reference, xs).square().mean().backward()
        model.zero_grad()
        model(xs[rank], rank == 0).square().mean().backward()
        for name, parameter in module.named_parameters():
            problem = difference(parameter.grad, reference.get_parameter(name).grad, 50)
            assert problem is None, f"{name} in step {step}: {problem}"


@pytest.mark.parametrize("width", [8, 192], ids=["tiny", "large"])
def test_data_parallel_takes_torchs_layers(transport: Transport, width: int) -> None:
    """torch refuses its SyncBatchNorm on the CPU. The unused branch makes ranks launch reductions
    at different points of the backward, between which the layers communicate: on a process group,
    which pairs calls by their order, these were paired with those."""
    transport.pool(2).run(train_branches, width)


def train_half(rank: int, world_size: int, dtype: torch.dtype) -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    reference = copy.deepcopy(module)
    model = DataParallel(pydist.convert_sync_batchnorm(module.to(dtype)))
    output = model(draw(rank, 0, 8, 4, dtype=dtype))
    assert output.dtype == dtype
    output.square().mean().backward()
    reference(torch.cat([draw(r, 0, 8, 4) for r in range(world_size)])).square().mean().backward()
    for name in ("1.weight", "2.weight", "2.bias"):
        found, expected = module.get_parameter(name).grad, reference.get_parameter(name).grad
        assert found is not None
        assert expected is not None
        assert found.dtype == dtype
        assert torch.allclose(found.float(), expected, atol=0.03 * float(expected.abs().max()))
    variance = module.get_buffer("1.running_var").float()
    assert torch.allclose(variance, reference.get_buffer("1.running_var"), rtol=0.01)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_half_module_is_trained(pool2: RankPool, dtype: torch.dtype) -> None:
    """Parameters and running statistics may be half types too."""
    pool2.run(train_half, dtype)


def two_groups(rank: int, world_size: int) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    layer = pydist.convert_sync_batchnorm(nn.BatchNorm1d(CHANNELS), groups[rank // 2])
    partners = [rank // 2 * 2, rank // 2 * 2 + 1]
    whole = nn.BatchNorm1d(CHANNELS)(torch.cat([draw(r, 0, 3, CHANNELS) for r in partners]))
    begin = 3 * (rank % 2)
    found = layer(draw(rank, 0, 3, CHANNELS))
    assert difference(found, whole[begin : begin + 3], 20) is None


def test_a_group_of_ranks_normalises_by_itself(transport: Transport) -> None:
    transport.pool(4).run(two_groups)


def compiled(rank: int, world_size: int) -> None:
    torch._dynamo.reset()
    layer = pydist.convert_sync_batchnorm(nn.BatchNorm1d(CHANNELS))
    other = copy.deepcopy(layer)
    x = draw(rank, 0, 3, CHANNELS)
    assert torch.equal(torch.compile(layer, backend="eager")(x), other(x))


def test_torch_compile_leaves_the_layer_alone(pool2: RankPool) -> None:
    pool2.run(compiled)


def test_alone_a_layer_is_a_batch_norm(pool1: RankPool) -> None:
    """A group of one rank, and a process without any group, compute as BatchNorm does."""
    pool1.run(compare, Case(rows=(4,), steps=2))
    x = draw(0, 0, 4, CHANNELS)
    assert torch.equal(pydist.SyncBatchNorm(CHANNELS)(x), nn.BatchNorm1d(CHANNELS)(x))


def refused(rank: int, world_size: int) -> None:
    layer = pydist.SyncBatchNorm(CHANNELS)
    assert "at least 2D" in str(expect_error(ValueError, lambda: layer(torch.ones(3))))
    assert "non-zero" in str(expect_error(ValueError, lambda: layer(torch.ones(2, 0))))


def test_inputs_without_channels_are_refused(pool2: RankPool) -> None:
    pool2.run(refused)


def test_conversion_keeps_everything_else() -> None:
    """Keys, the tensors themselves, the training flag, quantisation settings, other layers."""
    shared = nn.BatchNorm2d(5, eps=0.1, momentum=None)
    module = nn.ModuleDict(
        {
            "conv": nn.Conv2d(1, 5, 1),
            "first": shared,
            "nested": nn.Sequential(nn.Identity(), shared, nn.BatchNorm1d(2, affine=False)),
            "frozen": nn.BatchNorm3d(3, track_running_stats=False).eval(),
            "again": shared,
        }
    )
    shared.qconfig = "settings"  # type: ignore[assignment]
    before, modules = module.state_dict(), list(module.children())
    converted = pydist.convert_sync_batchnorm(module)
    assert converted is module
    after = module.state_dict()
    assert list(after) == list(before)
    assert all(after[key].data_ptr() == before[key].data_ptr() for key in before)
    assert module["conv"] is modules[0]
    first = module["first"]
    assert module["again"] is first
    assert module["nested"][1] is first  # type: ignore[index]
    assert first.weight is shared.weight
    assert (first.eps, first.momentum, first.qconfig) == (0.1, None, "settings")
    assert not module["nested"][2].affine  # type: ignore[index]
    assert not module["frozen"].training
    assert not module["frozen"].track_running_stats
    layers = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    assert [type(layer) for layer in layers] == [pydist.SyncBatchNorm] * 3


def test_a_layer_itself_is_replaced() -> None:
    layer = nn.BatchNorm1d(2)
    for converted in (
        pydist.convert_sync_batchnorm(layer),
        pydist.SyncBatchNorm.convert_sync_batchnorm(layer),
        pydist.convert_sync_batchnorm(nn.SyncBatchNorm(2)),
    ):
        assert type(converted) is pydist.SyncBatchNorm


def test_a_lazy_layer_cannot_be_converted_yet() -> None:
    lazy = nn.Sequential(nn.LazyBatchNorm1d())
    error = expect_error(UsageError, lambda: pydist.convert_sync_batchnorm(lazy))
    assert "run a forward" in str(error)
