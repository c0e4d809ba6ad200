"""Owns networks of hosts on one machine: network stacks, the links between them, and their limits.

A host is a network namespace of Linux, which has devices, addresses and connections of its own.
Namespaces, devices and rules here have no name outside of this process and are held by its file
descriptors alone, so that nothing is left behind however the process ends:

    host 0 (eth0) ----\
    host 1 (eth0) ----- switch: a bridge, or a process that delays frames
    host 2 (eth0) ----/

Needs root, and `ip` and `tc` of iproute2.
"""

import contextlib
import ctypes
import functools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from bench.frame_relay import open_tap

T = TypeVar("T")

CLONE_NEWNET = 0x40000000
DEVICE = "eth0"  # every host's only one but "lo"
# As many bytes as one segment that the kernel hands down whole; fewer make tbf split it.
BURST_NBYTES = 64 * 2**10
QUEUE_S = 0.02  # what a link's queue holds before it drops


def enter(namespace: str) -> None:
    """Moves the calling thread (of a process with no other: the process) into a namespace."""
    with open(namespace, "rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")


def _in_thread(function: Callable[[], T]) -> T:
    """A namespace belongs to a thread, so that one that ends changes nothing for the others."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


class Namespace:
    """A network stack of its own."""

    def __init__(self) -> None:
        self._fd: int = _in_thread(_new_namespace)
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        self.call(_configure)

    def call(self, function: Callable[[], T]) -> T:
        """Runs function() in there: what it starts, opens or reads is the namespace's."""

        def run() -> T:
            enter(self.path)
            return function()

        return _in_thread(run)

    def run(self, *commands: str) -> None:
        """Shell words for `ip` or `tc`, one command a string."""
        for command in commands:
            self.call(functools.partial(_run, command))

    def close(self) -> None:
        os.close(self._fd)


def _new_namespace() -> int:
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "cannot make a network namespace, which takes root")
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _configure() -> None:
    """No stray packets that would count as traffic, and the commonest congestion control."""
    settings = {"ipv6/conf/all/disable_ipv6": "1", "ipv6/conf/default/disable_ipv6": "1"}
    settings["ipv4/tcp_congestion_control"] = "cubic"
    for name, value in settings.items():
        with contextlib.suppress(OSError):  # a kernel without it
            Path("/proc/sys/net", name).write_text(value)
    _run("ip link set lo up")


def _run(command: str) -> str:
    try:
        done = subprocess.run(
            command.split(), capture_output=True, text=True, timeout=30, check=False
        )
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"`{command.split()[0]}` is missing: install iproute2 (apt-get install iproute2)"
        ) from error
    if done.returncode != 0:
        raise OSError(f"`{command}` failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


@functools.cache
def kernel_can_delay() -> bool:
    """Whether links are delayed by netem; else it is done by frame_relay.py."""
    probe = Namespace()
    try:
        probe.run("tc qdisc add dev lo root netem delay 1ms")
    except OSError:
        return False
    finally:
        probe.close()
    return True


@dataclass
class Host:
    """One host of a network."""

    index: int
    address: str
    namespace: Namespace

    def counters(self) -> dict[str, int]:
        """Of its link, since the start: bytes with all headers, and packets, by direction."""
        found = self.namespace.call(lambda: _run(f"ip -json -stats link show dev {DEVICE}"))
        stats = json.loads(found)[0]["stats64"]
        return {
            "sent_nbytes": stats["tx"]["bytes"],
            "received_nbytes": stats["rx"]["bytes"],
            "sent_packets": stats["tx"]["packets"],
            "received_packets": stats["rx"]["packets"],
        }


class Network:
    """Hosts behind one switch. `rate_bit_per_s` holds for each direction of each host's link,
    `delay_s` for every frame on its way from a host to another."""

    def __init__(
        self,
        num_hosts: int,
        rate_bit_per_s: float | None = None,
        delay_s: float = 0.0,
        delay_by: str = "",
    ) -> None:
        self.delay_by = ""
        if delay_s > 0:
            self.delay_by = delay_by or ("netem" if kernel_can_delay() else "relay")
        self._relay: subprocess.Popen[bytes] | None = None
        self._switch: Namespace | None = None
        self.hosts: list[Host] = []
        try:
            self._build(num_hosts, delay_s)
            if rate_bit_per_s is not None:
                self.limit(rate_bit_per_s)
        except BaseException:
            self.close()
            raise

    def _build(self, num_hosts: int, delay_s: float) -> None:
        for index in range(num_hosts):
            self.hosts.append(Host(index, f"10.0.0.{index + 1}", Namespace()))
        if self.delay_by == "relay":
            self._start_relay(delay_s)
        else:
            self._start_bridge(delay_s)
        for host in self.hosts:
            mac = f"02:00:00:00:00:{host.index:02x}"  # the relay knows a host by its last byte
            host.namespace.run(
                f"ip link set {DEVICE} address {mac} txqueuelen 10000",
                f"ip address add {host.address}/24 dev {DEVICE}",
                f"ip link set {DEVICE} up",
            )

    def _start_bridge(self, delay_s: float) -> None:
        self._switch = Namespace()
        self._switch.run("ip link add bridge0 type bridge", "ip link set bridge0 up")
        for host in self.hosts:
            port = _port(host.index)
            self._switch.run(
                f"ip link add {port} type veth peer name {DEVICE} netns {host.namespace.path}",
                f"ip link set {port} master bridge0 up",
            )
            if delay_s > 0:
                delay_us = int(delay_s * 1e6)
                self._switch.run(
                    f"tc qdisc add dev {port} root netem delay {delay_us}us limit 100000"
                )

    def _start_relay(self, delay_s: float) -> None:
        taps = [host.namespace.call(lambda: open_tap(DEVICE)) for host in self.hosts]
        script = Path(__file__).with_name("frame_relay.py")
        command = [sys.executable, str(script), str(delay_s), *map(str, taps)]
        self._relay = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=taps)
        for tap in taps:
            os.close(tap)

    def limit(self, rate_bit_per_s: float) -> None:
        """From now on; headers count. What one host receives from several may add up to more."""
        queue_nbytes = max(4 * BURST_NBYTES, int(rate_bit_per_s / 8 * QUEUE_S))
        for host in self.hosts:
            host.namespace.run(
                f"tc qdisc replace dev {DEVICE} root tbf rate {rate_bit_per_s:.0f}bit "
                f"burst {max(BURST_NBYTES, int(rate_bit_per_s / 8 / 1000))} limit {queue_nbytes}"
            )

    def cut(self, index: int) -> None:
        """Takes a host's plug out of the switch: frames vanish, and neither side is told."""
        if self._relay is not None:
            assert self._relay.stdin is not None
            self._relay.stdin.write(bytes([index]))
            self._relay.stdin.flush()
        else:
            assert self._switch is not None
            self._switch.run(f"ip link set {_port(index)} nomaster")

    def sent_nbytes(self) -> list[int]:
        """What each host has sent to others so far."""
        return [host.counters()["sent_nbytes"] for host in self.hosts]

    def close(self) -> None:
        """Its processes must have ended: namespaces live as long as anything in them does."""
        if self._relay is not None:
            assert self._relay.stdin is not None
            self._relay.stdin.close()  # which ends it
            self._relay.wait(10)
        for namespace in [host.namespace for host in self.hosts] + [self._switch]:
            if namespace is not None:
                namespace.close()
        self.hosts, self._relay, self._switch = [], None, None

    def __enter__(self) -> "Network":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _port(index: int) -> str:
    return f"port{index}"


@dataclass
class Place:
    """Where one rank runs, and what torchrun would tell it."""

    host: Host
    variables: dict[str, str]


def places(network: Network, layout: Sequence[int], port: int) -> list[Place]:
    """By rank, host by host; layout[i] is the number of ranks on host i."""
    found: list[Place] = []
    for host, num_ranks in zip(network.hosts, layout, strict=True):
        for local in range(num_ranks):
            variables = {
                "RANK": str(len(found)),
                "LOCAL_RANK": str(local),
                "WORLD_SIZE": str(sum(layout)),
                "LOCAL_WORLD_SIZE": str(num_ranks),
                "GROUP_RANK": str(host.index),
                "MASTER_ADDR": network.hosts[0].address,
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": DEVICE,
            }
            found.append(Place(host, variables))
    return found
