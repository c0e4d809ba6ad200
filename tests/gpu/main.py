"""Owns the run of all sections on one device: its time, the table, the JSON, the exit status."""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
# Last: an installed pydist goes before the source tree.
sys.path += [str(ROOT), str(ROOT / "examples"), str(ROOT / "tests")]

import environment  # noqa: E402  (what comes from the folders above)
from place import Place  # noqa: E402
from rows import check_case  # noqa: E402
from sections import SECTIONS, run_section  # noqa: E402

from bench import command_line, gpu  # noqa: E402
from bench.record import Case, Record  # noqa: E402

# On a GPU, without the build.
TOTAL_S = 8 * 60


def measure(options: argparse.Namespace, folder: Path) -> Record:
    place = Place(options.emulate)
    place.prepare()
    machine, versions = environment.describe(place, folder)
    cases: list[Case] = []
    deadline = time.monotonic() + TOTAL_S
    for section in SECTIONS:
        if options.only and section.name not in options.only:
            continue
        left_s = deadline - time.monotonic()
        print(f"{section.name} ...", file=sys.stderr, flush=True)
        if left_s < 1:
            reason = "not begun: the time of the whole run was up"
            cases.append(check_case(section.name, "the whole section", "failed", 0.0, reason))
            continue
        limit_s = min(section.limit(place), left_s)
        cases += run_section(section, place, limit_s, folder, options.plant)
    mode = "quick" if options.emulate else "full"
    record = Record(gpu.NAME, gpu.COMMAND + " --emulate" * options.emulate, mode, [1], cases)
    record.machine.update(machine)
    record.versions.update(versions)
    return record


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests/gpu/run.sh", description=__doc__)
    parser.add_argument("--emulate", action="store_true", help="on the CPU, tiny sizes")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="keep all samples here")
    parser.add_argument("--only", action="append", choices=[s.name for s in SECTIONS])
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the sections' logs here")
    parser.add_argument(
        "--plant", metavar="CHECK", help="change one element of what this check finds: it must fail"
    )
    options = parser.parse_args()
    # All ranks are on this machine, whose name may be unknown where there is no network.
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, "lo")
    with tempfile.TemporaryDirectory(prefix="pydist-gpu-") as temporary:
        folder = options.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for section in SECTIONS:
            for old in (folder / f"{section.name}.rows", folder / f"{section.name}.log"):
                old.unlink(missing_ok=True)
        record = measure(options, folder)
        failed = gpu.failed(record)
        print("\n".join(command_line.lines_of(record)), flush=True)
        for name in dict.fromkeys(str(case.parameters["section"]) for case in failed):
            print(f"--- the log of {name} ends:", file=sys.stderr)
            print((folder / f"{name}.log").read_text(errors="replace")[-4000:], file=sys.stderr)
    if options.out:
        record.save(options.out.resolve())
        print(f"written to {options.out}")
    num_skipped = len(gpu.skipped(record))
    num_checks = len(gpu.checks(record))
    print(f"{num_checks - len(failed) - num_skipped} passed, {len(failed)} failed, ", end="")
    print(f"{num_skipped} skipped", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    # Forked sections must not come here, and nothing is left to clean up.
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
