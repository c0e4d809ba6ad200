"""The benchmarks under pytest-benchmark, `pytest bench`; times are the ranks' own, of a sample."""

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench import (
    all_reduce,
    allocator,
    data_parallel,
    data_parallel_options,
    options,
    pack,
    pipeline,
    stages,
    torch_backend,
)
from bench.models import FULL, WORKLOADS
from bench.ranks import Rank, Ranks, RanksClock, Span
from bench.table import size_text
from bench.torch_operations import OPERATIONS

clock = RanksClock()
pytestmark = pytest.mark.benchmark(timer=clock)
ROUNDS = 15

ALL_REDUCE_SIZES = [size for size in all_reduce.FULL if 2**18 <= size.nbytes <= 25 * 2**20]
BACKEND_SIZES = [size for size in torch_backend.FULL if 2**18 <= size.nbytes <= 2**24]
PACK_SIZES = [size for size in pack.FULL if size.nbytes == 8 * 2**20]


def prepare_all_reduce(rank: Rank, size: all_reduce.Size) -> None:
    rank.kept["contenders"] = all_reduce.make_contenders(rank, size)
    rank.kept["expected"] = all_reduce.Expected(rank, size)


def sample_all_reduce(rank: Rank, contender: str, size: all_reduce.Size) -> tuple[Span, int]:
    return all_reduce.sample(rank, rank.kept["contenders"][contender], size, rank.kept["expected"])


@pytest.mark.parametrize("contender", ["arena", "ordinary", "gloo", "bound"])
@pytest.mark.parametrize("size", ALL_REDUCE_SIZES, ids=lambda size: size_text(size.nbytes))
def test_all_reduce(
    benchmark: BenchmarkFixture, two_ranks: Ranks, size: all_reduce.Size, contender: str
) -> None:
    benchmark.group = f"all_reduce, {size_text(size.nbytes)}, {size.iterations} in a row"
    two_ranks.call(prepare_all_reduce, size)

    def one() -> None:
        turns = two_ranks.call(sample_all_reduce, contender, size)
        clock.advance([span for span, _ in turns])
        assert not any(wrong for _, wrong in turns)

    benchmark.pedantic(one, rounds=ROUNDS, warmup_rounds=1)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("backend", torch_backend.BACKENDS)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("size", BACKEND_SIZES, ids=lambda size: size_text(size.nbytes))
def test_torch_operation(
    benchmark: BenchmarkFixture,
    two_ranks: Ranks,
    size: torch_backend.Size,
    operation: str,
    backend: str,
) -> None:
    benchmark.group = f"torch_backend, {operation}, {size_text(size.nbytes)}"
    two_ranks.call(torch_backend.make_groups)
    two_ranks.call(torch_backend.set_up_calls, operation, size)

    def one() -> None:
        turns = two_ranks.call(torch_backend.sample_calls, backend)
        clock.advance([span for span, _ in turns])
        assert not any(wrong for _, wrong in turns)

    benchmark.pedantic(one, rounds=ROUNDS, warmup_rounds=1)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("contender", ["compute", "ddp", "pydist"])
@pytest.mark.parametrize("workload", FULL)
def test_step(benchmark: BenchmarkFixture, two_ranks: Ranks, workload: str, contender: str) -> None:
    steps = WORKLOADS[workload].steps
    benchmark.group = f"data_parallel, {workload}, {steps} steps"
    two_ranks.call(data_parallel.clear)
    two_ranks.call(data_parallel.set_up, workload, ("compute", contender))

    def one() -> None:
        clock.advance(two_ranks.call(data_parallel.take_steps, contender, steps))

    benchmark.pedantic(one, rounds=ROUNDS, warmup_rounds=1)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("contender", ["compute", "ddp", "pydist"])
@pytest.mark.parametrize("name", options.OPTIONS)
def test_option(benchmark: BenchmarkFixture, two_ranks: Ranks, name: str, contender: str) -> None:
    option = options.OPTIONS[name]
    steps = option.shape.steps
    benchmark.group = f"data_parallel_options, {name}, {steps} steps"
    two_ranks.call(data_parallel_options.clear)
    two_ranks.call(data_parallel_options.set_up, option, (contender,))

    def one() -> None:
        clock.advance(two_ranks.call(data_parallel_options.take_steps, contender, steps))

    benchmark.pedantic(one, rounds=ROUNDS, warmup_rounds=1)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("contender", pipeline.CONTENDERS)
@pytest.mark.parametrize("kind", stages.TORCH_SCHEDULES)
@pytest.mark.parametrize("workload", pipeline.FULL, ids=lambda workload: workload.name)
def test_pipeline(
    benchmark: BenchmarkFixture,
    two_ranks: Ranks,
    workload: stages.Workload,
    kind: str,
    contender: str,
) -> None:
    benchmark.group = f"pipeline, {kind}, {workload.name}, {workload.steps} steps"
    two_ranks.call(pipeline.clear)
    two_ranks.call(pipeline.set_up, kind, workload, (contender,))

    def one() -> None:
        clock.advance(two_ranks.call(pipeline.take_steps, contender))

    benchmark.pedantic(one, rounds=ROUNDS, warmup_rounds=1)  # type: ignore[no-untyped-call]


def prepare_pack(rank: Rank, size: pack.Size) -> None:
    rank.kept["out"] = pack.make_out(size)
    rank.kept["pack"] = pack.make_contenders(size, rank.kept["out"])


def sample_pack(rank: Rank, contender: str, size: pack.Size) -> tuple[Span, int]:
    expected, contenders = rank.kept["pack"]
    return pack.sample(rank, contenders[contender], size, rank.kept["out"], expected)


@pytest.mark.parametrize("contender", pack.CONTENDERS)
@pytest.mark.parametrize("size", PACK_SIZES, ids=lambda size: str(size.num_tensors))
def test_pack(
    benchmark: BenchmarkFixture, one_rank: Ranks, size: pack.Size, contender: str
) -> None:
    benchmark.group = f"pack, {size.num_tensors} tensors, {size.iterations} in a row"
    one_rank.call(prepare_pack, size)

    def one() -> None:
        ((span, wrong),) = one_rank.call(sample_pack, contender, size)
        clock.advance([span])
        assert wrong == 0

    benchmark.pedantic(one, rounds=ROUNDS, warmup_rounds=1)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("nbytes", allocator.FULL, ids=size_text)
@pytest.mark.parametrize("contender", allocator.CONTENDERS)
def test_allocate(benchmark: BenchmarkFixture, contender: str, nbytes: int) -> None:
    benchmark.group = f"allocator, {size_text(nbytes)}, {allocator.FULL[nbytes]} in a row"
    with Ranks(1) as ranks:
        if contender == "with":
            ranks.call(allocator.install)

        def one() -> None:
            ((span, wrong),) = ranks.call(allocator.allocate, nbytes, allocator.FULL[nbytes])
            clock.advance([span])
            assert wrong == 0

        benchmark.pedantic(one, rounds=ROUNDS, warmup_rounds=1)  # type: ignore[no-untyped-call]
