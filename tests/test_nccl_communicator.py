"""The NCCL communicator's calls, memory and order, on the emulated device."""

import contextlib
import os
import random
from typing import Any

import pytest
import torch

import emulated
import pydist
from emulated import emulated_pool
from nccl_groups import MAX, MEAN, MIN, PRODUCT, SUM, in_order, make, run, values
from ranks import fresh_ranks

REDUCIBLE = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]
ANY = [*REDUCIBLE, torch.int16, torch.float8_e4m3fn]
COUNT = 101


def stacked(dtype: torch.dtype, size: int, count: int = COUNT) -> torch.Tensor:
    return torch.stack([values(dtype, rank, count) for rank in range(size)])


def reduced(op: int, inputs: torch.Tensor) -> torch.Tensor:
    wide = inputs.to(torch.complex128 if inputs.is_complex() else torch.float64)
    results = {
        SUM: lambda: wide.sum(0),
        MEAN: lambda: wide.mean(0),
        PRODUCT: lambda: wide.prod(0),
        MIN: lambda: wide.amin(0),
        MAX: lambda: wide.amax(0),
    }
    return results[op]().to(inputs.dtype)


def ops_of(dtype: torch.dtype) -> list[int]:
    if dtype.is_complex:
        return [SUM, MEAN]
    return [SUM, MIN, MAX, PRODUCT] + ([MEAN] if dtype.is_floating_point else [])


def check_reductions(rank: int, size: int, name: str) -> None:
    comm = make(name, rank, size)
    for dtype in REDUCIBLE:
        for op in ops_of(dtype):
            tensor = values(dtype, rank, COUNT)
            with in_order(comm):
                comm.all_reduce(tensor, op, "a test")
            expected = reduced(op, stacked(dtype, size))
            torch.testing.assert_close(tensor, expected)
            inputs = values(dtype, rank, COUNT * size)
            output = torch.zeros(COUNT, dtype=dtype)
            with in_order(comm):
                comm.reduce_scatter(output, inputs, op, "a test")
            total = reduced(op, stacked(dtype, size, COUNT * size))
            torch.testing.assert_close(output, total[rank * COUNT : (rank + 1) * COUNT])
    assert comm.counters()["num_calls"] == 2 * sum(len(ops_of(dtype)) for dtype in REDUCIBLE)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_reductions_are_torchs(size: int) -> None:
    run(emulated_pool(size), check_reductions)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def check_moves(rank: int, size: int, name: str) -> None:
    comm = make(name, rank, size)
    for dtype in ANY:
        mine = values(dtype, rank, COUNT)
        gathered = torch.zeros(COUNT * size, dtype=dtype)
        with in_order(comm):
            comm.all_gather(gathered, mine, "a test")
        expected = torch.cat([values(dtype, r, COUNT) for r in range(size)])
        assert torch.equal(bits(gathered), bits(expected))
        sent = values(dtype, rank, COUNT * size)
        received = torch.zeros_like(sent)
        with in_order(comm):
            comm.all_to_all(received, sent, "a test")
        parts = [values(dtype, r, COUNT * size)[rank * COUNT :][:COUNT] for r in range(size)]
        assert torch.equal(bits(received), bits(torch.cat(parts)))
        root = size - 1
        many = [mine.clone(), mine[:0].clone(), mine[:100].clone().view(10, 10).t()]
        with in_order(comm):
            comm.broadcast(many, root, "a test")
        theirs = values(dtype, root, COUNT)
        assert torch.equal(bits(many[0]), bits(theirs))
        assert torch.equal(bits(many[2]), bits(theirs[:100].view(10, 10).t()))
        right, left = (rank + 1) % size, (rank - 1) % size
        first, second = torch.zeros_like(mine), torch.zeros_like(mine)
        with in_order(comm):
            comm.exchange(
                [(mine, right), (gathered[:COUNT], right)],
                [(first, left), (second, left)],
                "a test",
            )
        assert torch.equal(bits(first), bits(values(dtype, left, COUNT)))
        assert torch.equal(bits(second), bits(gathered[:COUNT]))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_moves_keep_every_bit(size: int) -> None:
    run(emulated_pool(size), check_moves)


def check_means(rank: int, size: int, name: str) -> None:
    comm = make(name, rank, size)
    large = torch.full((4,), 40000.0, dtype=torch.float16)
    with in_order(comm):
        comm.all_reduce(large, MEAN, "a test")
    assert large.tolist() == [40000.0] * 4  # the sum is no float16
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for divisor in (1, 4, 8):
            tensor = values(dtype, rank, COUNT)
            with in_order(comm):
                comm.all_reduce(tensor, MEAN, "a test", divisor)
            expected = stacked(dtype, size).sum(0, dtype=torch.float64) / divisor
            assert torch.equal(tensor, expected.to(dtype))


def test_a_mean_has_any_divisor_and_does_not_overflow() -> None:
    run(emulated_pool(2), check_means)


def check_refusals(rank: int, size: int, name: str) -> None:
    comm = make(name, rank, size)
    good = torch.ones(8)
    refused = [
        ("int16", lambda: comm.all_reduce(good.short(), SUM, "x")),
        ("the mean of integers", lambda: comm.all_reduce(good.int(), MEAN, "x")),
        ("the product of complex", lambda: comm.all_reduce(good.cfloat(), PRODUCT, "x")),
        ("Float8", lambda: comm.all_reduce(good.to(torch.float8_e4m3fn), SUM, "x")),
        ("contiguous", lambda: comm.all_reduce(good[::2], SUM, "x")),
        ("no reduce operation 8", lambda: comm.all_reduce(good, 8, "x")),
        ("no rank 2 in a group of 2", lambda: comm.broadcast([good], size, "x")),
        ("without gaps", lambda: comm.broadcast([good[::2]], 0, "x")),
        ("2 times as many", lambda: comm.all_gather(good, good, "x")),
        ("a multiple of 2", lambda: comm.all_to_all(good[:3].clone(), good[:3].clone(), "x")),
    ]
    for text, call in refused:
        with pytest.raises(pydist.UsageError, match=text):
            call()
    with in_order(comm):
        comm.all_reduce(good, SUM, "x")  # nothing has happened
    assert good.tolist() == [2.0] * 8


def test_what_cannot_work_is_refused_before_anything_happens() -> None:
    run(emulated_pool(2), check_refusals)


def check_progress(rank: int, size: int, name: str) -> None:
    emulated.set_option("in_progress_polls", 5)
    comm = make(name, rank, size)
    tensor = torch.ones(16)
    for _ in range(3):
        with in_order(comm):
            comm.all_reduce(tensor, SUM, "x")
    memory = comm.allocate(1000)
    with in_order(comm):
        comm.all_reduce(memory, MAX, "x")
    assert tensor.tolist() == [8.0] * 16


def test_calls_in_progress_are_waited_for() -> None:
    run(emulated_pool(2), check_progress)


def check_memory(rank: int, size: int, name: str, registers: bool) -> None:
    comm = make(name, rank, size)
    assert comm.is_registering is registers
    memory = comm.allocate(1000).view(torch.float32)
    assert memory.tolist() == [0.0] * 250
    assert memory.data_ptr() % 512 == 0
    memory.fill_(rank + 1)
    comm.after_current_stream()
    with emulated.held():  # what is enqueued still needs it when it is let go
        for _ in range(3):
            comm.all_reduce(memory, SUM, "x")
        result = torch.empty(250 * size)
        comm.all_gather(result, memory, "x")
        del memory
        other = comm.allocate(1000)
    comm.before_current_stream()
    assert result.tolist() == [size * (size + 1) / 2 * size**2] * 250 * size
    comm.wait(comm.mark())
    del comm  # memory keeps it
    assert other.tolist() == [0] * 1000


@pytest.mark.parametrize(("nccl", "registers"), [("2.28", True), ("2.19", False), ("2.18", False)])
def test_memory_lives_as_long_as_the_device_needs_it(nccl: str, registers: bool) -> None:
    run(emulated_pool(2, nccl=nccl), check_memory, registers)


def check_marks(rank: int, size: int, name: str) -> None:
    comm = make(name, rank, size)
    tensor = torch.ones(16)
    comm.after_current_stream()
    with emulated.held():
        nothing = comm.mark()
        comm.all_reduce(tensor, SUM, "x")
        mark = comm.mark()
        assert not comm.is_done(mark)
        marks = [comm.mark() for _ in range(200)]  # more than there are events at the start
        assert marks == sorted(marks)
        assert marks[0] > mark > nothing
    comm.wait(marks[-1])
    assert comm.is_done(nothing)
    assert comm.is_done(mark)
    assert tensor.tolist() == [float(size)] * 16


def test_marks_are_done_in_order() -> None:
    run(emulated_pool(2), check_marks)


def check_order_of_ends(rank: int, size: int, name: str) -> None:
    comms = [make(f"{name}/{index}", rank, size) for index in range(3)]
    tensors = [torch.full((16,), float(index + 1)) for index in range(3)]
    for _ in range(4):
        for comm in comms:
            comm.after_current_stream()
        for comm, tensor in zip(comms, tensors, strict=True):
            comm.all_reduce(tensor, MEAN, "x")
    kept = comms[0].allocate(64)
    for comm in comms:
        comm.before_current_stream()
    for comm in comms if rank == 0 else reversed(comms):
        comm.wait(comm.mark())
    order = [0, 1, 2] if rank == 0 else [2, 0, 1]
    for index in order:
        comms[index] = None
    assert kept.tolist() == [0] * 64
    assert [tensor[0].item() for tensor in tensors] == [1.0, 2.0, 3.0]


def test_several_communicators_end_in_any_order() -> None:
    for seed in range(3):
        run(emulated_pool(3), check_order_of_ends, seed=seed)


def check_graph(rank: int, size: int, name: str) -> None:
    comm = make(name, rank, size)
    tensor, other = torch.ones(16), torch.ones(16)
    with in_order(comm):
        comm.all_reduce(tensor, SUM, "a call that warms up")
    before = comm.mark()
    graph = emulated.Graph()
    with graph.capture():
        comm.after_current_stream()
        comm.all_reduce(tensor, SUM, "captured")
        assert comm.mark() == before
        comm.all_reduce(tensor, MEAN, "captured", 2 * size)
        with pytest.raises(pydist.UsageError, match="while a graph is captured"):
            comm.allocate(100)
        comm.before_current_stream()
    assert tensor.tolist() == [float(size)] * 16  # nothing has run
    for _ in range(3):
        graph.replay()
        with in_order(comm):
            comm.all_reduce(other, SUM, "between")
    emulated.synchronize()
    assert tensor.tolist() == [size * (size / 2) ** 3] * 16
    assert other.tolist() == [float(size) ** 3] * 16


def test_calls_are_captured_in_a_graph() -> None:
    run(emulated_pool(2), check_graph)


def check_stress(rank: int, size: int, name: str, seed: int) -> None:
    comms = [make(f"{name}/{index}", rank, size) for index in range(2)]
    chosen = random.Random(seed)  # the same on all ranks
    tensors = [torch.full((chosen.randrange(1, 300),), float(rank)) for _ in range(4)]
    expected = [[float(r) for r in range(size)] for _ in tensors]
    for _ in range(60):
        comm, index = chosen.choice(comms), chosen.randrange(4)
        tensor, by_rank = tensors[index], expected[index]
        kind = chosen.randrange(4)
        if kind == 0:
            with in_order(comm):
                comm.all_reduce(tensor, MEAN, "x")
            expected[index] = [sum(by_rank) / size] * size
        elif kind == 1:
            root = chosen.randrange(size)
            with in_order(comm):
                comm.broadcast([tensor], root, "x")
            expected[index] = [by_rank[root]] * size
        elif kind == 2:
            tensor.add_(rank)
            expected[index] = [value + r for r, value in enumerate(by_rank)]
        else:
            moved = torch.empty_like(tensor)
            right, left = (rank + 1) % size, (rank - 1) % size
            with in_order(comm):
                comm.exchange([(tensor, right)], [(moved, left)], "x")
            tensors[index] = moved
            expected[index] = [by_rank[r - 1] for r in range(size)]
    for tensor, by_rank in zip(tensors, expected, strict=True):
        torch.testing.assert_close(tensor, torch.full_like(tensor, by_rank[rank]))


@pytest.mark.parametrize("seed", range(4))
def test_random_calls_in_random_order_of_streams(seed: int) -> None:
    run(emulated_pool(3), check_stress, seed, seed=seed)


def check_fork(rank: int, size: int, name: str) -> None:
    comm = make(name, rank, size)
    tensor = torch.ones(4)
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            try:
                comm.all_reduce(tensor, SUM, "x")
            except pydist.UsageError as error:
                code = 0 if "forked child" in str(error) else 2
            del comm
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with in_order(comm):
        comm.all_reduce(tensor, SUM, "x")
    assert tensor.tolist() == [float(size)] * 4


def test_a_forked_child_is_told() -> None:
    run(emulated_pool(2), check_fork)


kept: list[Any] = []


def leave_alive(rank: int, size: int, name: str) -> None:
    comm = make(name, rank, size)
    tensor = torch.ones(4)
    with in_order(comm):
        comm.all_reduce(tensor, SUM, "x")
    kept.extend([comm, comm.allocate(100)])


def fresh(size: int, function: Any, *args: Any, **options: Any) -> Any:
    env = {emulated.LIBRARY: emulated.library()}
    return fresh_ranks(size, emulated.run_on_device, function, args, 0, env=env, **options)


def test_a_process_ends_well_with_a_communicator() -> None:
    for outcome in fresh(2, leave_alive, "alive"):
        assert outcome.ok, outcome.traceback
        assert outcome.exit_code == 0, outcome.stderr


def ask_for_an_old_version(rank: int, size: int, name: str) -> str:
    emulated.set_option("nccl_version", 21703)
    with pytest.raises(pydist.UsageError) as raised:
        make(name, rank, size)
    return str(raised.value)


def test_an_older_nccl_is_refused_with_its_version_and_place() -> None:
    (outcome,) = fresh(1, ask_for_an_old_version, "old")
    assert outcome.ok, outcome.traceback
    assert "2.18 or newer is needed" in outcome.value
    assert "is 2.17.3" in outcome.value
    assert emulated.library() in outcome.value
