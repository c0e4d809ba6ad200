"""Runs all benchmarks, keeps their samples in results/ and renders RESULTS.md."""

import argparse
import time
from pathlib import Path

from bench import command_line, render
from bench.record import RESULTS


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny sizes; leaves RESULTS.md alone")
    parser.add_argument("--results", type=Path, help="folder for the samples instead of results/")
    options = parser.parse_args()
    folder = options.results or (None if options.quick else RESULTS)
    command = command_line.command_of("bench", options.quick)
    for name in command_line.BENCHMARKS:
        start_s = time.monotonic()
        record = command_line.module_of(name).measure(options.quick, command)
        if folder:
            record.save(folder / f"{name}.json")
        print(f"## {name} ({time.monotonic() - start_s:.0f} s)\n")
        print("\n".join(command_line.lines_of(record)), flush=True)
        command_line.check_results(record)
    if folder == RESULTS:
        render.RESULTS_PAGE.write_text(render.page())


if __name__ == "__main__":
    main()
