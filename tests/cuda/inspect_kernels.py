"""Owns what is known of the kernels' machine code: prints it, and fails where it got worse.

    python inspect_kernels.py LIBRARY [--update]

LIBRARY is pydist/_cuda*.so, or an object file. Needs cuobjdump (nvidia-cuda-cuobjdump and
nvidia-cuda-nvdisasm, or a toolkit) and c++filt. What is expected stands in kernels.json, written by
--update; registers may be SLACK more, as compilers differ.
"""

import argparse
import dataclasses
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

EXPECTED = Path(__file__).with_name("kernels.json")
ARCHITECTURES = ("sm_80", "sm_90")
SLACK_REGISTERS = 8
ELEMENTS = {
    "Float16": "float16",
    "BFloat16": "bfloat16",
    "Float32": "float32",
    "Float64": "float64",
    "Float8": "float8",
}
# CUDA allows 4 KiB; what is copied into each launch should be far less.
MOST_ARGUMENT_NBYTES = 128
# Two blocks of them fill a processor.
THREADS = 512
# They copy nothing by whole accesses, and have no need to.
NOT_VECTORISED = ("sum_partials",)


@dataclasses.dataclass
class Facts:
    """Of one kernel on one architecture."""

    registers: int = 0
    spill_nbytes: int = 0  # of stack and local memory, and one for each access of them
    argument_nbytes: int = 0
    max_threads: int = 0
    loads_128: int = 0
    stores_128: int = 0
    generic: int = 0  # accesses that could be of any memory

    def complaints(self, name: str, expected: "Facts | None") -> Iterator[str]:
        """What is wrong in itself, and what is worse than expected."""
        if self.spill_nbytes > 0:
            yield f"spills ({self.spill_nbytes})"
        if self.generic > 0:
            yield f"{self.generic} generic accesses"
        if self.max_threads != THREADS:
            yield f"launch bounds of {self.max_threads} threads, not {THREADS}"
        if not 0 < self.argument_nbytes <= MOST_ARGUMENT_NBYTES:
            yield f"{self.argument_nbytes} bytes of arguments, more than {MOST_ARGUMENT_NBYTES}"
        if name not in NOT_VECTORISED and (self.loads_128 == 0 or self.stores_128 == 0):
            yield "no accesses of 16 bytes"
        if expected is None:
            yield f"not in {EXPECTED.name}: run with --update"
            return
        if self.registers > expected.registers + SLACK_REGISTERS:
            yield f"{self.registers} registers, expected {expected.registers}"
        if self.argument_nbytes > expected.argument_nbytes:
            yield f"{self.argument_nbytes} bytes of arguments, expected {expected.argument_nbytes}"
        for what in ("loads_128", "stores_128"):
            found, before = getattr(self, what), getattr(expected, what)
            if found < before:
                yield f"{found} {what.replace('_', ' of ')} bits, expected {before}"


Table = dict[str, dict[str, Facts]]  # by architecture and kernel


def output_of(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def demangled(text: str) -> str:
    # A section's name is not a symbol, but ends with one.
    separated = text.replace(".nv.info._Z", ".nv.info. _Z")
    return subprocess.run(
        ["c++filt"], input=separated, check=True, capture_output=True, text=True
    ).stdout


def kernel_name(function: str) -> str | None:
    """The name in the kernel's descriptor; None where it is not one of ours."""
    if match := re.search(r"pydist::device::reduce<pydist::(\w+), pydist::(\w+)>", function):
        return f"reduce_{ELEMENTS[match[1]]}_to_{ELEMENTS[match[2]]}"
    if match := re.search(r"pydist::device::copy_many<(\w+)>", function):
        return "copy_many_inspect" if match[1] in ("true", "(bool)1") else "copy_many"
    return "sum_partials" if "pydist::device::sum_partials" in function else None


def sections(text: str, header: str) -> Iterator[tuple[str, str]]:
    """(kernel, the text that follows its header)."""
    parts = re.split(header, text)
    for function, body in zip(parts[1::2], parts[2::2], strict=True):
        name = kernel_name(function)
        if name is not None:
            yield name, body


def add_resources(table: dict[str, Facts], text: str) -> None:
    for name, body in sections(text, r"\n Function (.+):\n"):
        facts = table.setdefault(name, Facts())
        found = {key: int(value) for key, value in re.findall(r"([A-Z]+):(\d+)", body)}
        facts.registers = found["REG"]
        facts.spill_nbytes += found["STACK"] + found["LOCAL"]


def add_instructions(table: dict[str, Facts], text: str) -> None:
    for name, body in sections(text, r"\n\s+Function : (.+)\n"):
        facts = table.setdefault(name, Facts())
        operations = re.findall(
            r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", body, re.MULTILINE
        )
        kinds = [(operation.split(".")[0], operation) for operation in operations]
        facts.loads_128 = sum(k == "LDG" and ".128" in op for k, op in kinds)
        facts.stores_128 = sum(k == "STG" and ".128" in op for k, op in kinds)
        facts.generic = sum(k in ("LD", "ST") for k, _ in kinds)
        facts.spill_nbytes += sum(k in ("LDL", "STL") for k, _ in kinds)


def add_attributes(table: dict[str, Facts], text: str) -> None:
    for name, body in sections(text, r"\n\.nv\.info\. (.+)\n"):
        facts = table.setdefault(name, Facts())
        if match := re.search(r"EIATTR_CBANK_PARAM_SIZE\s+Format:\s+\w+\s+Value:\s+(\w+)", body):
            facts.argument_nbytes = int(match[1], 16)
        if match := re.search(r"EIATTR_MAX_THREADS\s+Format:\s+\w+\s+Value:\s+(\w+)", body):
            facts.max_threads = int(match[1], 16)


def inspect(library: Path, cuobjdump: str) -> Table:
    table: Table = {}
    for architecture in ARCHITECTURES:
        facts: dict[str, Facts] = {}
        for add, option in (
            (add_resources, "-res-usage"),
            (add_instructions, "-sass"),
            (add_attributes, "-elf"),
        ):
            add(facts, demangled(output_of(cuobjdump, option, "-arch", architecture, str(library))))
        table[architecture] = facts
    return table


def find_cuobjdump() -> str:
    """On the path, or where the pip package puts it."""
    if found := shutil.which("cuobjdump"):
        return found
    for folder in map(Path, sys.path):
        for candidate in folder.glob("nvidia/cu*/bin/cuobjdump"):
            return str(candidate)
    sys.exit("no cuobjdump: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")


def read_expected() -> Table:
    if not EXPECTED.exists():
        return {}
    given = json.loads(EXPECTED.read_text())
    return {
        architecture: {name: Facts(**facts) for name, facts in kernels.items()}
        for architecture, kernels in given.items()
    }


def complaints(table: Table, expected: Table) -> Iterator[str]:
    for architecture in ARCHITECTURES:
        for name, facts in table[architecture].items():
            for complaint in facts.complaints(name, expected.get(architecture, {}).get(name)):
                yield f"{architecture} {name}: {complaint}"
        for name in expected.get(architecture, {}):
            if name not in table[architecture]:
                yield f"{architecture} {name}: not in the library"


def lines(table: Table) -> Iterator[str]:
    yield f"{'kernel':30} {'arch':6} regs spills arguments threads LDG.128 STG.128"
    for name in sorted({name for kernels in table.values() for name in kernels}):
        for architecture in ARCHITECTURES:
            facts = table[architecture].get(name, Facts())
            yield (
                f"{name:30} {architecture:6} {facts.registers:4} {facts.spill_nbytes:6} "
                f"{facts.argument_nbytes:7} B {facts.max_threads:7} {facts.loads_128:7} "
                f"{facts.stores_128:7}"
            )


def write_expected(table: Table) -> None:
    data = {
        architecture: {name: dataclasses.asdict(facts) for name, facts in sorted(kernels.items())}
        for architecture, kernels in table.items()
    }
    # One line a kernel.
    text = json.dumps(data, indent=2)
    EXPECTED.write_text(re.sub(r"\n {6}(?=\")|\n {4}(?=\})", " ", text) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("library", type=Path)
    parser.add_argument("--update", action="store_true", help="what is found becomes expected")
    options = parser.parse_args()
    table = inspect(options.library, find_cuobjdump())
    print("\n".join(lines(table)))
    if options.update:
        write_expected(table)
    found = list(complaints(table, read_expected()))
    print("\n".join(found) or f"{sum(map(len, table.values()))} kernels, none worse than expected")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
