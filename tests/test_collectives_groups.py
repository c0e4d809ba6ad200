"""Owns groups, requests and threads: several of everything, in any order."""

import gc
import os
import threading
import time

import pytest
import torch
import torch.distributed as dist

import pydist
from conftest import Transport
from pydist.collectives import group_engine
from ranks import resource_snapshot, start_ranks


def sum_over(group: dist.ProcessGroup, size: int = 100) -> float:
    tensor = torch.full((size,), float(dist.get_rank() + 1))
    pydist.all_reduce(tensor, group=group)
    assert bool((tensor == tensor[0]).all())
    return float(tensor[0])


def use_subgroups(rank: int, world_size: int) -> None:
    members = [[0, 1], [1, 2], [0, 1, 2], [2], [0, 2]]
    groups = [dist.new_group(ranks) for ranks in members]
    for size in (1, 50_000):
        for ranks, group in zip(members, groups, strict=True):
            if rank in ranks:
                assert sum_over(group, size) == sum(r + 1 for r in ranks)
                value = torch.tensor([float(rank)])
                pydist.broadcast(value, ranks[-1], group)
                assert value.item() == ranks[-1]
                pydist.broadcast(value.fill_(rank), group=group, group_src=0)
                assert value.item() == ranks[0]
            else:
                assert pydist.barrier(group) is None  # warns, as torch does
    engine = group_engine(groups[0]) if rank < 2 else None
    assert engine is None or (engine.rank, engine.size) == (rank, 2)
    assert rank >= 2 or group_engine(groups[0]) is engine
    # Messages by global and by group rank.
    if rank == 1:
        pydist.send(torch.tensor([5.0]), 2, groups[1])
        pydist.send(torch.tensor([6.0]), group=groups[1], group_dst=1)
    if rank == 2:
        for expected in (5.0, 6.0):
            assert pydist.recv(tensor := torch.zeros(1), 1, groups[1]) == 1
            assert tensor.item() == expected
    for index in (3, 0, 4, 2, 1):
        dist.destroy_process_group(groups[index])
        check = torch.ones(1)
        pydist.all_reduce(check)
        assert check.item() == world_size


def test_subgroups(transport: Transport) -> None:
    transport.pool(3).run(use_subgroups)


def make_and_destroy(rank: int, world_size: int, rounds: int) -> None:
    for _ in range(rounds):
        group = dist.new_group(list(range(world_size)))
        assert sum_over(group, 3000) == world_size * (world_size + 1) / 2
        pydist.all_reduce(torch.ones(1), group=group, async_op=True).wait()
        dist.destroy_process_group(group)
        del group
        gc.collect()


def test_groups_come_and_go() -> None:
    pool = Transport("shared_memory").pool(2)
    pool.run(make_and_destroy, 5)
    before = pool.run(resource_snapshot)
    pool.run(make_and_destroy, 40)
    after = pool.run(resource_snapshot)
    for old, new in zip(before, after, strict=True):
        for what in ("threads", "descriptors", "children"):
            assert new[what] <= old[what], (what, before, after)
        assert new["resident_nbytes"] <= old["resident_nbytes"] + (20 << 20), (before, after)


def start_many(rank: int, world_size: int) -> None:
    tensors = [torch.full((1 + 997 * k,), float(k + rank)) for k in range(30)]
    works = []
    for k, tensor in enumerate(tensors):
        work = pydist.all_reduce(tensor, async_op=k % 5 != 2)
        assert (work is None) == (k % 5 == 2)
        works.append(work)
    gathered = [torch.zeros(3) for _ in range(world_size)]
    strided = torch.zeros(4, 4).t()[:, ::2].fill_(rank + 1)
    source = torch.full((3,), float(rank))
    late = [
        pydist.all_gather(gathered, source, async_op=True),
        pydist.all_reduce(strided, async_op=True),
        pydist.broadcast(torch.ones(5), 0, async_op=True),
        pydist.reduce_scatter_tensor(torch.ones(2), torch.ones(2 * world_size), async_op=True),
        pydist.all_to_all_single(torch.ones(world_size), torch.ones(world_size), async_op=True),
        pydist.barrier(async_op=True),
    ]
    for work in reversed(late):
        assert work.wait()
        assert work.is_completed()
    assert [t.tolist() for t in gathered] == [[float(r)] * 3 for r in range(world_size)]
    assert bool((strided == world_size * (world_size + 1) / 2).all())
    for work in works:
        if work is not None:
            work.wait()
    for k, tensor in enumerate(tensors):
        assert bool((tensor == world_size * k + sum(range(world_size))).all())
    # A request that nobody keeps: the tensors stay until it has ended.
    pydist.all_reduce(torch.ones(100_000), async_op=True)
    # An error comes with wait().
    work = pydist.all_reduce(torch.ones(3 + rank), async_op=True)
    with pytest.raises(pydist.MismatchError):
        work.wait()
    pydist.barrier()


def test_requests() -> None:
    Transport("shared_memory").pool(3).run(start_many)


def finish_early(rank: int, world_size: int) -> None:
    """On the process group requests have ended when they are returned; wait() is the same."""
    tensor = torch.full((5,), float(rank + 1))
    work = pydist.all_reduce(tensor, async_op=True)
    assert work.wait()
    assert tensor.tolist() == [world_size * (world_size + 1) / 2] * 5


def test_request_on_every_transport(transport: Transport) -> None:
    transport.pool(2).run(finish_early)


def run_in_threads(rank: int, world_size: int) -> None:
    groups = [dist.new_group(list(range(world_size))) for _ in range(2)]
    failures = []

    def work(index: int) -> None:
        try:
            for k in range(200):
                tensor = torch.full((1 + 50 * k,), float(rank + index))
                pydist.all_reduce(tensor, group=groups[index])
                assert bool((tensor == sum(range(world_size)) + world_size * index).all())
        except BaseException as error:
            failures.append(error)

    # The engines are made in the threads, in whatever order they come.
    threads = [threading.Thread(target=work, args=(index,)) for index in (rank % 2, 1 - rank % 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def test_two_groups_in_two_threads() -> None:
    Transport("shared_memory").pool(2).run(run_in_threads)


def message_beside_collective(rank: int, world_size: int) -> None:
    """A message passes while a collective of the same group waits for it."""
    if rank == 0:
        work = pydist.all_reduce(torch.ones(1000), async_op=True)
        time.sleep(0.1)
        pydist.send(torch.tensor([1.0]), 1)
        work.wait()
    else:
        pydist.recv(torch.zeros(1), 0)
        pydist.all_reduce(torch.ones(1000))


def test_messages_do_not_wait_for_collectives() -> None:
    Transport("shared_memory").pool(2).run(message_beside_collective)


def fork_a_child(rank: int, world_size: int) -> None:
    tensor = pydist.symmetric_empty(1000).fill_(float(rank))
    pydist.all_reduce(tensor, async_op=True).wait()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            pydist.all_reduce(torch.ones(1))
        except pydist.UsageError:
            code = 0 if tensor[0].item() == sum(range(world_size)) else 2
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    pydist.all_reduce(tensor)


def test_forked_child_is_refused() -> None:
    Transport("shared_memory").pool(2).run(fork_a_child)


def leave_with_requests(rank: int, world_size: int) -> None:
    pydist.all_reduce(torch.ones(10), async_op=True).wait()
    if rank == 0:
        pydist.all_reduce(torch.ones(10), async_op=True)  # which rank 1 never joins


def test_leaving_with_a_request_in_flight() -> None:
    outcomes = start_ranks(2, leave_with_requests, env={"PYDIST_TRANSPORT": "shared_memory"}).join()
    assert [outcome.exit_code for outcome in outcomes] == [0, 0], [o.stderr for o in outcomes]
