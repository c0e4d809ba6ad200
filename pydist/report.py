"""Owns the readable account of what a DataParallel has done."""

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydist import _C

_MIB = 1024 * 1024


@dataclasses.dataclass(frozen=True)
class Report:
    """Counters since the model was wrapped, for this rank.

    Attributes:
        num_rounds: backward passes that were synchronised.
        num_buckets: units that hold several small gradients.
        num_alone: units that are one large gradient.
        born_nbytes: gradient bytes reduced where autograd wrote them, without a copy.
        packed_nbytes: gradient bytes that were copied to be reduced, by reason.
        moved_nbytes: gradient bytes reduced.
        wait_s: seconds in waiting and working at the ends of backwards.
    """

    model: str
    transport: str
    num_rounds: int
    num_buckets: int
    num_alone: int
    born_nbytes: int
    packed_nbytes: dict[str, int]
    moved_nbytes: int
    wait_s: float

    @classmethod
    def of(cls, model: str, transport: str, reducer: "_C.Reducer") -> "Report":
        counters = reducer.counters()
        alone = [unit[0] for unit in reducer.units()]
        return cls(
            model=model,
            transport=transport,
            num_buckets=alone.count(False),
            num_alone=alone.count(True),
            **counters,
        )

    def __str__(self) -> str:
        rounds = max(1, self.num_rounds)
        total = self.born_nbytes + sum(self.packed_nbytes.values())
        share = 100 * self.born_nbytes / total if total else 0.0
        lines = [
            f"{self.model} over {self.transport}: {self.num_rounds} rounds",
            f"  units                  {self.num_alone} alone, {self.num_buckets} buckets",
            f"  reduced per round      {self.moved_nbytes / rounds / _MIB:.3f} MiB",
            f"  born in place          {self.born_nbytes / rounds / _MIB:.3f} MiB ({share:.1f} %)",
        ]
        for reason, nbytes in sorted(self.packed_nbytes.items(), key=lambda item: -item[1]):
            lines.append(f"  packed: {reason:<14} {nbytes / rounds / _MIB:.3f} MiB")
        lines.append(f"  at the end of backward {1e3 * self.wait_s / rounds:.3f} ms per round")
        return "\n".join(lines)
