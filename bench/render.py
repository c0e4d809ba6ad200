"""Owns RESULTS.md: written from the result files and notes.md alone, never by hand."""

import re
from pathlib import Path

from bench import command_line, gpu
from bench.record import RESULTS, Record, load

RESULTS_PAGE = Path(__file__).parent / "RESULTS.md"
NOTES = Path(__file__).parent / "notes.md"

HEAD = """# Results of the benchmarks

Written by `python -m bench.render` from the samples in `results/`; a test renders it again and
compares. Times are medians of interleaved samples. Read ratios: absolute times depend on the
machine and its load.
"""


def rendered(records: list[Record], notes: dict[str, str]) -> str:
    parts = [HEAD]
    if not any(record.benchmark == gpu.NAME for record in records):
        parts += [
            f"No figure here was measured on a GPU: where one is at hand, `{gpu.COMMAND}` does.\n"
        ]
    for record in records:
        parts += [f"## {record.benchmark}\n", _provenance(record)]
        parts += ["\n".join(command_line.lines_of(record))]
        parts += [notes[record.benchmark]] if record.benchmark in notes else []
    return "\n".join(parts).rstrip() + "\n"


def _provenance(record: Record) -> str:
    machine, versions = record.machine, record.versions
    return (
        f"`{record.command}`, {record.date}, commit {record.commit}. "
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"Linux {machine['kernel']}. "
        f"Python {versions['python']}, torch {versions['torch']}, pydist {versions['pydist']}.\n"
    )


def committed_records() -> list[Record]:
    paths = [RESULTS / f"{name}.json" for name in command_line.SHOWN]
    return [load(path) for path in paths if path.exists()]


def committed_notes() -> dict[str, str]:
    """The words below each heading of notes.md, by benchmark."""
    sections = re.split(r"^## (\w+)\n", NOTES.read_text(), flags=re.MULTILINE)[1:]
    return {name: text.strip() + "\n" for name, text in zip(sections[::2], sections[1::2])}  # noqa: B905


def page() -> str:
    """What RESULTS.md has to say."""
    return rendered(committed_records(), committed_notes())


if __name__ == "__main__":
    RESULTS_PAGE.write_text(page())
