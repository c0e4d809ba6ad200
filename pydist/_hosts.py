"""Owns how the ranks of a group find out which of them share a host, and how they are connected
where there are several: shared memory within each, groups with Gloo between them."""

import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from pydist import _C
from pydist._torch_groups import own_gloo_group
from pydist.errors import HostError, PeerError, TimeoutError

_REMEDY = "make a new group, or restart the job"
_CLUE = "what did it print last?"
_NO_LIMIT = timedelta(days=365)
_LAST_WORDS_S = 2.0  # for what the other ranks have to say, once this one knows that it failed


@dataclass(frozen=True)
class Place:
    """Where a rank runs. Ranks may share memory if all of `identity` is the same."""

    identity: dict[str, str]
    host_name: str
    pid: int

    @classmethod
    def mine(cls) -> "Place":
        """PYDIST_HOST can take ranks of one machine apart; it brings no others together."""
        name = os.environ.get("PYDIST_HOST", "")
        identity = {
            "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            "network namespace": Path("/proc/self/ns/net").readlink().name,
            "user": str(os.getuid()),
            "PYDIST_HOST": name,
        }
        return cls(identity, name or socket.gethostname(), os.getpid())

    def encode(self) -> str:
        return json.dumps([self.identity, self.host_name, self.pid])

    @classmethod
    def decode(cls, text: bytes) -> "Place":
        return cls(*json.loads(text))


@dataclass(frozen=True)
class Group:
    """Who is to be connected, and what messages call it."""

    store_prefix: Callable[[str], PrefixStore]  # of fresh keys, by name
    rank: int
    size: int
    timeout_s: float
    name: str
    global_ranks: list[int]

    def bare_name(self, rank: int) -> str:
        """Of a rank that nothing else is known of."""
        text = f"rank {rank}"
        is_global = not self.global_ranks or self.global_ranks[rank] == rank
        return text if is_global else f"{text} (global rank {self.global_ranks[rank]})"


class Hosts:
    """The ranks by host, hosts in the order of their first ranks."""

    def __init__(self, group: Group, places: list[Place]) -> None:
        self._group = group
        self._places = places
        by_identity: dict[tuple[str, ...], list[int]] = {}
        for rank, place in enumerate(places):
            by_identity.setdefault(tuple(place.identity.values()), []).append(rank)
        self.ranks = list(by_identity.values())
        self.host_of = {rank: h for h, ranks in enumerate(self.ranks) for rank in ranks}
        first = [places[ranks[0]].host_name for ranks in self.ranks]
        self.names = [
            name if first.count(name) == 1 else f"{name} #{h}" for h, name in enumerate(first)
        ]

    @property
    def num_lanes(self) -> int:
        return min(map(len, self.ranks))

    def lane(self) -> list[int] | None:
        """The ranks with this one's index on their hosts; None where some host has none."""
        rank = self._group.rank
        index = self.ranks[self.host_of[rank]].index(rank)
        return [ranks[index] for ranks in self.ranks] if index < self.num_lanes else None

    def describe(self, rank: int) -> str:
        text = f"pid {self._places[rank].pid}, host {self.names[self.host_of[rank]]}"
        is_global = not self._group.global_ranks or self._group.global_ranks[rank] == rank
        prefix = "" if is_global else f"global rank {self._group.global_ranks[rank]}, "
        return f"rank {rank} ({prefix}{text})"

    def why_several(self) -> str:
        """Two ranks on different hosts, and what tells them apart."""
        one, other = self.ranks[0][0], self.ranks[1][0]
        places = (self._places[one].identity, self._places[other].identity)
        which = next(key for key in places[0] if places[0][key] != places[1][key])
        return (
            f"{self.describe(one)} and {self.describe(other)} do not share memory: {which} "
            f"{places[0][which]!r} and {places[1][which]!r}"
        )


def find_hosts(group: Group) -> Hosts:
    """Collective."""
    meeting = _Meeting(group, group.store_prefix("places"))
    texts = meeting.exchange("place", Place.mine().encode())
    return Hosts(group, [Place.decode(text) for text in texts])


def connect_hosts(
    group: Group,
    hosts: Hosts,
    remedy: str = _REMEDY,
    clue: str = _CLUE,
    only_sums: bool = False,
) -> _C.Communicator:
    """Collective. Raises HostError on all ranks where those of one host share no memory."""
    meeting = _Meeting(group, group.store_prefix("hosts"), hosts)
    with_lane, with_all = group.store_prefix("lane"), group.store_prefix("flat")
    watched = group.store_prefix("watch")
    own = group.store_prefix("local")
    with meeting.everybody("shares memory"):
        maker = _C.HostsMaker(
            store=PrefixStore(str(hosts.host_of[group.rank]), own),
            rank=group.rank,
            hosts=hosts.ranks,
            timeout_s=group.timeout_s,
            name=group.name,
            ranks=[hosts.describe(rank) for rank in range(group.size)],
            host_names=hosts.names,
            remedy=remedy,
            clue=clue,
        )
    lane = flat = None
    with meeting.everybody("is connected"):
        members = hosts.lane()
        if members is not None:
            lane = _gloo(group, PrefixStore(str(members[0]), with_lane), members)
        if not only_sums:
            flat = _gloo(group, with_all, range(group.size))
    return maker.make(store=watched, lane=lane, flat=flat)


def _gloo(group: Group, store: PrefixStore, members: Sequence[int]) -> dist.ProcessGroup:
    own = own_gloo_group(store, members.index(group.rank), len(members), group.timeout_s)
    # The communicator, whose limit may change, has more to say about who does not come.
    own._get_backend(torch.device("cpu"))._set_default_timeout(_NO_LIMIT)
    return own


class _Meeting:
    """What all ranks tell each other through the Store while they are not connected."""

    def __init__(self, group: Group, store: PrefixStore, hosts: Hosts | None = None) -> None:
        self._group = group
        self._store = store
        self._describe = group.bare_name if hosts is None else hosts.describe
        self._doing = ""
        self._deadline_s = time.monotonic() + group.timeout_s

    def exchange(self, key: str, mine: str) -> list[bytes]:
        """Everybody's text, by rank."""
        self._store.set(f"{key}/{self._group.rank}", mine)
        missing = self._await(key, self._deadline_s)
        if missing:
            raise TimeoutError(
                f"{self._describe(self._group.rank)} waited {self._group.timeout_s} s for "
                f"{self._names(missing)} to join {self._group.name}; is every rank running, and "
                "does it make the same calls?"
            )
        keys = [f"{key}/{rank}" for rank in range(self._group.size)]
        return [bytes(value) for value in self._store.multi_get(keys)]

    def _await(self, key: str, deadline_s: float) -> list[int]:
        """The ranks that have said nothing by then."""
        keys = [f"{key}/{rank}" for rank in range(self._group.size)]
        pause_s = 100e-6
        while not self._store.check(keys):
            if time.monotonic() > deadline_s:
                return [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 20e-3)
        return []

    def _names(self, ranks: list[int]) -> str:
        return ", ".join(map(self._describe, ranks))

    def everybody(self, does: str) -> "_Meeting":
        """A block that may raise on some ranks; then all raise."""
        self._doing = does
        return self

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        key = self._doing
        if error is None:
            self._raise_others(self.exchange(key, ""))
            return
        is_first = self._tell(key, error)
        says_why = isinstance(error, HostError | TimeoutError | PeerError)
        if says_why or not isinstance(error, Exception):
            return
        has_waited = time.monotonic() >= self._deadline_s
        cause = self._find_cause(key) if has_waited or not is_first else ""
        raise PeerError(
            f"{self._describe(self._group.rank)} could not connect to the other hosts of "
            f"{self._group.name}{cause}: {error}"
        ) from error

    def _tell(self, key: str, error: BaseException) -> bool:
        """True if no other rank has failed before."""
        mark = "host" if isinstance(error, HostError) else "other"
        self._store.set(f"{key}/{self._group.rank}", f"{mark} {type(error).__name__}: {error}")
        is_first = self._store.add(f"{key}/failures", 1) == 1
        if is_first:
            self._store.set(f"{key}/first", str(self._group.rank))
        return is_first

    def _find_cause(self, key: str) -> str:
        """Who has not come, or failed first."""
        missing = self._await(key, time.monotonic() + _LAST_WORDS_S)
        if missing:
            return f" ({self._names(missing)} did not come)"
        return f" ({self._describe(int(self._store.get(f'{key}/first')))} failed first)"

    def _raise_others(self, texts: list[bytes]) -> None:
        for rank, text in enumerate(texts):
            mark, _, why = text.decode().partition(" ")
            if mark == "host":
                raise HostError(f"{self._describe(rank)} shares no memory on its host: {why}")
            if mark:
                raise PeerError(
                    f"{self._describe(rank)} failed while {self._group.name} was made: {why}"
                )
