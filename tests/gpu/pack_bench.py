"""Owns the timing of packing: many gradients into one bucket, beside torch's ways and a copy."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from packs import launched
from place import Place
from profiling import launches
from rows import Rows
from torch import Tensor

from bench import gpu
from bench.record import Case
from bench.sampling import interleaved
from bench.table import size_text

MIB = 2**20


@dataclass(frozen=True)
class Size:
    """What is packed, and how often it is timed."""

    num_tensors: int
    nbytes: int  # of all sources
    num_turns: int = 15
    source: torch.dtype = torch.float32
    target: torch.dtype = torch.float32

    @property
    def num_elements(self) -> int:
        return self.nbytes // self.source.itemsize

    def shares(self) -> list[int]:
        """Elements of each tensor: unequal, so that most begin off a multiple of 16 bytes."""
        mean = self.num_elements // self.num_tensors
        first = [mean + (-1) ** index * (mean // 3) for index in range(self.num_tensors - 1)]
        return [*first, self.num_elements - sum(first)]

    @property
    def name(self) -> str:
        types = f"{self.source} to {self.target}".replace("torch.", "")
        return f"{self.num_tensors} tensors, {size_text(self.nbytes)}, {types}"


FULL = (
    *(
        Size(num_tensors, nbytes * MIB)
        for num_tensors in (10, 400, 5000)
        for nbytes in (1, 8, 64, 256, 1024)
    ),
    Size(400, 64 * MIB, source=torch.bfloat16, target=torch.bfloat16),
    Size(400, 256 * MIB, source=torch.bfloat16, target=torch.bfloat16),
    Size(400, 256 * MIB, target=torch.bfloat16),
)
TINY = (Size(10, 2**14, 2), Size(400, 2**16, 2), Size(10, 2**14, 2, target=torch.bfloat16))
# Read before each sample, so that no contender finds the other's data in the cache. Reading leaves
# nothing to be written back, which filling would.
FLUSH_NBYTES = 512 * MIB


def make_contenders(
    place: Place, size: Size
) -> tuple[Tensor, Tensor, dict[str, Callable[[], object]]]:
    """The bucket, what has to be in it, and what fills it."""
    generator = torch.Generator(place.device).manual_seed(0)
    options = {"generator": generator, "device": place.device}
    flat = torch.randn(size.num_elements, **options).to(size.source)
    sources = [part.clone() for part in flat.split(size.shares())]
    bucket = torch.empty(size.num_elements, dtype=size.target, device=place.device)
    targets = list(bucket.split(size.shares()))
    pack = launched(sources, targets)

    def copy_each() -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    return (
        bucket,
        flat.to(size.target),
        {
            "fused pack": pack.run,
            gpu.COPY: lambda: bucket.copy_(flat),
            "copy_ each": copy_each,
            "_foreach_copy_": lambda: torch._foreach_copy_(targets, sources),
        },
    )


def num_wrong(run: Callable[[], object], bucket: Tensor, expected: Tensor) -> int:
    bucket.fill_(-1)
    run()
    return int((bucket != expected).sum())


def measure_size(place: Place, size: Size, flush: Tensor) -> Case:
    bucket, expected, contenders = make_contenders(place, size)
    wrong = {name: num_wrong(run, bucket, expected) for name, run in contenders.items()}
    samples_s: dict[str, list[float]] = {name: [] for name in contenders}
    for turn, name in interleaved(list(contenders), size.num_turns):
        flush.sum()  # of its own; the launch goes on while it runs
        seconds = place.elapsed_s(contenders[name])
        samples_s[name] += [seconds] if turn >= 0 else []
    case = Case(
        size.name,
        {
            "kind": "pack",
            "num_tensors": size.num_tensors,
            "nbytes": size.nbytes,
            "dtypes": f"{size.source} to {size.target}".replace("torch.", ""),
        },
        samples_s,
        wrong,
    )
    if not place.emulated:
        for name, run in contenders.items():
            case.facts[f"launches of {name}"] = sum(launches(place, run))
    return case


def run(place: Place, rows: Rows) -> None:
    flush = torch.zeros((2**16 if place.emulated else FLUSH_NBYTES) // 4, device=place.device)
    for size in TINY if place.emulated else FULL:
        with rows.check(f"pack of {size.name}: times and results"):
            case = measure_size(place, size, flush)
            rows.add_case(case)
            if any(case.wrong_results.values()):
                raise AssertionError(f"wrong elements: {case.wrong_results}")
            if case.facts.get("launches of fused pack", 1) != 1:
                raise AssertionError(f"launches: {case.facts}")
