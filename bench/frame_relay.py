"""Owns the process that carries Ethernet frames between TAP devices with a fixed delay.

A stand-in for netem, which not every kernel has: `python frame_relay.py DELAY_S TAP_FD...`. Ends at
the end of its standard input, where a byte is the number of a device whose frames vanish from then
on. Imports nothing but the standard library.
"""

import collections
import contextlib
import fcntl
import os
import select
import struct
import sys
import time

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
CHECKSUM_AND_TCP4 = 0x01 | 0x02
HEADER_NBYTES = 10  # virtio_net_hdr: lets a segment of 64 KiB pass as one frame
FRAME_NBYTES = HEADER_NBYTES + 14 + 2**16
DESTINATION = HEADER_NBYTES + 5  # the last byte of the destination's address is its device
BATCH = 32  # frames taken from one device before others are looked at


def open_tap(name: str) -> int:
    """Makes a TAP device in the caller's network namespace; it lives as long as the descriptor."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(fd, TUNSETOFFLOAD, CHECKSUM_AND_TCP4)
    return fd


class Relay:
    """Frames in flight, in the order in which they are due."""

    def __init__(self, delay_s: float, taps: list[int]) -> None:
        self._delay_s = delay_s
        self._taps = taps
        self._cut: set[int] = set()
        self._in_flight: collections.deque[tuple[float, int, bytes]] = collections.deque()

    def run(self) -> None:
        while True:
            wait_s = None
            if self._in_flight:
                wait_s = max(0.0, self._in_flight[0][0] - time.monotonic())
            ready = select.select([0, *self._taps], [], [], wait_s)[0]
            if 0 in ready and not self._obey():
                return
            for source, tap in enumerate(self._taps):
                if tap in ready:
                    self._take(source, tap)
            self._deliver()

    def _obey(self) -> bool:
        numbers = os.read(0, 64)
        self._cut.update(numbers)
        return bool(numbers)

    def _take(self, source: int, tap: int) -> None:
        for _ in range(BATCH):
            try:
                frame = os.read(tap, FRAME_NBYTES)
            except BlockingIOError:
                return
            if source not in self._cut:
                self._in_flight.append((time.monotonic() + self._delay_s, source, frame))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._in_flight and self._in_flight[0][0] <= now:
            _, source, frame = self._in_flight.popleft()
            wanted = frame[DESTINATION]
            everybody = frame[HEADER_NBYTES] & 1  # broadcast: who has that address?
            for index, tap in enumerate(self._taps):
                if index != source and (everybody or index == wanted) and index not in self._cut:
                    # A full queue, or a device that is down, loses the frame.
                    with contextlib.suppress(OSError):
                        os.write(tap, frame)


if __name__ == "__main__":
    Relay(float(sys.argv[1]), [int(fd) for fd in sys.argv[2:]]).run()
