"""Owns what the backend "pydist" does when calls are wrong, ranks disagree, come late or die, and
when pydist cannot be loaded."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pydist
from ranks import get_pool, start_ranks

ROOT = Path(__file__).parents[1]


def check_still_usable(world_size: int) -> None:
    tensor = torch.ones(5)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [float(world_size)] * 5


def wrong_everywhere(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    one = torch.ones(4)
    wrong: list[tuple[str, Callable[[], Any]]] = [
        ("invalid root rank", lambda: group.broadcast(one, root=world_size)),
        ("single-element tensor list", lambda: group.allreduce([one, one])),
        ("incorrect output list size", lambda: group.allgather([[one]], [one])),
        ("invalid tensor type", lambda: group.allgather([[one, one.double()]], [one])),
        ("invalid tensor size", lambda: group.allgather([[one[:2], one[:2]]], [one])),
        ("times input tensor size", lambda: dist.all_gather_into_tensor(one, one)),
        ("output size times world size", lambda: dist.reduce_scatter_tensor(one, one)),
        ("divide equally", lambda: dist.all_to_all_single(one[:3], one[:3])),
        ("total dim 0", lambda: dist.all_to_all_single(one, one, [1, 1], [1, 1])),
        ("mean of integers", lambda: dist.all_reduce(one.long(), dist.ReduceOp.AVG)),
        (r"\(bitwise and\)", lambda: dist.all_reduce(one, dist.ReduceOp.BAND)),
    ]
    for text, call in wrong:
        with pytest.raises(pydist.UsageError, match=text):
            call()
        check_still_usable(world_size)


def test_wrong_calls() -> None:
    get_pool(2, backend="pydist").run(wrong_everywhere)


def waited_for(work: Any) -> None:
    if work is not None:
        work.wait()


def disagree(rank: int, world_size: int) -> None:
    odd_one = rank == 1
    tensor = torch.arange(12.0)
    calls: list[Callable[[bool], Any]] = [
        lambda wait: dist.all_reduce(tensor[: 10 if odd_one else 12], async_op=wait),
        lambda wait: dist.broadcast(tensor, 1 if odd_one else 0, async_op=wait),
        lambda wait: (
            dist.barrier(async_op=wait) if odd_one else dist.all_reduce(tensor, async_op=wait)
        ),
    ]
    for call in calls:
        for wait in (False, True):
            with pytest.raises(pydist.MismatchError, match=r"rank 0.*rank 1"):
                waited_for(call(wait))
            check_still_usable(world_size)
    # What is wrong on one rank alone its peers learn too.
    if odd_one:
        with pytest.raises(pydist.UsageError, match="mean of integers"):
            dist.all_reduce(torch.ones(3, dtype=torch.int64), dist.ReduceOp.AVG)
    else:
        with pytest.raises(pydist.MismatchError, match="rank 1"):
            dist.all_reduce(torch.ones(3))
    check_still_usable(world_size)


def test_disagreement() -> None:
    get_pool(2, backend="pydist").run(disagree)


def fail_in_future(rank: int, world_size: int) -> None:
    work = dist.all_reduce(torch.ones(3 + rank), async_op=True)
    future = work.get_future()
    with pytest.raises(RuntimeError, match="rank 1"):
        future.wait()
    with pytest.raises(pydist.MismatchError, match="rank 1"):
        work.wait()
    assert work.is_completed()
    assert not work.is_success()
    with pytest.raises(RuntimeError, match="rank 1"):
        work.get_future().value()
    check_still_usable(world_size)


def test_errors_of_futures() -> None:
    get_pool(2, backend="pydist").run(fail_in_future)


# -- time ------------------------------------------------------------------------------------------


def come_late(rank: int, world_size: int, per_call: bool) -> str:
    dist.barrier()
    if rank == 1:
        time.sleep(3)
        return ""
    began = time.monotonic()
    group = dist.group.WORLD
    assert group is not None
    options = dist.AllreduceOptions()
    options.asyncOp = False
    if per_call:
        options.timeout = timedelta(seconds=1)
    with pytest.raises(pydist.TimeoutError) as raised:
        group.allreduce([torch.ones(3)], options)
    assert 0.5 < time.monotonic() - began < 2.5
    return str(raised.value)


@pytest.mark.parametrize("per_call", [False, True])
def test_timeout_names_the_missing_rank(per_call: bool) -> None:
    limit = 30.0 if per_call else 1.0
    outcomes = start_ranks(2, come_late, per_call, backend="pydist", group_timeout_s=limit).join()
    assert outcomes[0].ok, outcomes[0].traceback
    assert "1 s for rank 1" in outcomes[0].value
    assert "all_reduce(sum) of 3 float32" in outcomes[0].value


def wait_for_a_while(rank: int, world_size: int) -> None:
    if rank == 0:
        work = dist.all_reduce(torch.ones(3), async_op=True)
        with pytest.raises(pydist.TimeoutError, match=r"waited 0.2 s for all_reduce"):
            work.wait(timedelta(seconds=0.2))
        request = dist.irecv(torch.ones(3), 1)
        with pytest.raises(pydist.TimeoutError, match="recv"):
            request.wait(timedelta(seconds=0.2))
        dist.send(torch.ones(1), 1, tag=9)
        work.wait()  # it went on
        request.wait()
    else:
        dist.recv(torch.ones(1), 0, tag=9)
        dist.all_reduce(torch.ones(3))
        dist.send(torch.ones(3), 0)
    check_still_usable(world_size)


def test_a_limit_of_a_wait_leaves_the_operation() -> None:
    get_pool(2, backend="pydist").run(wait_for_a_while)


def monitored(rank: int, world_size: int) -> str:
    group = dist.group.WORLD
    assert group is not None
    if rank == 0:
        with pytest.raises(pydist.TimeoutError) as raised:
            group.monitored_barrier(timedelta(seconds=0.5), wait_all_ranks=True)
        text = str(raised.value)
    else:
        text = ""
    dist.barrier()
    check_still_usable(world_size)
    return text


def test_monitored_barrier_names_the_missing_ranks() -> None:
    outcomes = start_ranks(3, monitored, backend="pydist").join()
    assert all(outcome.ok for outcome in outcomes), [o.traceback for o in outcomes]
    assert re.search(r"rank 1 \(pid \d+\), rank 2", outcomes[0].value)


# -- death -----------------------------------------------------------------------------------------


WAYS: dict[str, Callable[[torch.Tensor], Any]] = {
    "sync": dist.all_reduce,
    "async": lambda tensor: waited_for(dist.all_reduce(tensor, async_op=True)),
    "recv": lambda tensor: waited_for(dist.irecv(tensor, 1)),
}


def die(rank: int, world_size: int, way: str) -> str:
    tensor = torch.ones(200_000)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(pydist.PeerError) as raised:
        WAYS[way](tensor)
    return str(raised.value)


@pytest.mark.parametrize("way", list(WAYS))
def test_a_killed_rank_is_named(way: str) -> None:
    running = start_ranks(3, die, way, backend="pydist")
    pid = running.pids[1]
    outcomes = running.join()
    for survivor in (0, 2):
        assert outcomes[survivor].ok, outcomes[survivor].traceback
        assert f"rank 1 (pid {pid}" in outcomes[survivor].value
        assert outcomes[survivor].seconds < 10


def abort(rank: int, world_size: int) -> None:
    group = dist.new_group()
    dist.barrier(group=group)
    if rank == 1:
        time.sleep(0.3)
        assert group is not None
        group.abort()
        check_still_usable(world_size)
        return
    with pytest.raises(pydist.PeerError, match=r"rank 1.*aborted"):
        dist.all_reduce(torch.ones(3), group=group)
    check_still_usable(world_size)


def test_abort() -> None:
    get_pool(2, backend="pydist").run(abort)


def interrupt(rank: int, world_size: int) -> None:
    dist.barrier()
    if rank == 1:
        with pytest.raises(pydist.PeerError, match=r"rank 0.*interrupted"):
            dist.recv(torch.ones(3), 0)
        return
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        dist.all_reduce(torch.ones(3))


def test_interrupt() -> None:
    outcomes = start_ranks(2, interrupt, backend="pydist").join()
    assert all(outcome.ok for outcome in outcomes), [o.traceback for o in outcomes]


# -- loading ---------------------------------------------------------------------------------------

START = """
import torch, torch.distributed as dist
store = dist.HashStore()
try:
    dist.init_process_group({backend!r}, store=store, rank=0, world_size=1)
    dist.all_reduce(torch.ones(1))
    print("works")
    dist.destroy_process_group()
except Exception as error:
    print(type(error).__name__, error)
"""


def in_a_fresh_interpreter(code: str, folder: Path = ROOT, **environment: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return run.stdout


@pytest.mark.parametrize("backend", ["pydist", "cpu:pydist", "cpu:pydist,cuda:gloo"])
def test_no_import_is_needed(backend: str) -> None:
    assert in_a_fresh_interpreter(START.format(backend=backend)).strip() == "works"


LOADING = """
import sys, time, torch
before = set(sys.modules)
started = time.perf_counter()
import pydist_backend
pydist_backend.autoload()
print(time.perf_counter() - started, *(set(sys.modules) - before))
"""


def test_loading_costs_nothing_of_note() -> None:
    found = in_a_fresh_interpreter(LOADING, TORCH_DEVICE_BACKEND_AUTOLOAD="0").split()
    assert float(found[0]) < 0.02
    assert found[1:] == ["pydist_backend"]


def test_a_broken_extension_is_told_of_when_a_group_is_made(tmp_path: Path) -> None:
    """torch can be imported all the same."""
    copy = tmp_path / "pydist"
    copy.mkdir()
    for path in (ROOT / "pydist").iterdir():
        if path.suffix in {".py", ".so"} and path.name != "_build_info.py":
            (copy / path.name).symlink_to(path)
    (copy / "_build_info.py").write_text('TORCH_VERSION = "1.2.3"\n')
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", str(ROOT))])
    found = in_a_fresh_interpreter(START.format(backend="pydist"), tmp_path, PYTHONPATH=path)
    assert found.startswith("ImportError pydist was built for torch 1.2.3 but found torch")
