"""Owns how the ranks of a group find each other: which of them share memory, and what they get."""

import os
from collections.abc import Callable

from torch._C._distributed_c10d import PrefixStore

from pydist import _C
from pydist._hosts import Group, connect_hosts, find_hosts
from pydist.errors import HostError, UsageError

TRANSPORTS = ("shared_memory", "process_group")


def connect(
    store_prefix: Callable[[str], PrefixStore],
    rank: int,
    size: int,
    timeout_s: float,
    description: str,
    global_ranks: list[int],
) -> _C.Communicator | None:
    """None where ranks of one host share no memory, or must not use it. Collective.

    `store_prefix` gives stores of fresh keys, by name; `description` is the group's.
    PYDIST_TRANSPORT=shared_memory raises HostError where there are several hosts, too;
    process_group is None everywhere.
    """
    forced = os.environ.get("PYDIST_TRANSPORT", "")
    if forced and forced not in TRANSPORTS:
        raise UsageError(
            f"PYDIST_TRANSPORT is {forced!r}; expected one of {', '.join(TRANSPORTS)}, or unset"
        )
    if forced == "process_group":
        return None
    name = "the default group" if description == "default_pg" else f"group {description!r}"
    group = Group(store_prefix, rank, size, timeout_s, name, global_ranks)
    hosts = find_hosts(group)
    try:
        if len(hosts.ranks) == 1:
            return _C.Communicator(
                store=store_prefix("communicator"),
                rank=rank,
                size=size,
                timeout_s=timeout_s,
                name=name,
                global_ranks=global_ranks,
            )
        if forced:
            raise HostError(f"{hosts.why_several()} (PYDIST_TRANSPORT is {forced!r})")
        return connect_hosts(group, hosts)
    except HostError:
        if forced:
            raise
        return None
