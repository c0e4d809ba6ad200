"""Owns the proof that the emulated device is right: order, events, capture, and that each class of
fault is found."""

import ctypes
import gc
import time

import pytest
import torch
import torch.distributed as dist

from emulated import (
    Graph,
    call,
    call_for,
    copy,
    current_stream,
    emulated_pool,
    fault,
    fill_zero,
    held,
    is_complete,
    launch,
    load,
    make_event,
    make_stream,
    make_torch_stream,
    plant,
    record,
    set_option,
    touch,
    wait,
)
from emulated_nccl import DTYPES, IN_PROGRESS, Nccl, NcclError, check


def in_one_rank(function: object, *args: object, seed: int = 0) -> object:
    return emulated_pool(1).run(function, *args, seed=seed)[0]


def until(done: object, timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it does not come to an end"
        time.sleep(0.001)


# Streams and events


def _a_stream_keeps_its_order(rank: int, size: int) -> list[float]:
    value, one = torch.zeros(1), torch.ones(1)
    stream = make_stream()
    with held():
        for factor in (2.0, 3.0, 5.0):
            launch(value, one, factor, stream)
        assert value.item() == 0  # held
        event = make_event()
        record(event, stream)
        assert not is_complete(event)
    until(lambda: is_complete(event))
    return [value.item()]


def test_a_stream_keeps_its_order_and_runs_late() -> None:
    assert in_one_rank(_a_stream_keeps_its_order) == [((0 * 2 + 1) * 3 + 1) * 5 + 1]


def _the_host_waits(rank: int, size: int) -> None:
    event = make_event()
    record(event, make_stream())
    set_option("hides_completion", 1)
    for _ in range(100):  # it may look now and then
        assert not is_complete(event)
    with fault("the host waits for an event"):
        until(lambda: is_complete(event))
    set_option("hides_completion", 0)
    until(lambda: is_complete(event))


def test_a_host_that_waits_for_an_event_is_found() -> None:
    in_one_rank(_the_host_waits)


def _order_of_streams(rank: int, size: int) -> float:
    """A number that depends on the order in which six streams came, twice each."""
    set_option("max_delay_s", 0)
    place = torch.ones(1)
    tensors = [torch.full((1,), float(number)) for number in range(1, 7)]
    streams = [make_stream() for _ in tensors]
    with held():
        for _ in range(2):
            for stream, tensor in zip(streams, tensors, strict=True):
                launch(place, tensor, -0.5, stream, declares=False)
    call("synchronize")
    return place.item()


def test_the_order_of_streams_is_that_of_the_seed() -> None:
    by_seed = [in_one_rank(_order_of_streams, seed=seed) for seed in range(6)]
    again = [in_one_rank(_order_of_streams, seed=seed) for seed in range(6)]
    assert by_seed == again
    assert len(set(by_seed)) > 3


def _an_event_orders_two_streams(rank: int, size: int) -> float:
    value, one = torch.zeros(1000), torch.ones(1000)
    first, second, event = make_stream(), make_stream(), make_event()
    for _ in range(20):
        launch(value, one, 1.0, first)
        record(event, first)
        wait(second, event)
        launch(value, one, 2.0, second)
        record(event, second)
        wait(first, event)
    wait(0, event)  # the current stream is eager: it is done when the call returns
    assert is_complete(event)
    call("destroy_event", event)
    return value[0].item()


def test_an_event_orders_two_streams() -> None:
    expected = 0.0
    for _ in range(20):
        expected = (expected + 1) * 2 + 1
    assert in_one_rank(_an_event_orders_two_streams) == torch.tensor(expected).item()


def _the_current_stream_is_eager(rank: int, size: int) -> None:
    side, event = make_stream(), make_event()
    value, copied, one = torch.zeros(10), torch.empty(10), torch.ones(10)
    launch(value, one, 1.0, side)
    record(event, side)
    wait(0, event)
    copy(copied, value, 0)
    assert copied.tolist() == [1] * 10
    fill_zero(value, 0)
    assert value.tolist() == [0] * 10
    other = make_torch_stream()
    record(event, 0)
    wait(other, event)
    with current_stream(other):
        launch(value, one, 1.0, other)
        assert value.tolist() == [1] * 10
    record(event, other)
    wait(0, event)
    touch("torch", value, writes=True)


def test_the_current_stream_is_eager() -> None:
    in_one_rank(_the_current_stream_is_eager)


# Faults of order


def _conflicts(rank: int, size: int) -> None:
    value, one = torch.zeros(100), torch.ones(100)
    first, second, event = make_stream(), make_stream(), make_event()
    launch(value, one, 1.0, first)
    with fault("neither comes before the other"):
        launch(value[50:], one[50:], 1.0, second)
    launch(value, one, 1.0, first)
    with fault("fill_zero() of 4 bytes"):  # a writer against a reader
        fill_zero(one[99:], second)
    launch(value, one, 1.0, first)
    record(event, first)
    wait(second, event)
    launch(value, one, 1.0, second)  # ordered now
    with fault("an operation of torch's on default stream 1 reads"):
        touch("torch", value, writes=False)
    record(event, second)
    wait(0, event)
    touch("torch", value, writes=False)


def test_conflicting_accesses_are_a_fault_however_they_ran() -> None:
    for seed in range(3):
        in_one_rank(_conflicts, seed=seed)


def _an_event_recorded_too_early(rank: int, size: int) -> None:
    value, one = torch.zeros(100), torch.ones(100)
    first, event = make_stream(), make_event()
    record(event, first)
    launch(value, one, 1.0, first)
    wait(0, event)
    time.sleep(0.01)  # it has run by now, which is luck
    with fault("on default stream"):
        launch(value, one, 1.0, 0)


def test_an_event_that_is_recorded_too_early_orders_nothing() -> None:
    in_one_rank(_an_event_recorded_too_early)


def _tensors_freed(rank: int, size: int) -> None:
    value, one = torch.zeros(1000), torch.ones(1000)
    side, event = make_stream(), make_event()
    launch(value, one, 1.0, side)
    with fault("a tensor's end"):
        del value
        gc.collect()
    value = torch.zeros(1000)
    pointer = value.data_ptr()
    record(event, 0)
    wait(side, event)
    launch(value, one, 1.0, side)
    record(event, side)
    wait(0, event)
    del value  # the current stream comes after its use
    with fault("which was freed"):
        call("copy", pointer, one.data_ptr(), 16, side)
    record(event, side)
    wait(0, event)


def test_a_tensor_that_is_freed_or_used_too_early_or_late_is_a_fault() -> None:
    in_one_rank(_tensors_freed)


def _blocks_freed(rank: int, size: int) -> None:
    side, event = make_stream(), make_event()
    one = torch.ones(4)
    for kind in ("device", "pinned"):
        block = call_for(ctypes.c_void_p, "allocate", kind, 16)
        call("copy", block, one.data_ptr(), 16, side)
        record(event, side)
        wait(0, event)  # the current stream comes later, but the host knows nothing
        with fault("is not known to be done with"):
            call("deallocate", kind, block)
            call("synchronize")
        block = call_for(ctypes.c_void_p, "allocate", kind, 16)
        call("copy", block, one.data_ptr(), 16, side)
        record(event, side)
        until(lambda: is_complete(event))
        call("deallocate", kind, block)
        with fault("no such block, or no longer"):
            call("deallocate", kind, block)
            call("synchronize")


def test_a_block_is_freed_once_and_when_the_host_knows_that_it_may() -> None:
    in_one_rank(_blocks_freed)


def _pinned_memory(rank: int, size: int) -> None:
    side, event = make_stream(), make_event()
    target = torch.zeros(4)
    pinned = call_for(ctypes.c_void_p, "allocate", "pinned", 16)
    words = (ctypes.c_float * 4).from_address(pinned)
    words[:] = [1, 2, 3, 4]
    with fault("the host has changed the pinned source"), held():
        call("copy", target.data_ptr(), pinned, 16, side)
        words[0] = 5
    with fault("the host writes"), held():
        call("copy", target.data_ptr(), pinned, 16, side)
        call("touch", "host", 1, pinned, 16)
    record(event, side)
    until(lambda: is_complete(event))
    call("touch", "host", 1, pinned, 16)
    call("deallocate", "pinned", pinned)


def test_pinned_memory_stays_as_it_is_until_it_is_copied() -> None:
    in_one_rank(_pinned_memory)


def _handles(rank: int, size: int) -> None:
    side, event, one = make_stream(), make_event(), torch.ones(1)
    call("destroy_event", event)
    with fault("the event"):
        record(event, side)
    call("destroy_stream", side)
    with fault("has been destroyed"):
        launch(one, one, 1.0, side)
    with fault("is no stream"):
        launch(one, one, 1.0, 4711)


def test_handles_that_are_none_any_more_are_faults() -> None:
    in_one_rank(_handles)


def _a_fault_is_raised_until_it_is_taken(rank: int, size: int) -> None:
    one = torch.ones(1)
    with pytest.raises(RuntimeError, match="is no stream"):
        launch(one, one, 1.0, 4711)
    with pytest.raises(RuntimeError, match="is no stream"):
        make_event()


def test_a_fault_is_raised_by_every_call_and_fails_the_test_that_hides_it() -> None:
    pool = emulated_pool(1)
    with pytest.raises(RuntimeError, match="is no stream"):
        pool.run(_a_fault_is_raised_until_it_is_taken)


# Capture


def _a_graph(rank: int, size: int) -> list[float]:
    value, one, side, event = torch.zeros(8), torch.ones(8), make_stream(), make_event()
    graph = Graph()
    with graph.capture() as stream:
        launch(value, one, 1.0, stream)
        record(event, stream)
        wait(side, event)
        launch(value, one, 2.0, side)
        record(event, side)
        wait(stream, event)
        launch(value, one, 3.0, stream)
    assert value[0].item() == 0  # captured, not done
    results = []
    for _ in range(3):
        graph.replay()
        results.append(value[0].item())
    with fault("recorded in a capture that has ended"):
        wait(0, event)
    with fault("captured in a graph"):
        is_complete(event)
    return results


def test_a_graph_does_what_was_captured_each_time() -> None:
    expected, value = [], 0.0
    for _ in range(3):
        value = ((value + 1) * 2 + 1) * 3 + 1
        expected.append(value)
    assert in_one_rank(_a_graph) == expected


def _faults_of_capture(rank: int, size: int) -> None:
    value, one, side, event = torch.zeros(8), torch.ones(8), make_stream(), make_event()
    outside = make_event()
    record(outside, side)
    with fault("has not waited for what side"), Graph().capture() as stream:
        record(event, stream)
        wait(side, event)
        launch(value, one, 1.0, side)
    with Graph().capture() as stream:
        with fault("recorded outside of the capture"):
            wait(stream, outside)
        with fault("is_complete() while a stream is captured"):
            is_complete(outside)
        call("deallocate", "device", call_for(ctypes.c_void_p, "allocate", "device", 16))
    graph = Graph()
    with graph.capture() as stream:  # two branches that conflict: found when it runs
        record(event, stream)
        wait(side, event)
        launch(value, one, 1.0, side)
        launch(value, one, 1.0, stream)
        record(event, side)
        wait(stream, event)
    with fault("neither comes before the other"):
        graph.replay()
    dead = torch.zeros(8)
    graph = Graph()
    with graph.capture() as stream:
        launch(dead, one, 1.0, stream)
    graph.replay()
    del dead
    with fault("which was freed"):
        graph.replay()


def test_faults_of_capture() -> None:
    in_one_rank(_faults_of_capture)


# NCCL


def _values(rank: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    values = (torch.arange(count) * 7 + rank * 3) % 5 + 1
    return values.to(dtype)


def _collectives(rank: int, size: int, dtype: torch.dtype, count: int) -> None:
    comm = Nccl()
    inputs = [_values(r, dtype, count * size) for r in range(size)]
    mine = inputs[rank].clone()
    wide = torch.stack([each.to(torch.float64) for each in inputs])
    expected = {
        "sum": wide.sum(0),
        "prod": wide.prod(0),
        "max": wide.amax(0),
        "min": wide.amin(0),
        "avg": wide.mean(0),
    }
    for op, value in expected.items():
        want = value if dtype.is_floating_point else value.floor()
        out, part = torch.empty_like(mine), torch.empty(count, dtype=dtype)
        in_place = mine.clone()
        comm.follow()
        check(comm.all_reduce(mine, out, op))
        check(comm.all_reduce(in_place, in_place, op))
        check(comm.reduce_scatter(mine, part, op))
        comm.wait()
        tolerance = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(dtype, 1e-6)
        for got, wanted in (
            (out, want),
            (in_place, want),
            (part, want[rank * count : (rank + 1) * count]),
        ):
            torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=0)
    gathered = torch.empty(count * size * size, dtype=dtype)
    root = mine.clone()
    comm.follow()
    check(comm.all_gather(mine, gathered))
    check(comm.broadcast(root, size - 1))
    comm.wait()
    assert torch.equal(gathered, torch.cat(inputs))
    assert torch.equal(root, inputs[size - 1])
    comm.finish()


@pytest.mark.parametrize("dtype", list(DTYPES), ids=str)
def test_collectives_of_every_type(dtype: torch.dtype) -> None:
    emulated_pool(2).run(_collectives, dtype, 37)


@pytest.mark.parametrize("size", [1, 3, 4])
def test_collectives_of_more_ranks_and_several_chunks(size: int) -> None:
    emulated_pool(size).run(_collectives, torch.float32, 40_001)


def _scaled_sum(rank: int, size: int) -> None:
    comm = Nccl()
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        value = torch.full((5,), 60000.0 if dtype == torch.float16 else 3.0, dtype=dtype)
        expected = value.clone()  # the mean does not overflow where the sum would
        op = comm.pre_mul_sum(torch.tensor([1 / size], dtype=dtype))
        comm.follow()
        check(comm.all_reduce(value, value, op))
        comm.wait()
        assert torch.equal(value, expected)
        check(comm.library.ncclRedOpDestroy(op, comm.handle))
    with fault("no such reduction, or no longer"):
        check(comm.all_reduce(value, value, op))
    comm.finish()


def test_a_sum_may_multiply_first() -> None:
    emulated_pool(2).run(_scaled_sum)


def _messages(rank: int, size: int) -> None:
    comm = Nccl()
    after, before = (rank + 1) % size, (rank - 1) % size
    big, own = torch.full((100_003,), float(rank)), torch.arange(3.0)
    small = torch.full((3,), rank, dtype=torch.int64)
    got_big, got_small, got_own = torch.empty(100_003), torch.empty_like(small), torch.empty(3)
    comm.follow()
    comm.group_start()
    check(comm.send(big, after))
    check(comm.recv(got_big, before))
    check(comm.send(small, after))
    check(comm.recv(got_small, before))
    check(comm.recv(got_own, rank))
    check(comm.send(own, rank))
    check(comm.group_end())
    comm.wait()
    assert got_big.unique().tolist() == [before]
    assert got_small.tolist() == [before] * 3
    assert got_own.tolist() == [0, 1, 2]
    comm.finish()


def test_messages_in_a_group_meet_each_other() -> None:
    emulated_pool(3).run(_messages)


def _interleaved(rank: int, size: int) -> None:
    """Ranks use two communicators in opposite order, which streams of their own allow."""
    comms = [Nccl(), Nccl()]
    values = [torch.full((70_000,), float(rank + 1)), torch.full((70_000,), rank + 1.0)]
    for index in (0, 1) if rank == 0 else (1, 0):
        comms[index].follow()
        check(comms[index].all_reduce(values[index], values[index]))
    for comm, value in zip(comms, values, strict=True):
        comm.wait()
        assert value.unique().tolist() == [3]
    for comm in comms:
        comm.finish()


def test_communicators_do_not_hold_each_other_up() -> None:
    for seed in range(3):
        emulated_pool(2).run(_interleaved, seed=seed)


def _graph_of_nccl(rank: int, size: int) -> list[float]:
    comm, value, event = Nccl(), torch.full((9,), rank + 1.0), make_event()
    graph = Graph()
    with graph.capture() as stream:
        record(event, stream)
        wait(comm.stream, event)
        check(comm.all_reduce(value, value))
        record(event, comm.stream)
        wait(stream, event)
    results = []
    for _ in range(3):
        graph.replay()
        results.append(value[0].item())
    comm.finish()
    return results


def test_nccl_in_a_graph() -> None:
    assert emulated_pool(2).run(_graph_of_nccl) == [[3, 6, 12]] * 2


def _disagreements(rank: int, size: int, bug: str, text: str) -> None:
    comm, value = Nccl(), torch.ones(10)
    other = torch.ones(7)
    if rank == 1:
        plant(bug)
    with fault(text):
        check(comm.all_reduce(value, value))
        check(comm.all_reduce(other, other))
        comm.wait()
    comm.abort()


@pytest.mark.parametrize(
    ("bug", "text"),
    [
        ("wrong_count", "(rank 1 of 2): ncclAllReduce of 9 float32"),
        ("wrong_dtype", "ncclAllReduce of 10 int32, sum"),
        ("wrong_order", "ncclAllReduce of 7 float32, sum"),
    ],
)
def test_ranks_that_disagree_are_both_named(bug: str, text: str) -> None:
    emulated_pool(2).run(_disagreements, bug, text)


def _misuse(rank: int, size: int) -> None:
    comm, value = Nccl(), torch.ones(10)
    with fault("ncclGroupEnd() without ncclGroupStart()"):
        check(comm.group_end())
    comm.group_start()
    check(comm.all_reduce(value, value))
    with fault("has a group of NCCL's open"):
        comm.wait()
    check(comm.group_end())
    with fault("neither comes before the other"):  # two streams, and no order between them
        check(comm.all_reduce(value, value, stream=make_stream()))
    comm.group_start()
    check(comm.all_reduce(value, value))
    with fault("on two streams"):
        check(comm.all_reduce(value, value, stream=make_stream()))
        check(comm.group_end())
    comm.wait()
    comm.destroy()
    with fault("has been destroyed"):
        check(comm.all_reduce(value, value))
    with fault("has been destroyed"):
        check(comm.library.ncclCommDestroy(comm.handle))
    other = Nccl()
    other.abort()
    with fault("has been aborted"):
        other.async_error()


def test_misuse_of_nccl_is_a_fault() -> None:
    emulated_pool(1).run(_misuse)


def _nonblocking(rank: int, size: int) -> None:
    comm, value = Nccl(blocking=False), torch.full((10,), rank + 1.0)
    assert comm.init_result == IN_PROGRESS
    until(lambda: comm.async_error() == 0)
    comm.init_result = 0
    set_option("in_progress_polls", 3)
    comm.follow()
    assert comm.all_reduce(value, value) == IN_PROGRESS
    with fault("is still in progress"):
        comm.wait()
    assert [comm.async_error() for _ in range(4)] == [IN_PROGRESS] * 3 + [0]
    comm.wait()
    assert value[0].item() == 3
    assert comm.all_reduce(value, value) == IN_PROGRESS
    with fault("is in progress"):
        comm.all_reduce(value, value)
    until(lambda: comm.async_error() == 0)
    comm.wait()
    assert comm.library.ncclCommFinalize(comm.handle) == IN_PROGRESS
    until(lambda: comm.async_error() == 0)
    comm.destroy()


def test_calls_are_in_progress_until_they_have_been_polled() -> None:
    emulated_pool(2).run(_nonblocking)


def _first_message(rank: int, size: int) -> None:
    comm, value = Nccl(blocking=False), torch.full((5,), float(rank))
    until(lambda: comm.async_error() == 0)
    comm.follow()
    if rank == 0:
        assert comm.send(value, 1) == IN_PROGRESS
        assert comm.async_error() == IN_PROGRESS
        dist.barrier()
    else:
        dist.barrier()
        assert comm.recv(value, 0) in (0, IN_PROGRESS)
    until(lambda: comm.async_error() == 0)
    comm.wait()
    assert value.unique().tolist() == [0]
    if rank == 0:  # they are connected
        check(comm.send(value, 1))
        dist.barrier()
    else:
        dist.barrier()
        check(comm.recv(value, 0))
    comm.wait()
    comm.abort()


def test_the_first_message_of_two_ranks_takes_both() -> None:
    emulated_pool(2).run(_first_message)


def _absent(rank: int, size: int, how: str) -> None:
    comm, value = Nccl(blocking=False), torch.ones(10)
    until(lambda: comm.async_error() == 0)
    if how == "stuck" and rank == 1:
        set_option("nccl_stuck_after", 0)
    if how == "error" and rank == 1:
        set_option("async_error_after", 0)
    if how == "slow" and rank == 1:
        set_option("nccl_delay_s", 0.3)
    event = make_event()
    comm.follow()
    if how != "absent" or rank == 0:
        check(comm.all_reduce(value, value))
    record(event, comm.stream)
    if how == "slow":
        comm.wait()
        assert value[0].item() == size
        comm.init_result = 0
        comm.abort()
        return
    if how == "error" and rank == 1:
        assert comm.async_error() == 6  # ncclRemoteError
        with pytest.raises(NcclError, match="remote process exited"):
            check(comm.all_reduce(value, value))
    if rank == 0:
        time.sleep(0.2)
        assert not is_complete(event)
    comm.abort()
    until(lambda: is_complete(event))  # the streams go on


@pytest.mark.parametrize("how", ["absent", "stuck", "error", "slow"])
def test_a_peer_that_does_not_come_in_time_or_fails(how: str) -> None:
    emulated_pool(2).run(_absent, how)


def _in_vain(rank: int, size: int) -> None:
    comm, value = Nccl(), torch.ones(10)
    if rank == 0:
        set_option("stuck_after_s", 0.5)
        with fault("the host waits in vain for wait() for an event"):
            check(comm.all_reduce(value, value))
            comm.wait()
    comm.abort()


def test_a_wait_for_what_never_comes_ends_and_says_where_the_streams_are() -> None:
    emulated_pool(2).run(_in_vain)


def _versions(rank: int, size: int) -> tuple[int, list[bool]]:
    names = ("ncclMemAlloc", "ncclCommWindowRegister")
    version = ctypes.c_int()
    load().ncclGetVersion(ctypes.byref(version))
    return version.value, [hasattr(load(), name) for name in names]


def test_older_versions_lack_what_they_lacked() -> None:
    assert emulated_pool(1).run(_versions) == [(22807, [True, True])]
    assert emulated_pool(1, nccl="2.19").run(_versions) == [(21903, [True, False])]
    assert emulated_pool(1, nccl="2.18").run(_versions) == [(21805, [False, False])]
