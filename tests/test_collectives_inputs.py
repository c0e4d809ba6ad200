"""Owns odd inputs of the collectives: lazy conjugates, strides, threads, wrong groups, dtypes."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import pydist
from conftest import Transport

Op = dist.ReduceOp

CONJUGATED, NEGATED, CONJUGATED_AND_NEGATED, PLAIN = range(4)


def lazy_view(values: Tensor, kind: int) -> Tensor:
    """A contiguous tensor that shows complex `values`, though its memory holds others."""
    if kind == CONJUGATED:
        return values.conj().resolve_conj().conj()
    if kind == NEGATED:
        return torch._neg_view(-values)
    if kind == CONJUGATED_AND_NEGATED:
        return torch._neg_view(-values.conj().resolve_conj()).conj()
    return values.clone()


def numbers(rank: int, size: int) -> Tensor:
    position = torch.arange(size, dtype=torch.float32)
    return torch.complex(position + rank + 1, position - 2 * rank + 3)


def use_lazy_views(rank: int, world_size: int, kind: int, async_op: bool) -> None:
    # One rank's tensors are always plain: ranks need not agree about it.
    mine = PLAIN if rank == world_size - 1 else kind
    size = 6
    inputs = [numbers(source, size) for source in range(world_size)]
    wholes = [numbers(source, size * world_size) for source in range(world_size)]
    total = torch.stack(wholes).sum(0)
    part = slice(rank * size, (rank + 1) * size)

    def output(num_elements: int = size) -> Tensor:
        return lazy_view(torch.zeros(num_elements, dtype=torch.complex64), mine)

    def check(work: Any, *pairs: tuple[Tensor, Tensor]) -> None:
        if async_op:
            work.wait()
        for found, expected in pairs:
            assert torch.equal(found, expected), f"found {found}, expected {expected}"

    source, whole = lazy_view(inputs[rank], mine), lazy_view(wholes[rank], mine)
    tensor = lazy_view(wholes[rank], mine)
    check(pydist.all_reduce(tensor, async_op=async_op), (tensor, total))
    for root in range(world_size):
        tensor = lazy_view(inputs[rank], mine)
        check(pydist.broadcast(tensor, root, async_op=async_op), (tensor, inputs[root]))
    tensor = output(size * world_size)
    work = pydist.all_gather_into_tensor(tensor, source, async_op=async_op)
    check(work, (tensor, torch.cat(inputs)))
    tensors = [output() for _ in range(world_size)]
    work = pydist.all_gather(tensors, source, async_op=async_op)
    check(work, *zip(tensors, inputs, strict=True))
    tensor = output()
    work = pydist.reduce_scatter_tensor(tensor, whole, async_op=async_op)
    check(work, (tensor, total[part]))
    tensor = output()
    work = pydist.reduce_scatter(tensor, list(whole.chunk(world_size)), async_op=async_op)
    check(work, (tensor, total[part]))
    tensor = output(size * world_size)
    work = pydist.all_to_all_single(tensor, whole, async_op=async_op)
    check(work, (tensor, torch.cat([values[part] for values in wholes])))
    tensors = [output() for _ in range(world_size)]
    work = pydist.all_to_all(tensors, list(whole.chunk(world_size)), async_op=async_op)
    check(work, *zip(tensors, [values[part] for values in wholes], strict=True))
    assert torch.equal(source, inputs[rank])
    assert torch.equal(whole, wholes[rank])


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("kind", [CONJUGATED, NEGATED, CONJUGATED_AND_NEGATED])
def test_lazy_conjugates_and_negatives(transport: Transport, kind: int, async_op: bool) -> None:
    transport.pool(2).run(use_lazy_views, kind, async_op)


def send_lazy_views(rank: int, world_size: int) -> None:
    for kind in (CONJUGATED, NEGATED, CONJUGATED_AND_NEGATED):
        for receiver_kind in (PLAIN, kind):
            tensor = lazy_view(numbers(rank, 5), kind if rank == 0 else receiver_kind)
            if rank == 0:
                pydist.send(tensor, 1)
            else:
                pydist.recv(tensor, 0)
            assert torch.equal(tensor, numbers(0, 5))


def test_messages_of_lazy_views(transport: Transport) -> None:
    transport.pool(2).run(send_lazy_views)


def reduce_real_negatives(rank: int, world_size: int) -> None:
    tensor = torch._neg_view(torch.tensor([1.0, -5.0]) * (rank + 1))
    pydist.all_reduce(tensor, Op.MAX)
    assert tensor.tolist() == [-1.0, 5.0 * world_size]


def test_max_of_negatives(transport: Transport) -> None:
    transport.pool(2).run(reduce_real_negatives)


def use_odd_strides(rank: int, world_size: int) -> None:
    """One element or none counts as contiguous, whatever the stride."""
    for size in (0, 1):
        base = torch.full((8 * size + size,), float(rank + 1))
        one = base[1::8][:size]
        assert one.stride() == (8,)
        pydist.broadcast(one, 1)
        assert one.tolist() == [2.0] * size
        gathered = torch.empty(world_size * size)
        pydist.all_gather_into_tensor(gathered, one.fill_(rank))
        assert gathered.tolist() == [0.0, 1.0][: 2 * size]
        for op, expected in ((Op.SUM, 1.0), (Op.MAX, 1.0)):
            pydist.all_reduce(one.fill_(rank), op)
            assert one.tolist() == [expected] * size
        scattered = torch.empty(3 * size)[::3]
        pydist.reduce_scatter_tensor(scattered, torch.arange(2.0)[: 2 * size])
        assert scattered.tolist() == [2.0 * rank] * size
        if rank == 0:
            pydist.send(one, 1)
        else:
            pydist.recv(scattered, 0)
            assert scattered.tolist() == [1.0] * size
    pydist.all_to_all_single(torch.empty(0)[::2], torch.empty(0)[::2])
    pydist.barrier()


def test_strides_of_one_element_or_none(transport: Transport) -> None:
    transport.pool(2).run(use_odd_strides)


def in_threads(*functions: Callable[[], None]) -> None:
    """Runs them at the same time; raises what the first to fail raised."""
    errors: list[BaseException] = []

    def run(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def exchange_in_threads(rank: int, world_size: int, num_threads: int, any_source: bool) -> None:
    count = 30
    found: list[float] = []

    def send(thread: int) -> None:
        for index in range(count):
            pydist.send(torch.full((1000,), float(count * thread + index)), 1 - rank, tag=3)

    def receive() -> None:
        tensor = torch.zeros(1000)
        for _ in range(count):
            assert pydist.recv(tensor, None if any_source else 1 - rank, tag=3) == 1 - rank
            assert tensor.unique().numel() == 1
            found.append(tensor[0].item())

    senders = [lambda thread=thread: send(thread) for thread in range(num_threads)]
    in_threads(*senders, *[receive] * num_threads)
    expected = [float(value) for value in range(count * num_threads)]
    assert (found if num_threads == 1 else sorted(found)) == expected


@pytest.mark.parametrize("any_source", [False, True])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_threads_exchange_messages_with_one_tag(
    transport: Transport, num_threads: int, any_source: bool
) -> None:
    transport.pool(2).run(exchange_in_threads, num_threads, any_source)


def use_tags_out_of_range(rank: int, world_size: int) -> None:
    for tag, expected in ((-1, "expected 0 or more"), (1 << 29, "one from 0 to 536870911")):
        with pytest.raises(pydist.UsageError, match=expected):
            pydist.send(torch.ones(1), 1 - rank, tag=tag)
        with pytest.raises(pydist.UsageError, match=expected):
            pydist.recv(torch.ones(1), 1 - rank, tag=tag)
    if rank == 0:
        pydist.send(torch.ones(1), 1, tag=(1 << 29) - 1)
    else:
        pydist.recv(torch.ones(1), 0, tag=(1 << 29) - 1)


def test_tags_that_the_process_group_has_no_room_for() -> None:
    Transport("process_group").pool(2).run(use_tags_out_of_range)


def use_wrong_groups(rank: int, world_size: int) -> None:
    tensor = torch.ones(2)
    for group in ("world", 0, [0, 1], dist):
        calls: list[Callable[[Any], Any]] = [
            lambda group: pydist.all_reduce(tensor, group=group),
            lambda group: pydist.all_gather([tensor], tensor, group=group),
            lambda group: pydist.broadcast(tensor, 0, group=group),
            lambda group: pydist.barrier(group),
            lambda group: pydist.send(tensor, 0, group=group),
            lambda group: pydist.recv(tensor, 0, group=group),
            lambda group: pydist.symmetric_empty(2, group=group),
        ]
        for call in calls:
            with pytest.raises(pydist.UsageError, match="group must be a process group or None"):
                call(group)
    with pytest.raises(pydist.UsageError, match="not a member of the group"):
        pydist.symmetric_empty(2, group=dist.GroupMember.NON_GROUP_MEMBER)


def test_groups_that_are_none(transport: Transport) -> None:
    transport.pool(2).run(use_wrong_groups)


def mix_dtypes_on_rank_0(rank: int, world_size: int) -> None:
    floats, doubles = torch.ones(2), torch.ones(2, dtype=torch.float64)
    other = doubles if rank == 0 else floats
    calls = [
        lambda: pydist.all_gather([floats.clone(), other], floats),
        lambda: pydist.all_gather([other, torch.ones(3 if rank == 1 else 2)], floats),
        lambda: pydist.reduce_scatter(other, [floats, floats]),
        lambda: pydist.reduce_scatter(floats, [floats, other]),
        lambda: pydist.reduce_scatter(other[: rank + 1], [floats[:1], floats]),
        lambda: pydist.all_to_all([floats.clone(), other], [floats, floats]),
        lambda: pydist.all_to_all([floats.clone(), floats.clone()], [floats, other]),
    ]
    for call in calls:
        error = pydist.UsageError if rank == 0 else pydist.MismatchError
        with pytest.raises(error, match="float64"):
            call()
        pydist.barrier()
    ones = torch.ones(2, dtype=torch.float64)
    pydist.all_reduce(ones)
    assert ones.tolist() == [2.0, 2.0]


def test_lists_of_another_dtype_raise_on_all_ranks(transport: Transport) -> None:
    transport.pool(2).run(mix_dtypes_on_rank_0)


def make_symmetric_tensors(rank: int, world_size: int) -> None:
    three = np.int64(3)
    sizes: list[tuple[tuple[Any, ...], tuple[int, ...]]] = [
        ((), ()),
        ((3,), (3,)),
        ((three,), (3,)),
        ((three, 2), (3, 2)),
        (((three, 2),), (3, 2)),
        ((np.array([3, 2]),), (3, 2)),
        ((torch.Size([3, 2]),), (3, 2)),
        ((torch.tensor(3),), (3,)),
        (([],), ()),
    ]
    for size, shape in sizes:
        assert tuple(pydist.symmetric_empty(*size).shape) == shape
    for wrong in (2.5, "ab", None):
        with pytest.raises(pydist.UsageError, match="a size is integers"):
            pydist.symmetric_empty(wrong)


def test_sizes_of_symmetric_tensors(transport: Transport) -> None:
    transport.pool(2).run(make_symmetric_tensors)
