"""Owns messages that are not waited for, beside those that are: orders, sources, failures."""

from datetime import timedelta

import pytest
import torch

import pydist
from conftest import Transport
from pydist.collectives import Work

SHARED = Transport("shared_memory")
LARGE = 3 << 20  # elements: more than any ring holds
DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip


def numbered(size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return (torch.arange(size) * 7 + seed).remainder(120).to(dtype)


def exchange_everything(rank: int, world_size: int) -> None:
    """Both ranks send before they receive, of all dtypes and sizes, in one go."""
    peer = 1 - rank
    expected, received, works = [], [], []
    for tag, dtype in enumerate(DTYPES):
        for size in (0, 1, 1000, 70_001):
            works.append(pydist.isend(numbered(size, dtype, rank), peer, tag=tag))
            expected.append(numbered(size, dtype, peer))
            received.append(torch.zeros(size, dtype=dtype))
            works.append(pydist.irecv(received[-1], peer, tag=tag))
    large = torch.full((LARGE,), float(rank))
    works.append(pydist.isend(large, peer, tag=99))
    received.append(torch.empty(LARGE))
    expected.append(torch.full((LARGE,), float(peer)))
    works.append(pydist.irecv(received[-1], peer, tag=99))
    for work in reversed(works):
        assert work.wait() is True
        assert work.is_completed()
    for found, value in zip(received, expected, strict=True):
        assert torch.equal(found, value), (found.dtype, found.numel())


def test_all_dtypes_and_sizes(transport: Transport) -> None:
    transport.pool(2).run(exchange_everything)


def mix_verbs(rank: int, world_size: int) -> None:
    """Messages of one peer and tag come in the order of their calls, whichever verbs are used."""
    count = 60
    if rank == 0:
        works = []
        for index in range(count):
            value = torch.full((index * 50 + 1,), float(index))
            if index % 3 == 0:
                pydist.send(value, 1, tag=index % 2)
            else:
                works.append(pydist.isend(value, 1, tag=index % 2))
        for work in works:
            work.wait()
        return
    pending: list[tuple[Work, torch.Tensor, int]] = []
    for index in [*range(1, count, 2), *range(0, count, 2)]:  # the tags one after the other
        value = torch.empty(index * 50 + 1)
        if index % 4 < 2:
            pending.append((pydist.irecv(value, 0, tag=index % 2), value, index))
        else:
            assert pydist.recv(value, 0, tag=index % 2) == 0
            assert bool((value == index).all()), index
    for work, value, index in reversed(pending):
        work.wait()
        assert work.source() == 0
        assert bool((value == index).all()), index


def test_order_by_peer_and_tag() -> None:
    SHARED.pool(2).run(mix_verbs)


def receive_from_anybody(rank: int, world_size: int) -> None:
    if rank != 0:
        pydist.isend(torch.tensor([rank, 5]), 0, tag=3).wait()
        pydist.isend(torch.tensor([rank, 6]), 0, tag=3).wait()
        pydist.barrier()
        return
    received = [torch.zeros(2, dtype=torch.int64) for _ in range(2 * (world_size - 1))]
    works = [pydist.irecv(tensor, tag=3) for tensor in received[:-1]]
    for work, tensor in zip(works, received, strict=False):
        work.wait()
        assert tensor[0].item() == work.source()
    assert pydist.recv(received[-1], tag=3) == received[-1][0].item()
    for source in range(1, world_size):
        orders = [t[1].item() for t in received if t[0].item() == source]
        assert orders == [5, 6]
    pydist.barrier()


def test_any_source() -> None:
    SHARED.pool(3).run(receive_from_anybody)


def send_many(rank: int, world_size: int) -> None:
    """All outstanding at once, to and from everybody, while collectives go on."""
    count, peers = 300, [r for r in range(world_size) if r != rank]
    works = [
        pydist.isend(torch.full((500,), float(rank * count + index)), peer, tag=index)
        for index in range(count)
        for peer in peers
    ]
    pydist.barrier()
    received = {}
    for index in reversed(range(count)):
        for peer in peers:
            received[peer, index] = torch.empty(500)
            works.append(pydist.irecv(received[peer, index], peer, tag=index))
    total = torch.ones(3)
    pydist.all_reduce(total)
    assert total[0].item() == world_size
    for work in works:
        work.wait()
    for (peer, index), tensor in received.items():
        assert bool((tensor == peer * count + index).all())


def test_many_outstanding() -> None:
    SHARED.pool(3).run(send_many)


def receive_into_strides(rank: int, world_size: int) -> None:
    source = torch.arange(24.0).view(4, 6)
    if rank == 0:
        pydist.isend(source.t(), 1).wait()
        pydist.isend(source.to(torch.complex64).conj(), 1).wait()
        return
    target = torch.zeros(4, 6)
    pydist.irecv(target.t(), 0).wait()
    assert torch.equal(target, source)
    wide = torch.zeros(4, 12, dtype=torch.complex64)
    pydist.irecv(wide[:, ::2], 0).wait()
    assert torch.equal(wide[:, ::2].real, source)
    assert not wide[:, 1::2].abs().any()


def test_tensors_that_are_not_contiguous(transport: Transport) -> None:
    transport.pool(2).run(receive_into_strides)


def use_groups_and_misuse(rank: int, world_size: int) -> None:
    with pytest.raises(pydist.UsageError, match="tag is -1"):
        pydist.isend(torch.ones(1), 1 - rank, tag=-1)
    with pytest.raises(pydist.UsageError, match="another rank"):
        pydist.isend(torch.ones(1), rank)
    with pytest.raises(pydist.UsageError, match="either dst"):
        pydist.isend(torch.ones(1))
    with pytest.raises(pydist.UsageError, match=r"source\(\)"):
        pydist.barrier(async_op=True).source()
    work = pydist.isend(torch.ones(2), 1 - rank)
    with pytest.raises(pydist.UsageError, match=r"timeout"):
        work.wait(timedelta(seconds=1))
    pydist.recv(torch.ones(2), 1 - rank)
    work.wait()


def test_misuse(transport: Transport) -> None:
    transport.pool(2).run(use_groups_and_misuse)


def send_once_more_after(work: Work) -> None:
    work.wait()
    pydist.isend(torch.ones(3), 1, tag=8).wait()


def receive_another_kind(rank: int, world_size: int) -> None:
    wrong = [torch.ones(4), torch.ones(3, dtype=torch.float64)]
    for tensor in wrong:
        if rank == 0:
            work = pydist.isend(torch.ones(3), 1, tag=8)
        else:
            work = pydist.irecv(tensor, 0, tag=8)
            with pytest.raises(pydist.MismatchError) as raised:
                work.wait()
            assert "3 float32" in str(raised.value)
            assert "rank 0" in str(raised.value)
        pydist.barrier()
        if rank == 0:  # told there and then, or by its next message, which is not sent
            with pytest.raises(pydist.MismatchError, match=r"refused"):
                send_once_more_after(work)
        pydist.barrier()
    if rank == 0:
        pydist.isend(torch.ones(3), 1, tag=8).wait()
    else:
        pydist.irecv(found := torch.zeros(3), 0, tag=8).wait()
        assert found.tolist() == [1.0] * 3


def test_message_of_another_kind(transport: Transport) -> None:
    transport.pool(2).run(receive_another_kind)
