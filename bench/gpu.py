"""Owns how a run of tests/gpu/run.sh is shown: its checks, its timings, its aims.

The script measures where a GPU is at hand, apart from `python -m bench`; the file that it writes
is shown in RESULTS.md where one has been kept.
"""

from bench.record import Case, Record
from bench.table import Aim, rate_text, size_text, table, time_text

NAME = "gpu"
COMMAND = "tests/gpu/run.sh"

COPY = "device copy"  # the bound of packing
PACK_CONTENDERS = ("fused pack", COPY, "copy_ each", "_foreach_copy_")
# "pydist, reducing" goes the whole way that several ranks go; a lone rank by itself has nothing to
# reduce, so "pydist" does not.
STEP_CONTENDERS = ("plain", "ddp", "ddp, bucket views", "pydist", "pydist, reducing")
AIMED_CONTENDER = "pydist, reducing"

AIMED_SHARE = 0.9
AIMED_FROM_NBYTES = 64 * 2**20


def of_kind(record: Record, kind: str) -> list[Case]:
    return [case for case in record.cases if case.parameters["kind"] == kind]


def checks(record: Record) -> list[Case]:
    return of_kind(record, "check")


def failed(record: Record) -> list[Case]:
    return [case for case in checks(record) if case.facts["outcome"] == "failed"]


def skipped(record: Record) -> list[Case]:
    return [case for case in checks(record) if case.facts["outcome"] == "skipped"]


def render(record: Record) -> list[str]:
    emulated = record.mode != "full"
    lines = [_place(record), "", *_check_lines(record)]
    if emulated and (of_kind(record, "pack") or of_kind(record, "step")):
        lines += ["The times below show that the code runs, and nothing else: this is no GPU.", ""]
    lines += _pack_lines(of_kind(record, "pack"))
    for case in of_kind(record, "step"):
        lines += _step_lines(case, emulated)
    return lines


def _place(record: Record) -> str:
    machine, versions = record.machine, record.versions
    described = f"Card: {machine['card']}, driver {machine['driver']}"
    for name in ("cuda", "nccl", "nvcc"):
        described += f", {name} {versions[name]}" if name in versions else ""
    return described + "."


def _check_lines(record: Record) -> list[str]:
    rows = [
        (
            str(case.parameters["section"]),
            case.name,
            str(case.facts["outcome"]),
            time_text(next(iter(case.medians_s.values()))),
            str(case.facts["detail"]).replace("|", "/") or "-",
        )
        for case in checks(record)
    ]
    return [*table(("section", "check", "outcome", "took", "detail"), rows), ""] if rows else []


def _pack_lines(cases: list[Case]) -> list[str]:
    if not cases:
        return []
    header = (
        "dtypes",
        "tensors",
        "together",
        "contender",
        "time",
        "GB/s copied",
        "of the copy",
        "launches",
    )
    rows = []
    for case in cases:
        nbytes = int(case.parameters["nbytes"])
        for name in PACK_CONTENDERS:
            seconds = case.medians_s[name]
            rows.append(
                (
                    str(case.parameters["dtypes"]),
                    str(case.parameters["num_tensors"]),
                    size_text(nbytes),
                    name,
                    time_text(seconds),
                    rate_text(nbytes / seconds),
                    f"{case.medians_s[COPY] / seconds:.0%}",
                    str(case.facts.get(f"launches of {name}", "-")),
                )
            )
    text = (
        "Many gradients into one bucket, with a cold cache; a copy reads and writes each byte once:"
    )
    return [text, "", *table(header, rows), ""]


def _step_lines(case: Case, emulated: bool) -> list[str]:
    plain_s = case.medians_s["plain"]
    rows = []
    for name in case.medians_s:
        seconds = case.medians_s[name]
        rows.append(
            (
                name,
                time_text(seconds),
                f"{seconds / plain_s:.3f}",
                f"{seconds / case.medians_s['ddp']:.3f}",
                str(case.facts.get(f"kernels of {name}", "-")),
                str(case.facts.get(f"copies of {name}", "-")),
                str(case.wrong_results.get(name, "-")),
            )
        )
    kernels = "operations" if emulated else "kernels"
    header = ("contender", "step", "/ plain", "/ DDP", kernels, "memcpy, memset", "wrong")
    millions = int(case.parameters["num_parameters"]) / 1e6
    text = (
        f"{case.name}: {millions:.3g}M parameters in {case.parameters['dtype']}, "
        f"{case.parameters['num_tokens']} tokens a step; forward, backward and optimizer:"
    )
    return [text, "", *table(header, rows), ""]


def aims(record: Record) -> list[Aim]:
    found = []
    shares = [
        (case.medians_s[COPY] / case.medians_s["fused pack"], case.name)
        for case in of_kind(record, "pack")
        if int(case.parameters["nbytes"]) >= AIMED_FROM_NBYTES
    ]
    if shares:
        measured, where = min(shares)
        text = "fused pack from 64 MiB, share of the copy's bandwidth"
        found.append(Aim(text, AIMED_SHARE, measured, True, "", where))
    launches = [
        (float(case.facts["launches of fused pack"]), case.name)
        for case in of_kind(record, "pack")
        if "launches of fused pack" in case.facts
    ]
    if launches:
        measured, where = max(launches)
        found.append(Aim("fused pack, kernel launches", 1, measured, False, "", where))
    for case in of_kind(record, "step"):
        ratio = case.medians_s[AIMED_CONTENDER] / case.medians_s["ddp"]
        found.append(Aim("step, of DDP's", 1.0, ratio, False, "", case.name))
    return found
