"""Owns the tests of collectives over several hosts, which are one machine's ranks here that believe
to be on several; see PYDIST_HOST."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import pydist
from ranks import HOSTS, fresh_ranks, get_pool
from reference import digest, draw, expect_error

# Equal hosts, ranks in no order of hosts, a larger one, and one rank each.
SPLITS = ["aabb", "abab", "aab", "abc"]
SIZES = (0, 1, 5, 1000, 70_001, 300_001)  # in one exchange, in two, in several segments


def group_of(rank: int, world_size: int) -> str:
    return pydist.collectives.group_engine().transport


@pytest.mark.parametrize(("split", "expected"), [("aa", "shared_memory"), ("ab", "hosts")])
def test_the_transport_is_that_of_the_places(split: str, expected: str) -> None:
    assert get_pool(2, **{HOSTS: split}).run(group_of) == [expected] * 2


def count_sockets(rank: int, world_size: int) -> int:
    """Of this process. Gloo has one to each peer, and one that listens."""
    pydist.barrier()
    links = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    return sum("/socket:" in link for link in links)


def test_one_host_has_no_connections_between_ranks() -> None:
    """Beside those of the user's own group, which both have."""
    counts = {
        split: fresh_ranks(2, count_sockets, env={HOSTS: split})[0].value for split in ("aa", "ab")
    }
    assert counts["ab"] >= counts["aa"] + 4, counts


def reduce_all(rank: int, world_size: int, dtype_name: str) -> str:
    dtype = getattr(torch, dtype_name)
    results = []
    for size in SIZES:
        parts = torch.stack([draw(peer, size, size, dtype=dtype) for peer in range(world_size)])
        exact = {
            dist.ReduceOp.SUM: parts.double().sum(0),
            dist.ReduceOp.AVG: parts.double().mean(0),
            dist.ReduceOp.MAX: parts.double().amax(0) if size else parts.double().sum(0),
        }
        for op, expected in exact.items():
            for in_arena in (False, True):
                mine = pydist.symmetric_empty(size, dtype=dtype) if in_arena else torch.empty(size)
                mine = mine.to(dtype).copy_(parts[rank])
                pydist.all_reduce(mine, op)
                rtol = 4 * torch.finfo(dtype).eps
                torch.testing.assert_close(mine.double(), expected, rtol=rtol, atol=4 * rtol)
                results.append(mine.clone())
            assert torch.equal(results[-1], results[-2]), (size, op)
            later = parts[rank].clone()
            work = pydist.all_reduce(later, op, async_op=True)
            assert work is not None
            work.wait()
            assert torch.equal(later, results[-1]), (size, op)
    return digest(results)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("split", SPLITS)
def test_sums_have_the_same_bits_on_all_ranks(split: str, dtype: str) -> None:
    """And are the exact result within rounding, from any memory, waited for or not."""
    assert len(set(get_pool(len(split), **{HOSTS: split}).run(reduce_all, dtype))) == 1


def number(source: int, size: int) -> Tensor:
    return torch.arange(size, dtype=torch.float32) + 1000 * source


def move_all(rank: int, world_size: int) -> None:
    everybody = range(world_size)
    for size in (0, 1, 7, 70_001):
        gathered = torch.empty(size * world_size)
        pydist.all_gather_into_tensor(gathered, number(rank, size))
        assert torch.equal(gathered, torch.cat([number(peer, size) for peer in everybody]))
        scattered = torch.empty(size)
        pydist.reduce_scatter_tensor(scattered, number(rank, size * world_size))
        total = torch.stack([number(peer, size * world_size) for peer in everybody]).sum(0)
        assert torch.equal(scattered, total[size * rank : size * (rank + 1)])
        for root in everybody:
            tensor = number(rank, size)
            pydist.broadcast(tensor, root)
            assert torch.equal(tensor, number(root, size))
        output = torch.empty(size * world_size)
        pydist.all_to_all_single(output, number(rank, size * world_size))
        expected = [number(peer, size * world_size)[size * rank :][:size] for peer in everybody]
        assert torch.equal(output, torch.cat(expected))
    # From rank a to rank b go a + 2 b numbers.
    given = [rank + 2 * peer for peer in everybody]
    taken = [peer + 2 * rank for peer in everybody]
    output = torch.empty(sum(taken))
    pydist.all_to_all_single(output, number(rank, sum(given)), taken, given)
    pieces = [
        number(peer, 1000)[sum(peer + 2 * other for other in range(rank)) :][: peer + 2 * rank]
        for peer in everybody
    ]
    assert torch.equal(output, torch.cat(pieces))


@pytest.mark.parametrize("split", SPLITS)
def test_what_moves_arrives(split: str) -> None:
    get_pool(len(split), **{HOSTS: split}).run(move_all)


def message_all(rank: int, world_size: int) -> None:
    for size in (0, 3, 1 << 20):
        for peer in range(world_size):
            if peer != rank:
                pydist.send(number(rank, size), peer, tag=peer)
        for peer in reversed(range(world_size)):
            if peer != rank:
                received = torch.empty(size)
                assert pydist.recv(received, peer, tag=rank) == peer
                assert torch.equal(received, number(peer, size))
    if rank > 0:
        pydist.send(number(rank, 4), 0, tag=9)
        return
    found = []
    for _ in range(world_size - 1):
        received = torch.empty(4)
        found.append(pydist.recv(received, tag=9))
        assert torch.equal(received, number(found[-1], 4))
    assert sorted(found) == list(range(1, world_size))


@pytest.mark.parametrize("split", SPLITS)
def test_messages_between_any_two(split: str) -> None:
    get_pool(len(split), **{HOSTS: split}).run(message_all)


def refuse_message(rank: int, world_size: int) -> None:
    if rank == 0:
        pydist.send(torch.ones(3), 1)
        pydist.send(torch.ones(2), 1)
    else:
        error = expect_error(pydist.MismatchError, lambda: pydist.recv(torch.ones(2), 0))
        assert "expected 2 float32" in str(error)
        assert "rank 0 (pid" in str(error)
        pydist.recv(torch.ones(2), 0)
    pydist.barrier()


def test_a_message_of_another_size_is_refused() -> None:
    get_pool(2, **{HOSTS: "ab"}).run(refuse_message)


def use_subgroups(rank: int, world_size: int) -> None:
    for members, transport in (([0, 1], "shared_memory"), ([1, 2], "hosts"), ([0, 2, 3], "hosts")):
        group = dist.new_group(members)
        if rank not in members:
            continue
        tensor = torch.full((1000,), float(rank))
        pydist.all_reduce(tensor, group=group)
        assert torch.equal(tensor, torch.full((1000,), float(sum(members))))
        assert pydist.collectives.group_engine(group).transport == transport
    pydist.barrier()


def test_subgroups_within_a_host_and_across() -> None:
    get_pool(4, **{HOSTS: "aabb"}).run(use_subgroups)


def force_shared_memory(rank: int, world_size: int) -> None:
    error = expect_error(pydist.HostError, pydist.barrier)
    for part in ("rank 0 (pid", "rank 1 (pid", "host a", "PYDIST_HOST 'a' and 'b'"):
        assert part in str(error)


def test_shared_memory_by_force_is_an_error() -> None:
    env = {HOSTS: "ab", "PYDIST_TRANSPORT": "shared_memory"}
    for outcome in fresh_ranks(2, force_shared_memory, env=env):
        assert outcome.ok, outcome.traceback
