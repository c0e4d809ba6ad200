"""Owns the options of `python -m bench` and of each benchmark run alone."""

import argparse
import importlib
import sys
from pathlib import Path
from types import ModuleType

from bench.record import Record
from bench.table import aims_table

BENCHMARKS = (
    "all_reduce",
    "torch_backend",
    "data_parallel",
    "data_parallel_options",
    "pipeline",
    "pack",
    "allocator",
)
# What RESULTS.md shows: also `python -m bench.hosts`, which takes root, and what tests/gpu/run.sh
# measures, where a GPU has been at hand.
SHOWN = (*BENCHMARKS, "hosts", "gpu")


def run_one(name: str) -> None:
    """`python -m bench.NAME`: measures and prints one table."""
    parser = argparse.ArgumentParser(prog=f"python -m bench.{name}")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it work at all?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the samples here")
    options = parser.parse_args()
    record = module_of(name).measure(options.quick, command_of(f"bench.{name}", options.quick))
    if options.json:
        record.save(options.json.resolve())
    print("\n".join(lines_of(record)))
    check_results(record)


def check_results(record: Record) -> None:
    wrong = [case.name for case in record.cases if any(case.wrong_results.values())]
    if wrong:
        sys.exit(f"{record.benchmark}: wrong results in {', '.join(wrong)}")


def command_of(module: str, quick: bool) -> str:
    return f"python -m {module}" + (" --quick" if quick else "")


def module_of(name: str) -> ModuleType:
    """By its importable name, under which its functions can be sent to the ranks."""
    return importlib.import_module(f"bench.{name}")


def lines_of(record: Record) -> list[str]:
    """What a benchmark prints, and what RESULTS.md shows of it."""
    module = module_of(record.benchmark)
    lines: list[str] = module.render(record)
    # Tiny sizes say nothing about aims.
    aims = module.aims(record) if record.mode == "full" else []
    return lines + (["Aims:", "", *aims_table(aims), ""] if aims else [])
