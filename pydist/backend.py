"""Owns the backend "pydist" of torch.distributed: how groups get theirs.

    torch.distributed.init_process_group("pydist")          # or "cpu:pydist,cuda:nccl"

pydist_backend.py registers it while torch is imported.
"""

from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store

from pydist import _C
from pydist._connect import connect
from pydist._fresh_store import fresh_store
from pydist._torch_groups import forced_time_limit_s
from pydist.errors import HostError

NAME = "pydist"


def create(options: Any, backend_options: Any = None) -> _C.Backend:
    """A group's backend, as torch asks for it: of its _DistributedBackendOptions. Collective."""
    global_ranks = list(options.global_ranks_in_group)
    description = options.group_id
    if not global_ranks:  # as torch says it
        global_ranks, description = list(range(options.group_size)), "default_pg"
    timeout = options.timeout
    if backend_options is not None and getattr(backend_options, "_timeout", None) is not None:
        timeout = backend_options._timeout
    return _make(
        options.store, options.group_rank, global_ranks, timeout, description, options.group_id
    )


def _make(
    store: Store,
    rank: int,
    global_ranks: list[int],
    timeout: timedelta,
    description: str,
    group_name: str,
) -> _C.Backend:
    size = len(global_ranks)
    timeout_s = forced_time_limit_s() or timeout / timedelta(seconds=1)
    own = fresh_store(store, rank, size, timeout_s, description)
    communicator = connect(
        lambda name: PrefixStore(name, own),
        rank,
        size,
        timeout_s,
        description,
        global_ranks,
    )
    if communicator is None:
        raise HostError(
            f"ranks of {description} on one host do not share memory, which the backend {NAME!r} "
            "needs; start them in one user and network namespace, without PYDIST_TRANSPORT, or use "
            'the backend "gloo"'
        )

    def split(store: Store, ranks: list[int], options: Any) -> _C.Backend:
        """Of a part of the ranks, by their number in this group."""
        part = [global_ranks[r] for r in ranks]
        limit = timeout if options is None else options._timeout
        name = options.group_name if options is not None and options.group_name else group_name
        return _make(store, ranks.index(rank), part, limit, name, name)

    return _C.Backend(communicator, global_ranks, group_name, split)
