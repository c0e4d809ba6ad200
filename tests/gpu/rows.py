"""Owns what a section reports: one row for each check, one case for each thing that was timed."""

import contextlib
import dataclasses
import json
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from bench.record import Case, Parameter

# Enough for the sentence that says what went wrong; the traceback is in the section's log.
DETAIL_LENGTH = 300


class Skip(Exception):
    """Says why a check cannot run here."""


class Rows:
    """Writes every row at once, so that a section that dies or hangs keeps those before."""

    def __init__(
        self,
        section: str,
        path: Path,
        planted: str | None = None,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        """`settle` raises what the device has run into."""
        self.section = section
        self._path = path
        self._settle = settle
        self._planted = planted
        self._check = ""
        self._rank = 0
        self._raises = False

    def of_rank(self, rank: int, settle: Callable[[], None]) -> "Rows":
        """For a process of its own, which ends at its first failure: the others wait for it.

        Only the first rank tells what has passed.
        """
        rows = Rows(self.section, self._path, self._planted, settle)
        rows._rank = rank
        rows._raises = True
        return rows

    @contextlib.contextmanager
    def check(self, name: str) -> Iterator[None]:
        """What is raised inside becomes the row's outcome, and the section goes on."""
        self._check = name
        outcome, detail = "passed", ""
        started_s = time.perf_counter()
        try:
            yield
            self._settle()  # what the device runs into belongs to this row
        except Skip as reason:
            outcome, detail = "skipped", str(reason)
        except Exception as error:
            traceback.print_exc()
            outcome, detail = "failed", f"{type(error).__name__}: {error}"
        seconds = time.perf_counter() - started_s
        if self._rank == 0:
            self.add(name, outcome, seconds, detail)
        elif outcome == "failed":
            self.add(f"{name} (rank {self._rank})", outcome, seconds, detail)
        if outcome == "failed" and self._raises:
            raise SystemExit(1)

    def add(self, name: str, outcome: str, seconds: float, detail: str) -> None:
        self.add_case(check_case(self.section, name, outcome, seconds, detail))

    def add_case(self, case: Case) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(dataclasses.asdict(case)) + "\n")

    def expect_close(
        self, found: Tensor, expected: Tensor, relative: float, absolute: float | None = None
    ) -> None:
        """Every element as near as that; `absolute` is `relative` of the largest if not given.

        NaN has to meet NaN, and infinity the same one.
        """
        if self._planted == self._check:
            found = with_one_changed(found)
        problem = difference(found, expected, relative, absolute)
        if problem is not None:
            raise AssertionError(problem)

    def expect_equal(self, found: Tensor, expected: Tensor) -> None:
        """The same bits, but for those of a NaN."""
        self.expect_close(found, expected, 0.0, 0.0)


def difference(
    found: Tensor, expected: Tensor, relative: float, absolute: float | None = None
) -> str | None:
    """What is wrong, in words: where the first wrong element is, and what it should be."""
    if found.shape != expected.shape:
        return f"found shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    if found.numel() == 0:
        return None
    found, expected = found.detach().double().flatten(), expected.detach().double().flatten()
    if absolute is None:
        absolute = relative * float(torch.where(expected.isfinite(), expected, 0).abs().max())
    usual = expected.isfinite() & found.isfinite()
    same = (found == expected) & (found.signbit() == expected.signbit())
    near = usual & ((found - expected).abs() <= relative * expected.abs() + absolute)
    near &= bool(relative or absolute)
    good = same | near | (found.isnan() & expected.isnan())
    num_wrong = int((~good).sum())
    if num_wrong == 0:
        return None
    worst = int((~good).nonzero()[0])
    return (
        f"{num_wrong} of {found.numel()} elements differ; element {worst}: found "
        f"{found[worst].item()!r}, expected {expected[worst].item()!r}"
    )


def with_one_changed(tensor: Tensor) -> Tensor:
    """A copy with one element off by as much as the largest: what every check has to notice."""
    changed = tensor.detach().double().flatten()
    if changed.numel() > 0:
        middle = changed.numel() // 2
        changed[middle] = changed[middle].nan_to_num() + changed.nan_to_num().abs().max() + 1
    return changed.view(tensor.shape)


def check_case(section: str, name: str, outcome: str, seconds: float, detail: str) -> Case:
    parameters: dict[str, Parameter] = {"kind": "check", "section": section}
    facts: dict[str, Parameter] = {
        "outcome": outcome,
        "detail": " ".join(detail.split())[:DETAIL_LENGTH],
    }
    wrong = {"pydist": int(outcome == "failed")}
    return Case(name, parameters, {"pydist": [seconds]}, wrong, facts)
