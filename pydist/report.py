"""Owns the readable account of what a DataParallel has done, and where its time went."""

import dataclasses
import os
import textwrap
from typing import TYPE_CHECKING

from pydist._advice import advise

if TYPE_CHECKING:
    from pydist import _C

_MIB = 1024 * 1024
_WIDTH = 100
_INDENT = " " * 14  # of all that stands beside a heading
_NUM_LISTED = 4  # buckets; the largest ones
_NUM_NAMED = 12  # parameters
_LATE_SHARE = 0.01  # of a step: waiting for a rank that is worth a line


@dataclasses.dataclass(frozen=True)
class Unit:
    """What is reduced at a time: one large gradient, or a bucket of small ones.

    Attributes:
        nbytes: size of the gradients in it, as they travel.
        alone: it is one large gradient.
        parameters: their names, in the order in which they lie in it.
    """

    nbytes: int
    alone: bool
    parameters: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class LateRank:
    """How often a rank came last to the end of backward.

    Attributes:
        rank: in the group.
        num_last: rounds in which it came last.
        waited_s: seconds that the other ranks waited for it in these, as a mean over them.
    """

    rank: int
    num_last: int
    waited_s: float


@dataclasses.dataclass(frozen=True)
class Unused:
    """A trainable parameter that some ranks did not use in the last round.

    Attributes:
        name: of the parameter.
        ranks: of the group, that had no gradient for it.
    """

    name: str
    ranks: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Report:
    """What happened since the model was wrapped; times, bytes and counts are sums over all rounds.

    They are this rank's, except for `late` and `unused`, which all ranks know alike. ``str()``
    gives a table, with times and sizes per round.

    Attributes:
        model: the name that messages use.
        transport: "shared_memory", "hosts" (shared memory within each of several, a network
            between them), "process_group" or, for a module on a GPU, "nccl". Of the last, times are
            those of the host, which enqueues work and does not wait for it.
        rank, size: this rank in its group, and the group's size.
        num_rounds: backward passes that were synchronised.
        units: what is reduced at a time.
        num_buckets: units that hold several small gradients.
        num_alone: units that are one large gradient.
        born_nbytes: gradient bytes reduced where autograd wrote them, without a copy.
        packed_nbytes: gradient bytes that were copied to be reduced, by reason.
        moved_nbytes: gradient bytes reduced.
        forward_s: seconds in the forwards, broadcasts of buffers included.
        backward_s: seconds from the begin of backward to its last gradient.
        hidden_s: seconds of communication within backward_s: of this rank's own work in shared
            memory; over hosts or a process group, from the first launch on.
        waiting_s: seconds after backward in which this rank waited for the last one to get there.
        reducing_s: seconds after that, until all gradients were the mean.
        total_s: seconds of whole steps, from the end of one round to the end of the next.
        wait_s: seconds in waiting and working at the ends of backwards, without copies.
        late: the ranks that came last in some round, the one most waited for first. From the
            second round on; time spent in the broadcast of buffers does not count.
        unused: parameters that were not used in the last round.
        allocator: why gradients are not born in place; empty where they may be.
        forced_transport: PYDIST_TRANSPORT chose the transport.
    """

    model: str
    transport: str
    rank: int
    size: int
    num_rounds: int
    units: tuple[Unit, ...]
    born_nbytes: int
    packed_nbytes: dict[str, int]
    moved_nbytes: int
    forward_s: float
    backward_s: float
    hidden_s: float
    waiting_s: float
    reducing_s: float
    total_s: float
    wait_s: float
    late: tuple[LateRank, ...]
    unused: tuple[Unused, ...]
    allocator: str
    forced_transport: bool

    @classmethod
    def of(
        cls,
        model: str,
        transport: str,
        rank: int,
        size: int,
        names: list[str],
        reducer: "_C.Reducer",
        allocator: str = "",
    ) -> "Report":
        late = [LateRank(r, *values) for r, values in enumerate(reducer.late())]
        return cls(
            model=model,
            transport=transport,
            rank=rank,
            size=size,
            units=tuple(
                Unit(nbytes, alone, tuple(names[member] for member in members))
                for alone, nbytes, members in reducer.units()
            ),
            late=tuple(sorted((x for x in late if x.num_last), key=lambda x: -x.waited_s)),
            unused=tuple(Unused(names[i], tuple(ranks)) for i, ranks in reducer.unused_by_rank()),
            allocator=allocator,
            forced_transport=bool(os.environ.get("PYDIST_TRANSPORT")),
            **{**reducer.times(), **reducer.counters()},
        )

    @property
    def num_buckets(self) -> int:
        return sum(not unit.alone for unit in self.units)

    @property
    def num_alone(self) -> int:
        return sum(unit.alone for unit in self.units)

    @property
    def hints(self) -> tuple[str, ...]:
        """What would make steps faster, each with its evidence; empty where nothing stands out."""
        return advise(self)

    def __str__(self) -> str:
        count = f"{self.num_rounds} round" + ("" if self.num_rounds == 1 else "s")
        title = f"{self.model}, rank {self.rank} of {self.size}, over {self.transport}: {count}"
        parts = [title, *self._unit_lines()]
        if self.num_rounds > 0:
            parts += [*self._byte_lines(), *self._time_lines(), *self._late_lines()]
            parts += self._unused_lines()
        for hint in self.hints:
            parts.append(_wrapped("would help", hint))
        return "\n".join(parts)

    def _unit_lines(self) -> list[str]:
        alone = sum(unit.nbytes for unit in self.units if unit.alone)
        lines = [f"{self.num_alone} alone ({_mib(alone)}), {self.num_buckets} buckets"]
        buckets = sorted((u for u in self.units if not u.alone), key=lambda u: -u.nbytes)
        for bucket in buckets[:_NUM_LISTED]:
            names = bucket.parameters
            span = names[0] if len(names) == 1 else f"{len(names)}: {names[0]} to {names[-1]}"
            lines.append(f"bucket of {_mib(bucket.nbytes)} ({span})")
        if len(buckets) > _NUM_LISTED:
            lines[-1] += f", and {len(buckets) - _NUM_LISTED} smaller ones"
        return _beside("units", lines)

    def _byte_lines(self) -> list[str]:
        total = max(1, self.born_nbytes + sum(self.packed_nbytes.values()))
        lines = [f"{_mib(self.moved_nbytes / self.num_rounds)} a round"]
        kinds = {"born in place": self.born_nbytes}
        for reason, nbytes in sorted(self.packed_nbytes.items(), key=lambda item: -item[1]):
            kinds[f"packed, {reason}"] = nbytes
        for kind, nbytes in kinds.items():
            share = f"{100 * nbytes / total:5.1f} %"
            lines.append(f"{kind:<28} {_mib(nbytes / self.num_rounds):>13} {share}")
        return _beside("reduced", lines)

    def _time_lines(self) -> list[str]:
        exposed = self.waiting_s + self.reducing_s
        rest = max(0.0, self.total_s - self.forward_s - self.backward_s - exposed)
        rows = [
            ("forward", self.forward_s, ""),
            ("backward", self.backward_s, f"{self._ms(self.hidden_s)} of it hid communication"),
            ("waiting", self.waiting_s, "at its end, for the rank that came last"),
            ("reducing", self.reducing_s, "then, what was left"),
            ("the rest", rest, "loss, optimizer, data"),
        ]
        lines = [f"{self._ms(self.total_s)} a round"]
        for name, seconds, note in rows:
            lines.append(f"{name:<10} {self._ms(seconds):>12}  {note}".rstrip())
        return _beside("time", lines)

    def _late_lines(self) -> list[str]:
        worth = self.total_s * _LATE_SHARE
        late = [late for late in self.late if late.waited_s > worth]
        lines = [
            f"rank {one.rank} came last in {one.num_last} of {max(1, self.num_rounds - 1)} rounds; "
            f"the others waited {1e3 * one.waited_s / one.num_last:.3f} ms for it each time"
            for one in late
        ]
        return _beside("late", lines or ["no rank is worth mentioning"])

    def _unused_lines(self) -> list[str]:
        if not self.unused:
            return []
        named = [
            f"{one.name} ({self._ranks_in_words(one.ranks)})" for one in self.unused[:_NUM_NAMED]
        ]
        if len(self.unused) > _NUM_NAMED:
            named.append(f"and {len(self.unused) - _NUM_NAMED} more")
        return [_wrapped("unused", ", ".join(named))]

    def _ranks_in_words(self, ranks: tuple[int, ...]) -> str:
        if len(ranks) == self.size:
            return "every rank"
        return "rank " + ", ".join(map(str, ranks))

    def _ms(self, seconds: float) -> str:
        return f"{1e3 * seconds / max(1, self.num_rounds):.3f} ms"


def _mib(nbytes: float) -> str:
    return f"{nbytes / _MIB:.3f} MiB"


def _beside(heading: str, lines: list[str]) -> list[str]:
    return [_wrapped(heading if i == 0 else "", line) for i, line in enumerate(lines)]


def _wrapped(heading: str, text: str) -> str:
    first = f"  {heading}".ljust(len(_INDENT))
    if len(first) + len(text) <= _WIDTH:
        return first + text  # as it is: columns keep their spaces
    return textwrap.fill(
        text, _WIDTH, initial_indent=first, subsequent_indent=_INDENT, break_long_words=False
    )
