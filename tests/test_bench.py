"""The benchmarks work and find no wrong result; RESULTS.md says what their samples say."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))  # last: an installed pydist goes before the source tree

from bench import command_line, data_parallel_options, options, render, sampling  # noqa: E402  (found through the line above)
from bench.record import Record, load  # noqa: E402
from bench.table import Aim, aims_table, size_text, table, time_text  # noqa: E402

QUICK_TIMEOUT_S = 300


@pytest.fixture(scope="module")
def quick_records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Record]:
    """Every benchmark, once, with tiny sizes."""
    folder = tmp_path_factory.mktemp("results")
    command = [sys.executable, "-m", "bench", "--quick", "--results", str(folder)]
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=QUICK_TIMEOUT_S, check=False
    )
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
    return {name: load(folder / f"{name}.json") for name in command_line.BENCHMARKS}


@pytest.mark.parametrize("name", command_line.BENCHMARKS)
def test_a_quick_run_finds_no_wrong_result(quick_records: dict[str, Record], name: str) -> None:
    record = quick_records[name]
    assert record.mode == "quick"
    assert record.cases
    for case in record.cases:
        assert case.wrong_results, "nothing was checked"
        assert not any(case.wrong_results.values()), case.name
        assert all(min(samples) > 0 for samples in case.samples_s.values())


@pytest.mark.parametrize("name", command_line.BENCHMARKS)
def test_a_saved_record_prints_the_same_table(quick_records: dict[str, Record], name: str) -> None:
    record = quick_records[name]
    lines = command_line.lines_of(record)
    for case in record.cases:
        shown = time_text(next(iter(case.medians_s.values())))
        assert any(shown in line for line in lines), f"{case.name}: {shown} is not in the table"


@pytest.mark.parametrize("name", command_line.BENCHMARKS)
def test_committed_samples_are_complete(name: str) -> None:
    record = load(render.RESULTS / f"{name}.json")
    assert record.mode == "full"
    assert record.command in ("python -m bench", f"python -m bench.{record.benchmark}")
    assert record.date
    assert {"cpu", "cores", "memory_gib", "kernel"} <= record.machine.keys()
    assert {"python", "torch", "pydist"} <= record.versions.keys()
    assert re.fullmatch(r"[0-9a-f]{40}", record.commit), "measure a commit, not changed files"
    for case in record.cases:
        assert case.medians_s == case.recomputed_medians_s()
        assert case.wrong_results
        assert not any(case.wrong_results.values())


def test_results_page_is_what_the_samples_say() -> None:
    assert render.RESULTS_PAGE.read_text() == render.page(), "run `python -m bench.render`"


def test_every_table_depends_on_the_samples(quick_records: dict[str, Record]) -> None:
    records = list(quick_records.values())
    page = render.rendered(records, {})
    for index, record in enumerate(records):
        case = record.cases[0]
        slower = {name: [3 * s for s in samples] for name, samples in case.samples_s.items()}
        changed_case = dataclasses.replace(case, samples_s=slower, medians_s={})
        changed = dataclasses.replace(record, cases=[changed_case, *record.cases[1:]])
        assert render.rendered([*records[:index], changed, *records[index + 1 :]], {}) != page


def test_notes_hold_no_measured_number() -> None:
    text = render.NOTES.read_text()
    assert not re.search(r"\d\s*(%|x\b|µs|ns|ms|s\b|GB/s|times|percent)", text)
    assert set(render.committed_notes()) <= set(command_line.SHOWN)


def test_drift_of_the_machine_drops_out() -> None:
    drift_s = [1.0, 2.0, 4.0, 8.0, 16.0]
    own_s = [s + 0.1 for s in drift_s]
    peer_s = [s + 1.0 for s in drift_s]
    assert sampling.added_s(own_s, drift_s) == pytest.approx(0.1)
    assert sampling.added_ratio(own_s, peer_s, drift_s) == pytest.approx(0.1)
    assert sampling.added_ratio_interval(own_s, peer_s, drift_s) == pytest.approx((0.1, 0.1))


def test_nobody_always_follows_the_same_contender() -> None:
    turns = list(sampling.interleaved("abc", 2))
    assert turns[:3] == [(-1, "c"), (-1, "a"), (-1, "b")]
    assert [contender for _, contender in turns[3:]] == ["a", "b", "c", "b", "c", "a"]


def test_gradients_that_went_wrong_are_told_from_rounding() -> None:
    """Parameters hardly move in a benchmark: a difference is judged by how far they did."""
    torch.manual_seed(0)
    initial, gradient = torch.randn(1000), torch.randn(1000)
    num_beyond = data_parallel_options.num_beyond
    expected = initial - 0.01 * gradient
    assert num_beyond(options.EXACT, expected, expected, initial) == 0
    halved = initial - 0.01 * gradient.half().float()
    assert num_beyond(options.FP16, halved, expected, initial) == 0
    assert num_beyond(options.EXACT, halved, expected, initial) > 0
    one_wrong = expected.clone()
    one_wrong[7] += 0.01
    assert num_beyond(options.BF16, one_wrong, expected, initial) == 1
    assert num_beyond(0.0, expected, expected, initial) == 0
    assert num_beyond(0.0, expected.nextafter(initial), expected, initial) == 1000
    assert num_beyond(0.0, initial, initial, initial) > 0, "nothing was trained"


def test_units() -> None:
    assert [size_text(n) for n in (8, 1024, 25 * 2**20)] == ["8 B", "1 KiB", "25 MiB"]
    assert [time_text(s) for s in (1.5, 2e-3, 3e-6, 4e-9)] == ["1.5 s", "2 ms", "3 µs", "4 ns"]


def test_columns_are_aligned() -> None:
    assert table(["a", "long name"], [["1000", "1"]]) == [
        "|    a | long name |",
        "|-----:|----------:|",
        "| 1000 |         1 |",
    ]


def test_a_missed_aim_says_by_how_much() -> None:
    met = Aim("fast", target=10, measured=12, at_least=True)
    missed = Aim("cheap", target=0.1, measured=0.15, at_least=False)
    assert [line.split("|")[-2].strip() for line in aims_table([met, missed])[2:]] == [
        "met",
        "missed by 50%",
    ]
