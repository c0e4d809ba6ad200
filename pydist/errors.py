"""Owns the exception classes of pydist; the C++ engine raises the same."""

import builtins


class UsageError(ValueError, RuntimeError):
    """A call was wrong on this rank alone: an argument, a state, a limit of the machine.

    Both, since torch's DistributedDataParallel raises now the one and now the other.
    """


class MismatchError(RuntimeError):
    """Ranks disagree about an operation or a model; raised on every rank of the group."""


class PeerError(RuntimeError):
    """A peer died or raised; the message names its rank, its process and the operation."""


class TimeoutError(RuntimeError, builtins.TimeoutError):
    """A peer did not arrive in time; the message names who was waited for."""


class ResourceError(RuntimeError):
    """Memory, descriptors or address space cannot be had; the message names the remedy."""


class HostError(RuntimeError):
    """Ranks of a group cannot share memory, as they do not share a host; says which and why."""


class ScheduleError(ValueError):
    """A schedule that cannot be built, read or run; the message says where and what would work."""


# Users meet these as `pydist.PeerError`: tracebacks and pickles show the name they write.
for _error in (UsageError, MismatchError, PeerError, TimeoutError, ResourceError, HostError):
    _error.__module__ = "pydist"
ScheduleError.__module__ = "pydist.schedule"
del _error
