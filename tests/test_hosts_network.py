"""Owns the tests of ranks on hosts with network stacks of their own: collectives and training,
over links as fast as the machine, limited or slow."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pydist
from bench.network import DEVICE, kernel_can_delay
from hosts import Hosts
from models import Transformer, mlp, wavy_loss
from pydist import DataParallel
from reference import (
    OneProcess,
    assert_parameters_match,
    assert_reduced,
    assert_same_on_all_ranks,
    digest,
    draw,
)

TRANSPORT = "hosts"
LAYOUTS = ((2, 2), (1, 1, 1), (2, 1))


def layout_name(layout: tuple[int, ...]) -> str:
    return " + ".join(map(str, layout))


@pytest.fixture(scope="module", params=LAYOUTS, ids=layout_name)
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    with Hosts(request.param) as made:
        yield made


def describe_place(rank: int, world_size: int) -> tuple[str, list[str], str]:
    """The namespace, its devices, and the transport."""
    namespace = Path("/proc/self/ns/net").readlink().name
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    devices = sorted(line.split(":")[0].strip() for line in lines)
    return namespace, devices, pydist.collectives.group_engine().transport


def test_hosts_are_apart_and_spanned(hosts: Hosts) -> None:
    """Ranks of one host share a network stack, which is not pytest's, and those of two do not."""
    places = hosts.run(describe_place)
    own = Path("/proc/self/ns/net").readlink().name
    by_host = [{places[rank][0] for rank in hosts.ranks_of(h)} for h in range(len(hosts.layout))]
    assert all(len(names) == 1 and own not in names for names in by_host)
    assert len(set.union(*by_host)) == len(hosts.layout)
    for _, devices, transport in places:
        assert set(devices) >= {DEVICE, "lo"}
        assert transport == TRANSPORT


def value_of(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """Small integers, whose sums over a few ranks are exact in every type."""
    return ((torch.arange(count) + 5 * rank) % 13 - 4).to(dtype)


def reduce_everything(rank: int, world_size: int, dtype_name: str) -> None:
    dtype = getattr(torch, dtype_name)
    for count in (0, 1, 7, 1000, 300_001):
        parts = torch.stack([value_of(peer, count, dtype) for peer in range(world_size)])
        expected = {
            dist.ReduceOp.SUM: parts.sum(0).to(dtype),
            dist.ReduceOp.MAX: parts.amax(0),
            dist.ReduceOp.MIN: parts.amin(0),
        }
        for op, wanted in expected.items():
            mine = value_of(rank, count, dtype)
            pydist.all_reduce(mine, op)
            assert torch.equal(mine, wanted), (count, op)
            mine = pydist.symmetric_empty(count, dtype=dtype)
            mine.copy_(value_of(rank, count, dtype))
            pydist.all_reduce(mine, op, async_op=True).wait()
            assert torch.equal(mine, wanted), (count, op, "arena")


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "int64"])
def test_all_reduce(hosts: Hosts, dtype: str) -> None:
    hosts.run(reduce_everything, dtype)


def average_noise(rank: int, world_size: int, dtype_name: str) -> str:
    dtype = getattr(torch, dtype_name)
    parts = torch.stack([draw(peer, 0, 70_001, dtype=dtype) for peer in range(world_size)])
    mine = parts[rank].clone()
    pydist.all_reduce(mine, dist.ReduceOp.AVG)
    # Every host rounds what it sends, and each sum is rounded once more: by half an eps each.
    error = (mine.double() - parts.double().mean(0)).abs()
    bound = torch.finfo(dtype).eps * parts.double().abs().mean(0) + 1e-6
    assert bool((error <= bound).all()), (error / bound).max()
    return digest([mine])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_means_have_the_same_bits_everywhere(hosts: Hosts, dtype: str) -> None:
    assert len(set(hosts.run(average_noise, dtype))) == 1


def move_everything(rank: int, world_size: int) -> None:
    def numbers(source: int, count: int = 5) -> Tensor:
        return torch.arange(count, dtype=torch.float32) + 100 * source

    gathered = torch.empty(5 * world_size)
    pydist.all_gather_into_tensor(gathered, numbers(rank))
    assert torch.equal(gathered, torch.cat([numbers(peer) for peer in range(world_size)]))

    scattered = torch.empty(3)
    pydist.reduce_scatter_tensor(scattered, numbers(rank, 3 * world_size))
    total = sum(numbers(peer, 3 * world_size) for peer in range(world_size))
    assert isinstance(total, Tensor)
    assert torch.equal(scattered, total[3 * rank : 3 * rank + 3])

    for root in range(world_size):
        sent = numbers(rank, 70_000)
        pydist.broadcast(sent, root)
        assert torch.equal(sent, numbers(root, 70_000))

    # From rank a to rank b go a + 2 b numbers.
    given = [rank + 2 * peer for peer in range(world_size)]
    taken = [peer + 2 * rank for peer in range(world_size)]
    output = torch.empty(sum(taken))
    pydist.all_to_all_single(output, numbers(rank, sum(given)), taken, given)
    pieces = [
        numbers(peer, 10_000)[sum(peer + 2 * other for other in range(rank)) :][: peer + 2 * rank]
        for peer in range(world_size)
    ]
    assert torch.equal(output, torch.cat(pieces))
    pydist.barrier()

    following, preceding = (rank + 1) % world_size, (rank - 1) % world_size
    received = torch.empty(9000)
    if rank == 0:
        pydist.send(numbers(rank, 9000), following)
    assert pydist.recv(received, preceding) == preceding
    if rank != 0:
        pydist.send(numbers(rank, 9000), following)
    assert torch.equal(received, numbers(preceding, 9000))


def test_everything_else(hosts: Hosts) -> None:
    hosts.run(move_everything)


def mlp_loss(module: nn.Module, rank: int, step: int) -> Tensor:
    return wavy_loss(module(draw(rank, step, 4, 160)))


def token_loss(module: nn.Module, rank: int, step: int) -> Tensor:
    tokens = draw(rank, step, 2, 12).abs().mul(100).long() % 512
    return nn.functional.cross_entropy(module(tokens).flatten(0, 1), tokens.roll(1).flatten())


def train(rank: int, world_size: int, kind: str, num_steps: int = 3) -> str:
    torch.manual_seed(1)
    module, loss = (mlp(160, 3), mlp_loss) if kind == "mlp" else (Transformer(64, 2), token_loss)

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)

    expected = OneProcess(module, world_size, optimizer)
    model = DataParallel(module)
    assert model.report().transport == TRANSPORT
    mine = optimizer(model.parameters())
    for step in range(num_steps):
        mine.zero_grad()
        loss(model, rank, step).backward()
        mine.step()
        expected.step(loss, step)
        assert_reduced(model, expected)
        assert_parameters_match(model, expected.module)
        assert_same_on_all_ranks(model.parameters())
    return digest(model.parameters())


@pytest.mark.parametrize("kind", ["mlp", "transformer"])
def test_training_equals_one_process(hosts: Hosts, kind: str) -> None:
    digests = hosts.run(train, kind)
    assert len(set(digests)) == 1


def reduce_often(rank: int, world_size: int, nbytes: int, times: int) -> float:
    """Seconds."""
    mine = value_of(rank, nbytes // 8, torch.float64)
    pydist.barrier()
    start = time.monotonic()
    for _ in range(times):
        pydist.all_reduce(mine)
    seconds = time.monotonic() - start
    expected = sum(value_of(peer, nbytes // 8, torch.float64) for peer in range(world_size))
    assert torch.equal(mine, expected * world_size ** (times - 1))
    return seconds


def test_limited_bandwidth() -> None:
    """At 200 Mbit/s all is right; it takes as long as the bytes that were counted must take."""
    rate = 2e8
    with Hosts((2, 2), rate_bit_per_s=rate) as hosts:
        hosts.run(reduce_often, 8, 1)  # connects
        before = hosts.network.sent_nbytes()
        seconds = max(hosts.run(reduce_often, 4 * 2**20, 2))
        sent = [after - b for after, b in zip(hosts.network.sent_nbytes(), before, strict=True)]
        assert seconds > 0.8 * max(sent) * 8 / rate, "the limit does not limit"
        assert len(set(hosts.run(train, "mlp"))) == 1


def test_added_latency(record_property: Any) -> None:
    """By netem where the kernel has it, else by frame_relay.py: all is right, and a sum, which
    everybody knows in the end, takes as long as one way at least."""
    delay_s = 0.005
    with Hosts((2, 2), delay_s=delay_s) as hosts:
        record_property("delayed by", hosts.network.delay_by)
        assert hosts.network.delay_by == ("netem" if kernel_can_delay() else "relay")
        assert min(hosts.run(reduce_often, 1024, 3)) > 3 * delay_s, "the delay does not delay"
        assert len(set(hosts.run(train, "mlp", 1))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_name)
def test_a_bad_link_and_a_transformer(layout: tuple[int, ...]) -> None:
    with Hosts(layout, rate_bit_per_s=1e8, delay_s=0.01) as hosts:
        assert len(set(hosts.run(train, "transformer", 5))) == 1
