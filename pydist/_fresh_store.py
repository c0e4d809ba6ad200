"""Owns how ranks agree on keys of a store that nobody has used, whatever the store holds already.

Keys outlive groups, names of groups come again, and a launcher that starts ranks anew may give them
the store in which dead ones have left their addresses, as torchrun does. Counting would count the
dead, so everybody draws a number instead, and rank 0 answers to those of the living:

    rank 1: hello/1 = n    waits for reply/n                   token/t/1 = here     goes on with t
    rank 0:                reads hello/1 = n; reply/n = t      waits for token/t/1
"""

import secrets
import time
from collections.abc import Callable

from torch._C._distributed_c10d import PrefixStore, Store

from pydist.errors import TimeoutError

_MIN_PAUSE_S, _MAX_PAUSE_S = 100e-6, 20e-3


def fresh_store(store: Store, rank: int, size: int, timeout_s: float, group: str) -> PrefixStore:
    """The same new part of `store` for all ranks; `group` describes theirs. Collective."""

    def late(peer: int) -> str:
        return (
            f"rank {rank} waited {timeout_s:g} s for rank {peer} to join {readable_name(group)}; "
            "is it running, and does it make the same calls?"
        )

    meeting = PrefixStore("pydist/meeting", store)
    token = secrets.token_hex(16)
    deadline_s = time.monotonic() + timeout_s
    if rank == 0:
        for peer in range(1, size):
            guest = _Guest(meeting, token, peer)
            _poll(guest.has_token, deadline_s, late(peer))
    else:
        reply = f"reply/{token}"
        meeting.set(f"hello/{rank}", token)
        _poll(lambda: meeting.check([reply]), deadline_s, late(0))
        token = meeting.get(reply).decode()
        meeting.set(f"token/{token}/{rank}", "here")
    return PrefixStore(f"pydist/{token}", store)


def readable_name(description: str) -> str:
    """Of a group, by torch's description of it."""
    return "the default group" if description == "default_pg" else f"group {description!r}"


class _Guest:
    """A peer as rank 0 sees it, until it has the token."""

    def __init__(self, meeting: PrefixStore, token: str, peer: int) -> None:
        self._meeting = meeting
        self._token = token
        self._hello = f"hello/{peer}"
        self._here = f"token/{token}/{peer}"
        self._answered = ""

    def has_token(self) -> bool:
        """Answers to what the peer says last, which before it comes is what a dead one said."""
        heard = (
            self._meeting.get(self._hello).decode() if self._meeting.check([self._hello]) else ""
        )
        # Looked at after the hello: that of the peer's next meeting comes after it has this token,
        # and must not be answered with it.
        if self._meeting.check([self._here]):
            return True
        if heard != self._answered:
            self._meeting.set(f"reply/{heard}", self._token)
            self._answered = heard
        return False


def _poll(done: Callable[[], bool], deadline_s: float, late: str) -> None:
    """In steps, for a blocking wait of the store would not let signals through."""
    pause_s = _MIN_PAUSE_S
    while not done():
        if time.monotonic() > deadline_s:
            raise TimeoutError(late)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _MAX_PAUSE_S)
