"""Owns the checks of the NCCL communicator and of the algorithms above it, for one rank or more."""

import itertools
from collections.abc import Callable

import torch
import torch.distributed as dist
from place import Place
from rows import Rows
from torch import Tensor
from values import values
from world import GROUP_TIMEOUT_S, make_store

from pydist import _C

LENGTHS = (1, 5, 1000, 70_001)
TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64)
SUM, MEAN, MIN, MAX, PRODUCT = range(5)  # as the engine numbers them
OPS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "sum": (SUM, lambda given: given.sum(0)),
    "mean": (MEAN, lambda given: given.mean(0)),
    "min": (MIN, lambda given: given.amin(0)),
    "max": (MAX, lambda given: given.amax(0)),
    "product": (PRODUCT, lambda given: given.prod(0)),
}
TOLERANCES = {torch.float16: 2**-9, torch.bfloat16: 2**-6, torch.float32: 1e-6}
NUM_IN_A_ROW = 50


class Ranks:
    """A communicator, and what every rank gives: any rank can compute it."""

    def __init__(self, place: Place, store: dist.Store, rank: int, size: int, name: str) -> None:
        self.place, self.rank, self.size = place, rank, size
        self.communicator = _C.NcclCommunicator(
            store=dist.PrefixStore(name, store),
            rank=rank,
            size=size,
            device=0,
            timeout_s=GROUP_TIMEOUT_S,
            name=f"the group {name!r}",
            remedy="",
            global_ranks=list(range(size)),
        )

    def given(self, length: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
        """One row for each rank."""
        rows = [
            values(self.place, length, torch.float64, 1000 * seed + rank).clamp(-30, 30)
            for rank in range(self.size)
        ]
        return torch.stack(rows).to(dtype)

    def own(self, length: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
        return self.given(length, dtype, seed)[self.rank].clone()

    def run(self, call: Callable[[], object]) -> None:
        """Ordered with the current stream before and after; the host waits for nothing."""
        self.communicator.after_current_stream()
        call()
        self.communicator.before_current_stream()


def wide(given: Tensor) -> Tensor:
    return given if given.dtype is torch.int64 else given.double()


def check_all_reduce(ranks: Ranks, rows: Rows, dtype: torch.dtype) -> None:
    for (name, (op, combined)), length in itertools.product(OPS.items(), LENGTHS):
        if name == "mean" and not dtype.is_floating_point:
            continue
        given = ranks.given(length, dtype)
        tensor = given[ranks.rank].clone()
        ranks.run(lambda: ranks.communicator.all_reduce(tensor, op, f"{name} of a check"))  # noqa: B023
        expected = combined(wide(given)).to(dtype)
        rows.expect_close(tensor, expected, TOLERANCES.get(dtype, 1e-12))


def check_divisor(ranks: Ranks, rows: Rows) -> None:
    """What a joined rank leaves: the sum is divided by less, or more, than there are ranks."""
    given = ranks.given(1000, torch.float32)
    for divisor in (1, 3):
        tensor = given[ranks.rank].clone()
        ranks.run(
            lambda: ranks.communicator.all_reduce(tensor, MEAN, "a check", divisor)  # noqa: B023
        )
        rows.expect_close(tensor, given.double().sum(0) / divisor, 1e-6)


def check_extremes(ranks: Ranks, rows: Rows) -> None:
    """A mean neither overflows nor underflows where the gradients do not."""
    given = torch.tensor([40000.0, -65504.0, 2.0**-24, 2.0**-14, 0.0], dtype=torch.float16)
    tensor = given.to(ranks.place.device)
    expected = tensor.clone()
    ranks.run(lambda: ranks.communicator.all_reduce(tensor, MEAN, "a check"))
    if ranks.size == 1:
        rows.expect_equal(tensor, expected)
    else:  # NCCL's own sum of half types may lose what is denormal
        rows.expect_close(tensor, expected, 2**-9, 2.0**-24)


def check_others(ranks: Ranks, rows: Rows) -> None:
    size, rank, communicator = ranks.size, ranks.rank, ranks.communicator
    for dtype, length in itertools.product((torch.float32, torch.bfloat16, torch.int64), LENGTHS):
        given = ranks.given(length * size, dtype)
        output = torch.zeros(length, dtype=dtype, device=given.device)
        ranks.run(lambda: communicator.reduce_scatter(output, given[rank], SUM, "a check"))  # noqa: B023
        expected = wide(given).sum(0).view(size, length)[rank].to(dtype)
        rows.expect_close(output, expected, TOLERANCES.get(dtype, 0.0))

        gathered = torch.zeros(length * size, dtype=dtype, device=given.device)
        part = given[rank, :length].clone()
        ranks.run(lambda: communicator.all_gather(gathered, part, "a check"))  # noqa: B023
        rows.expect_equal(wide(gathered), wide(given[:, :length].flatten()))

        swapped = torch.zeros_like(gathered)
        whole = given[rank].clone()
        ranks.run(lambda: communicator.all_to_all(swapped, whole, "a check"))  # noqa: B023
        parts = given.view(size, size, length)[:, rank].flatten()
        rows.expect_equal(wide(swapped), wide(parts))


def check_broadcast(ranks: Ranks, rows: Rows) -> None:
    for root in range(ranks.size):
        given = [ranks.given(length, torch.float32, length) for length in LENGTHS]
        tensors = [each[ranks.rank].clone() for each in given]
        ranks.run(lambda: ranks.communicator.broadcast(tensors, root, "a check"))  # noqa: B023
        rows.expect_equal(torch.cat(tensors), torch.cat([each[root] for each in given]))


def check_exchange(ranks: Ranks, rows: Rows) -> None:
    """Messages around a ring, several to the same peer in one call; alone: to itself."""
    after, before = (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size
    given = [ranks.given(length, torch.float32, length) for length in LENGTHS]
    sent = [(each[ranks.rank].clone(), after) for each in given]
    received = [(torch.zeros_like(tensor), before) for tensor, _ in sent]
    ranks.run(lambda: ranks.communicator.exchange(sent, received, "a check"))
    found = torch.cat([tensor for tensor, _ in received])
    rows.expect_equal(found, torch.cat([each[before] for each in given]))


def check_order(ranks: Ranks, rows: Rows) -> None:
    """What is computed right before and right after a call meets it in that order."""
    length = 1000 if ranks.place.emulated else 2**22
    tensor = torch.ones(length, device=ranks.place.device)
    for _ in range(NUM_IN_A_ROW):
        tensor.mul_(2.0 / ranks.size)
        ranks.run(lambda: ranks.communicator.all_reduce(tensor, SUM, "a check"))
        tensor.mul_(0.5)
    rows.expect_equal(tensor, torch.ones_like(tensor))


def check_memory(ranks: Ranks, rows: Rows) -> None:
    """Memory of the communicator's own is zeroed, aligned, and reduced like any other."""
    kept = []
    for nbytes in (4, 512, 1_000_000):
        memory = ranks.communicator.allocate(nbytes)
        kept.append(memory)
        if memory.data_ptr() % 512 or memory.numel() != nbytes:
            raise AssertionError(f"{memory.numel()} bytes at {memory.data_ptr():#x}")
        rows.expect_equal(memory, torch.zeros_like(memory))
        tensor = memory.view(torch.float32)
        given = ranks.given(tensor.numel(), torch.float32)
        tensor.copy_(given[ranks.rank])
        ranks.run(lambda: ranks.communicator.all_reduce(tensor, SUM, "a check"))  # noqa: B023
        rows.expect_close(tensor, given.double().sum(0), 1e-6)


def check_marks(ranks: Ranks) -> None:
    """The host can wait for what has been enqueued so far."""
    tensor = ranks.own(1000, torch.float32)
    ranks.run(lambda: ranks.communicator.all_reduce(tensor, SUM, "a check"))
    mark = ranks.communicator.mark()
    ranks.communicator.wait(mark)
    if not ranks.communicator.is_done(mark):
        raise AssertionError("waited for a mark that is not done")
    ranks.communicator.check()
    if ranks.communicator.counters()["num_calls"] == 0:
        raise AssertionError("no call was counted")


def check_graph(ranks: Ranks, rows: Rows) -> None:
    given = ranks.given(1000, torch.float32)
    tensor = given[ranks.rank].clone()
    call = lambda: ranks.run(  # noqa: E731
        lambda: ranks.communicator.all_reduce(tensor, SUM, "a check")
    )
    replay = ranks.place.captured(lambda: call, of_torch=False)
    for _ in range(3):
        tensor.copy_(given[ranks.rank])
        replay()
        ranks.place.settle()
        rows.expect_close(tensor, given.double().sum(0), 1e-6)


ALGORITHMS = ("nccl", "ring", "slices")
FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WIRES: dict[str, tuple[int, float]] = {  # bytes of an element, and half a step at 1
    "float16": (2, 2**-11),
    "bfloat16": (2, 2**-8),
    "float8_e4m3fn": (1, 2**-4),
}


def wires_of(algorithm: str, dtype: torch.dtype) -> list[str]:
    """The narrower ones; NCCL's own all-reduce has none."""
    narrower = [wire for wire, (nbytes, _) in WIRES.items() if nbytes < dtype.itemsize]
    return ["same"] if algorithm == "nccl" else ["same", *narrower]


def check_algorithm(ranks: Ranks, rows: Rows, algorithm: str) -> None:
    """The mean of any number of elements in every type, on every wire."""
    all_reduce = _C.DeviceAllReduce(ranks.communicator, algorithm)
    for dtype, length in itertools.product(FLOATING, (*LENGTHS, 128, 129, 4096)):
        for wire in wires_of(algorithm, dtype):
            given = ranks.given(length, dtype, length)
            tensor = given[ranks.rank].clone()
            ranks.run(lambda: all_reduce.mean(tensor, wire, "a check"))  # noqa: B023
            unit = WIRES[wire][1] if wire != "same" else torch.finfo(dtype).eps
            unit = max(unit, 2**-23 if dtype is not torch.float64 else 0.0)
            rows.expect_close(tensor, given.double().mean(0), 2 * (ranks.size + 1) * unit)


def check_auto(ranks: Ranks, rows: Rows) -> None:
    """The cost model is fitted, and takes an algorithm that there is."""
    all_reduce = _C.DeviceAllReduce(ranks.communicator, "auto")
    for length in (1000, 5_000_000):
        chosen = all_reduce.choose(length, torch.float32, "same")
        if chosen not in ALGORITHMS:
            raise AssertionError(f"took {chosen!r}")
    given = ranks.given(70_001, torch.float32)
    tensor = given[ranks.rank].clone()
    ranks.run(lambda: all_reduce.mean(tensor, "same", "a check"))
    rows.expect_close(tensor, given.double().mean(0), 1e-6)


def check_several(place: Place, rows: Rows, store: dist.Store, rank: int, size: int) -> None:
    """Communicators side by side, which end in another order than they began."""
    several = [Ranks(place, store, rank, size, f"several {index}") for index in range(3)]
    for order in ((0, 1, 2), (2, 0, 1)):
        for index in order:
            given = several[index].given(1000, torch.float32, index)
            tensor = given[rank].clone()
            several[index].run(
                lambda: several[index].communicator.all_reduce(tensor, SUM, "a check")  # noqa: B023
            )
            rows.expect_close(tensor, given.double().sum(0), 1e-6)
    for index in (1, 0):
        several[index].communicator = None
    tensor = several[2].own(10, torch.float32)
    several[2].run(lambda: several[2].communicator.all_reduce(tensor, SUM, "a check"))


def check_everything(place: Place, rows: Rows, store: dist.Store, rank: int, size: int) -> None:
    """Collective: the same checks in the same order on every rank."""
    ranks = Ranks(place, store, rank, size, "checks")
    for dtype in TYPES:
        with rows.check(f"all_reduce of {str(dtype).removeprefix('torch.')}, all operations"):
            check_all_reduce(ranks, rows, dtype)
    checks: tuple[tuple[str, Callable[[Ranks, Rows], None]], ...] = (
        ("mean by a divisor of the caller's", check_divisor),
        ("mean of the largest and smallest halfs", check_extremes),
        ("reduce_scatter, all_gather, all_to_all", check_others),
        ("broadcast of several tensors", check_broadcast),
        ("exchange of messages", check_exchange),
        ("order with the current stream", check_order),
        ("memory of its own", check_memory),
        ("a call captured in a graph", check_graph),
    )
    for name, check in checks:
        with rows.check(name):
            check(ranks, rows)
    for algorithm in ALGORITHMS:
        with rows.check(f"mean by {algorithm}, all types and wires"):
            check_algorithm(ranks, rows, algorithm)
    with rows.check("mean by what the cost model takes"):
        check_auto(ranks, rows)
    with rows.check("waiting for a mark"):
        check_marks(ranks)
    with rows.check("several communicators, ended in any order"):
        check_several(place, rows, store, rank, size)


def run(place: Place, rows: Rows) -> None:
    check_everything(place, rows, make_store(), 0, 1)
