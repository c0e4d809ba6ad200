"""Owns the tests of bench/network.py: hosts reach each other, as late and as slowly as asked, and
nothing is left of them."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.network import Network, kernel_can_delay
from hosts import skip_unless_root

ROOT = Path(__file__).parents[1]
PORT = 5000
KINDS = ["", "relay"] + (["netem"] if os.geteuid() == 0 and kernel_can_delay() else [])


@pytest.fixture(autouse=True)
def _root() -> None:
    skip_unless_root()


@contextmanager
def connection(network: Network, source: int, target: int) -> Iterator[list[socket.socket]]:
    """Two ends of a TCP connection between hosts."""
    address = (network.hosts[target].address, PORT)
    with network.hosts[target].namespace.call(lambda: socket.create_server(address)) as server:
        near = network.hosts[source].namespace.call(lambda: socket.create_connection(address, 10))
        far, _ = server.accept()
    with near, far:
        for end in (near, far):
            end.settimeout(10)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield [near, far]


def received(end: socket.socket, count: int) -> bytes:
    parts = []
    while count > 0:
        parts.append(end.recv(count))
        assert parts[-1], "the connection was closed"
        count -= len(parts[-1])
    return b"".join(parts)


def exchange_s(ends: list[socket.socket]) -> float:
    start = time.monotonic()
    ends[0].sendall(b"?")
    assert received(ends[1], 1) == b"?"
    ends[1].sendall(b"!")
    assert received(ends[0], 1) == b"!"
    return time.monotonic() - start


@pytest.mark.parametrize("delay_by", KINDS)
def test_hosts_reach_each_other_and_nobody_else(delay_by: str) -> None:
    delay_s = 0.01 if delay_by else 0.0
    with Network(3, delay_s=delay_s, delay_by=delay_by) as network:
        for source, target in ((0, 1), (2, 1), (0, 2)):
            with connection(network, source, target) as ends:
                assert exchange_s(ends) > 2 * delay_s
        with pytest.raises(OSError, match="refused"):  # the hosts are not where pytest is
            socket.create_connection(("127.0.0.1", PORT), 1)


@pytest.mark.parametrize("delay_by", KINDS)
def test_bytes_of_a_link_are_counted_and_limited(delay_by: str) -> None:
    rate, nbytes = 4e8, 5_000_000
    delay_s = 0.001 if delay_by else 0.0
    with Network(2, rate, delay_s, delay_by) as network, connection(network, 0, 1) as ends:
        exchange_s(ends)
        before = network.sent_nbytes()
        start = time.monotonic()
        payload = os.urandom(1000) * (nbytes // 1000)
        with ThreadPoolExecutor(1) as sender:
            sender.submit(ends[0].sendall, payload)
            assert received(ends[1], nbytes) == payload
        seconds = time.monotonic() - start
        counts = [after - b for after, b in zip(network.sent_nbytes(), before, strict=True)]
        assert nbytes <= counts[0] < 1.05 * nbytes
        assert counts[1] < 0.05 * nbytes
        assert seconds > 0.8 * nbytes * 8 / rate, "the limit does not limit"


@pytest.mark.parametrize("delay_by", KINDS)
def test_a_cut_link_is_silent(delay_by: str) -> None:
    delay_s = 0.002 if delay_by else 0.0
    with Network(3, delay_s=delay_s, delay_by=delay_by) as network:
        with connection(network, 0, 1) as ends:
            exchange_s(ends)
            network.cut(1)
            time.sleep(0.05)
            ends[0].sendall(b"?")
            ends[1].settimeout(0.3)
            with pytest.raises(TimeoutError):
                ends[1].recv(1)
        with connection(network, 0, 2) as ends:  # the others go on
            exchange_s(ends)


KILLED = """
import os, signal, sys
from bench.network import Network
network = Network(2, 1e9, 0.001, "relay")
print(network._relay.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_is_left_of_a_network_whose_process_is_killed() -> None:
    command = [sys.executable, "-c", KILLED]
    killed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert killed.returncode == -9, killed.stderr
    relay = int(killed.stdout)
    deadline = time.monotonic() + 5
    while Path(f"/proc/{relay}").exists() and "Z" not in Path(f"/proc/{relay}/stat").read_text():
        assert time.monotonic() < deadline, "the relay goes on"
        time.sleep(0.02)


def test_a_network_that_cannot_be_made_says_why() -> None:
    with Network(1) as network, pytest.raises(OSError, match=r"`ip link add .*` failed"):
        network.hosts[0].namespace.run("ip link add nothing type nonsense")
