"""Owns the tests of what DataParallel does on a device only, in the emulation: streams, algorithms,
what waits on the host and what does not, and records that ranks read a step later.
"""

import ctypes
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pydist
from emulated import Graph, call, call_for, emulated_pool, make_torch_stream
from models import TwoHeads, mlp, wavy_loss
from pydist import DataParallel
from ranks import get_pool
from reference import (
    OneProcess,
    assert_reduced,
    assert_same_on_all_ranks,
    draw,
    expect_error,
    gradients,
)

SMALL_BUCKETS = 0.01  # MiB: some gradients share a bucket, others are reduced in place
WIDTH = 64


def output_loss(module: nn.Module, rank: int, step: int) -> Tensor:
    return wavy_loss(module(draw(rank, step, 4, WIDTH)))


def step_of_both(model: nn.Module, expected: OneProcess, rank: int, step: int) -> None:
    model.zero_grad()
    expected.zero_grad()
    output_loss(model, rank, step).backward()
    expected.backward(output_loss, step)
    assert_reduced(model, expected)


def steady_step(rank: int, size: int, options: dict[str, Any]) -> dict[str, int]:
    """What one step does once everything is made."""
    torch.manual_seed(1)
    model = DataParallel(make_mlp(), algorithm="nccl", **options)
    output_loss(model, rank, 0).backward()
    set_up_s = model._reducer.counters()["wait_s"]  # in the first round ranks meet in the Store
    for step in range(1, 3):
        model.zero_grad()
        output_loss(model, rank, step).backward()
    model.zero_grad()
    before, calls = num_launches(), communicator_calls(model)
    output_loss(model, rank, 3).backward()
    units = model._reducer.units()
    return {
        "launches": num_launches() - before,
        "calls": communicator_calls(model) - calls,
        "buckets": sum(not alone for alone, _, _ in units),
        "alone": sum(alone for alone, _, _ in units),
        "waited": model._reducer.counters()["wait_s"] != set_up_s,
    }


def num_launches() -> int:
    return int(call_for(ctypes.c_uint64, "num_launches"))


def communicator_calls(model: Any) -> int:
    return int(model._communicator.counters()["num_calls"])


def test_a_step_launches_two_kernels_a_bucket_and_waits_for_nothing() -> None:
    for counted in emulated_pool(2).run(steady_step, {"bucket_cap_mb": SMALL_BUCKETS}):
        assert counted["buckets"] == 1
        assert counted["alone"] == 3
        assert counted["launches"] == 2 * counted["buckets"]
        assert counted["calls"] == counted["buckets"] + counted["alone"] + 1  # the records
        assert not counted["waited"]


class OddShapes(nn.Module):
    """Parameters of no and of one element, transposed, of odd length, complex and half."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.zeros(0, WIDTH))
        self.transposed = nn.Parameter(torch.randn(WIDTH + 1, WIDTH).t())
        self.odd = nn.Parameter(torch.randn(WIDTH + 1))
        self.one = nn.Parameter(torch.randn(1))
        self.turn = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.narrow = nn.Parameter(torch.randn(5, dtype=torch.bfloat16))
        self.wide = nn.Parameter(torch.randn(7, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        more = self.turn.abs().sum() + self.narrow.float().sin().sum() + self.wide.float().sum()
        return self.scale * (x @ self.transposed) + self.odd * self.one + self.empty.sum() + more


class ChannelsLast(nn.Module):
    """The parameter's strides are those of a convolution's weight in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(4, 4, 2, 2).to(memory_format=torch.channels_last)
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.sin().reshape(WIDTH, 1)


def train(rank: int, size: int, make: Any, steps: int, options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    module = make()
    expected = OneProcess(module, size)
    model = DataParallel(module, **options)
    for step in range(steps):
        step_of_both(model, expected, rank, step)


def make_mlp() -> nn.Module:
    return mlp(WIDTH, 3)


def make_channels_last() -> nn.Module:
    return ChannelsLast()


@pytest.mark.parametrize("algorithm", ["auto", "nccl", "ring", "slices"])
@pytest.mark.parametrize("size", [2, 3])
def test_every_algorithm_gives_the_mean(size: int, algorithm: str) -> None:
    options = {"algorithm": algorithm, "bucket_cap_mb": SMALL_BUCKETS}
    emulated_pool(size).run(train, make_mlp, 3, options)


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("make", [OddShapes, make_channels_last])
def test_shapes_and_dtypes(make: Any, views: bool) -> None:
    emulated_pool(2).run(train, make, 3, {"gradient_as_bucket_view": views})


@pytest.mark.parametrize("seed", range(4))
def test_the_order_in_which_streams_run_does_not_matter(seed: int) -> None:
    emulated_pool(2).run(train, make_mlp, 4, {"bucket_cap_mb": SMALL_BUCKETS}, seed=seed)


def reduce_in_place(rank: int, size: int) -> dict[str, int]:
    train_options = {"bucket_cap_mb": SMALL_BUCKETS, "algorithm": "nccl"}
    model = DataParallel(make_mlp(), **train_options)
    for step in range(2):
        model.zero_grad()
        output_loss(model, rank, step).backward()
    return model._reducer.counters()


def test_large_gradients_are_reduced_where_they_lie() -> None:
    for counted in emulated_pool(2).run(reduce_in_place):
        weights = 2 * 3 * WIDTH * WIDTH * 4  # of two steps
        assert counted["born_nbytes"] == weights
        assert set(counted["packed_nbytes"]) == {"small"}


def several_streams(rank: int, size: int, views: bool) -> None:
    """Every layer's backward runs on another stream, as autograd does where forward did."""
    torch.manual_seed(1)
    module = mlp(WIDTH, 4)
    expected = OneProcess(module, size)
    model = DataParallel(
        module, bucket_cap_mb=SMALL_BUCKETS, gradient_as_bucket_view=views, algorithm="nccl"
    )
    streams = [make_torch_stream() for _ in range(3)]
    for step in range(4):
        model.zero_grad()
        expected.zero_grad()
        x = draw(rank, step, 4, WIDTH).requires_grad_()
        x.register_hook(lambda _: _end(streams))
        loss = wavy_loss(model(x * 1))
        hooks = [
            parameter.register_hook(_switch(streams[(index + step) % 3]))
            for index, parameter in enumerate(module.parameters())
        ]
        loss.backward()
        for hook in hooks:
            hook.remove()
        expected.backward(output_loss, step)
        assert_reduced(model, expected)


def _switch(stream: int) -> Any:
    def hook(_: Tensor) -> None:
        call("set_current_stream", stream)

    return hook


def _end(streams: list[int]) -> None:
    """As autograd does before its callbacks: the caller's stream waits for those of leaves."""
    call("set_current_stream", 0)
    event = call_for(ctypes.c_void_p, "make_event")
    for stream in streams:
        call("record", event, stream)
        call("wait", 0, event)


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_gradients_of_several_streams(views: bool, seed: int) -> None:
    emulated_pool(2).run(several_streams, views, seed=seed)


TOLERANCES = {"bfloat16": 2e-2, "float16": 2e-3, "float8_e4m3fn": 0.15}


def train_on_wire(rank: int, size: int, wire: str, views: bool) -> None:
    torch.manual_seed(1)
    module = make_mlp()
    expected = OneProcess(module, size)
    model = DataParallel(
        module,
        wire_dtype=getattr(torch, wire),
        gradient_as_bucket_view=views,
        bucket_cap_mb=SMALL_BUCKETS,
    )
    for step in range(2):
        model.zero_grad()
        expected.zero_grad()
        output_loss(model, rank, step).backward()
        expected.backward(output_loss, step)
        assert_same_on_all_ranks(gradients(model))
        pairs = zip(module.parameters(), expected.module.parameters(), strict=True)
        for found, exact in pairs:
            assert found.grad is not None
            assert exact.grad is not None
            error = (found.grad - exact.grad).abs().max()
            assert error <= TOLERANCES[wire] * exact.grad.abs().max()
            assert error > 0 or exact.grad.numel() < 8  # it did travel in the narrow type


@pytest.mark.parametrize(
    ("wire", "views"),
    [
        ("bfloat16", False),
        ("float16", False),
        ("float8_e4m3fn", False),
        ("float8_e4m3fn", True),
    ],
)
def test_wire_types(wire: str, views: bool) -> None:
    emulated_pool(3).run(train_on_wire, wire, views)


def interleave(rank: int, size: int) -> None:
    """Two models, whose backwards come in another order in every step."""
    torch.manual_seed(1)
    modules = [make_mlp(), make_mlp()]
    expected = [OneProcess(module, size) for module in modules]
    models = [DataParallel(module, bucket_cap_mb=SMALL_BUCKETS) for module in modules]
    for step in range(3):
        losses = []
        for model, plain in zip(models, expected, strict=True):
            model.zero_grad()
            plain.zero_grad()
            losses.append(output_loss(model, rank, step))
            plain.backward(output_loss, step)
        for index in (0, 1) if step % 2 else (1, 0):
            losses[index].backward()
        for model, plain in zip(models, expected, strict=True):
            assert_reduced(model, plain)


def test_models_whose_backwards_change_their_order() -> None:
    emulated_pool(2).run(interleave)


def freeze_and_thaw(rank: int, size: int) -> list[int]:
    torch.manual_seed(1)
    module = mlp(WIDTH, 3)
    expected = OneProcess(module, size)
    model = DataParallel(module, bucket_cap_mb=SMALL_BUCKETS)
    moved = []
    for step, frozen in enumerate([False, False, True, True, False]):
        for each in (module, *expected.replicas):
            for parameter in list(each.parameters())[:4]:
                parameter.requires_grad_(not frozen)
        before = model._reducer.counters()["moved_nbytes"]
        step_of_both(model, expected, rank, step)
        moved.append(model._reducer.counters()["moved_nbytes"] - before)
    return moved


def test_what_is_frozen_does_not_travel() -> None:
    for moved in emulated_pool(2).run(freeze_and_thaw):
        layer = (WIDTH * WIDTH + WIDTH) * 4
        assert moved[0] == moved[1] == moved[4] == 3 * layer
        # Biases share a bucket, of which one third is trainable still.
        assert moved[2] == moved[3] == layer + 2 * WIDTH * 4


def freeze_on_one_rank(rank: int, size: int, whole_unit: bool) -> str:
    model = DataParallel(make_mlp(), bucket_cap_mb=SMALL_BUCKETS)
    output_loss(model, rank, 0).backward()
    if rank == 1:
        parameters = list(model.parameters())
        parameters[0 if whole_unit else 1].requires_grad_(False)

    def go_on() -> None:
        for step in range(1, 40):
            output_loss(model, rank, step).backward()

    kinds = (pydist.MismatchError, pydist.PeerError, pydist.TimeoutError)
    return str(expect_error(kinds, go_on))


def test_a_parameter_that_is_frozen_on_one_rank_only() -> None:
    for text in emulated_pool(2).run(freeze_on_one_rank, False):
        assert "0.bias" in text
        assert "requires_grad=" in text
        assert "rank 0" in text
        assert "rank 1" in text


def test_a_unit_that_is_frozen_on_one_rank_only() -> None:
    """Nothing is reduced then: units would be mixed up."""
    for text in emulated_pool(2, PYDIST_TIMEOUT_S="10").run(freeze_on_one_rank, True):
        assert "rank 1" in text
        assert "waited 10 s for rank 0" in text
        assert "which parameters are trainable" in text


def use_one_head(rank: int, size: int, everywhere: bool) -> None:
    torch.manual_seed(1)
    module = TwoHeads()
    model = DataParallel(module, find_unused_parameters=True)
    for step in range(3):
        model.zero_grad()
        head = 0 if everywhere else (rank + step) % 2
        model(draw(rank, step, 4, 10))[head].sum().backward()
        assert (module.head_b.weight.grad is None) == everywhere
        assert_same_on_all_ranks(gradients(model))


@pytest.mark.parametrize("everywhere", [False, True])
def test_parameters_that_some_or_all_ranks_do_not_use(everywhere: bool) -> None:
    emulated_pool(2).run(use_one_head, everywhere)


def record_late(rank: int, size: int) -> tuple[list[int], float]:
    """Which ranks did not use a parameter is known in later steps, where this one used all."""
    module = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = module

        def forward(self, x: Tensor, both: bool) -> Tensor:
            first = self.layers[0](x)
            return self.layers[1](first) if both else first  # type: ignore[no-any-return]

    model = DataParallel(Either(), find_unused_parameters=True)
    set_up_s = model._reducer.counters()["wait_s"]
    for step in range(3):
        model.zero_grad()
        model(draw(rank, step, 2, 4), rank == 0).sum().backward()
        assert_same_on_all_ranks(gradients(model))
    unused: list[int] = []
    for _ in range(200):
        model(draw(rank, 3, 2, 4), True)
        unused = [r for _, ranks in model._reducer.unused_by_rank() for r in ranks]
        if unused:
            break
    return unused, model._reducer.counters()["wait_s"] - set_up_s


def test_a_rank_that_uses_everything_does_not_wait_for_the_others() -> None:
    (unused0, waited0), (unused1, waited1) = emulated_pool(2).run(record_late)
    assert unused0 == unused1 == [1, 1]
    assert waited1 > 0
    assert waited0 == 0


def raise_in_backward(rank: int, size: int) -> str:
    model = DataParallel(make_mlp(), bucket_cap_mb=SMALL_BUCKETS)
    output_loss(model, rank, 0).backward()
    if rank == 0:

        def accident(_: Tensor) -> None:
            raise ArithmeticError("a loss scale of minus one")

        model.module[0].bias.register_hook(accident)

    def go_on() -> None:
        for step in range(1, 40):
            output_loss(model, rank, step).backward()

    return str(expect_error((ArithmeticError, pydist.PeerError), go_on))


def test_a_rank_that_raises_in_backward() -> None:
    texts = emulated_pool(2).run(raise_in_backward)
    assert "minus one" in texts[0]
    assert "rank 0" in texts[1]
    assert "raised in backward" in texts[1]


def capture(rank: int, size: int, options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    module = make_mlp()
    model = DataParallel(module, bucket_cap_mb=SMALL_BUCKETS, **options)
    for step in range(2):
        model.zero_grad(set_to_none=False)
        output_loss(model, rank, step).backward()
    graph = Graph()
    model.zero_grad(set_to_none=False)
    with graph.capture():
        output_loss(model, rank, 2).backward()
    # The emulation captures our work, not torch's: a launch reduces what `.grad` are by now.
    for step in range(3):
        with torch.no_grad():
            for index, parameter in enumerate(module.parameters()):
                assert parameter.grad is not None
                parameter.grad.fill_(rank + index + step)
        graph.replay()
        for index, parameter in enumerate(module.parameters()):
            assert parameter.grad is not None
            assert (parameter.grad == (size - 1) / 2 + index + step).all()
    step_of_both(model, OneProcess(module, size), rank, 3)


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}])
def test_a_captured_step_is_replayed(options: dict[str, Any]) -> None:
    emulated_pool(2).run(capture, options)


def capture_with_unused(rank: int, size: int) -> str:
    model = DataParallel(TwoHeads(), find_unused_parameters=True)

    def step(index: int) -> None:
        model.zero_grad()
        model(draw(rank, index, 4, 10))[0].sum().backward()

    step(0)
    text = ""
    with Graph().capture():
        text = str(expect_error(pydist.UsageError, lambda: step(1)))
    return text


def test_what_needs_the_host_is_refused_under_capture() -> None:
    pool = emulated_pool(2)
    for text in pool.run(capture_with_unused):
        assert "head_b.weight was not used" in text
        assert "cannot be captured in a CUDA graph" in text
    pool.discard()


def buffers_of_the_first_rank(rank: int, size: int) -> None:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    module.register_buffer("count", torch.zeros((), dtype=torch.int64))
    model = DataParallel(module)
    for step in range(3):
        module.count.fill_(rank + 7)
        model(draw(rank, step, 8, 4)).sum().backward()
        assert int(module.count) == 7
    with torch.no_grad():
        model.eval()
        model(draw(rank, 3, 8, 4))
    assert_same_on_all_ranks(module.buffers())


def test_buffers_follow_the_first_rank() -> None:
    emulated_pool(2).run(buffers_of_the_first_rank)


def train_without_a_cpu_backend(rank: int, size: int) -> str:
    """As with backend="nccl", which takes no tensors of the CPU."""
    group = dist.new_group(backend="cuda:gloo")
    torch.manual_seed(1)
    model = DataParallel(make_mlp(), process_group=group)
    for step in range(2):
        model.zero_grad()
        output_loss(model, rank, step).backward()
        assert_same_on_all_ranks(gradients(model))
    pydist.check_replicas(model, buffers=True)
    return str(model._engine.transport)


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_a_group_that_takes_no_tensors_of_the_cpu(transport: str) -> None:
    pool = emulated_pool(2, PYDIST_TRANSPORT=transport)
    assert pool.run(train_without_a_cpu_backend) == [transport] * 2


def sparse_is_refused(rank: int, size: int) -> str:
    layer = nn.Embedding(4, 4, sparse=True)
    return str(expect_error(NotImplementedError, lambda: DataParallel(layer)))


def test_sparse_gradients_are_refused() -> None:
    for text in emulated_pool(2).run(sparse_is_refused):
        assert "parameter weight" in text
        assert "sparse=False" in text


def ask_on_the_cpu(rank: int, size: int, options: dict[str, Any]) -> str:
    return str(expect_error(pydist.UsageError, lambda: DataParallel(make_mlp(), **options)))


@pytest.mark.parametrize(
    "options", [{"wire_dtype": torch.float8_e4m3fn}, {"algorithm": "ring"}, {"algorithm": "tree"}]
)
def test_what_only_devices_have_is_refused_on_the_cpu(options: dict[str, Any]) -> None:
    for text in get_pool(1).run(ask_on_the_cpu, options):
        assert next(iter(options)) in text
