"""Owns the fixtures, and what a whole session must not do: skip quietly or leave things behind."""

import ctypes
import dataclasses
import importlib.metadata
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
# Where bench is; last, so that an installed pydist goes before the source tree.
sys.path.append(str(Path(__file__).parent.parent))

import ranks  # found through the line above

# (part of a test's id, why it may be skipped). Every other skip fails the session.
ALLOWED_SKIPS: tuple[tuple[str, str], ...] = (
    ("test_a_memory_limit_is_an_error", "memory cgroups can be made by root alone"),
    ("test_hosts_network.py", "network namespaces take root"),
    ("test_hosts_losses.py", "network namespaces take root"),
    ("test_network.py", "network namespaces take root"),
    ("test_errors_of_the_cuda_module", "pydist is built without CUDA"),  # make cuda-check runs it
    ("test_setup_refuses_a_wish", "this torch has CUDA"),
)

# torch's own tests are those of one version, whose names tests/conformance lists.
CONFORMANCE_VERSION = "2.13"
_has_conformance = importlib.metadata.version("torch").startswith(f"{CONFORMANCE_VERSION}.")
collect_ignore_glob = [] if _has_conformance else ["conformance/test_torch_*.py"]

PR_SET_CHILD_SUBREAPER = 36
SHARED_MEMORY = Path("/dev/shm")


@dataclasses.dataclass(frozen=True)
class Transport:
    """A way for ranks to reach each other; its pools' ranks are told to use no other."""

    name: str

    def pool(self, world_size: int) -> ranks.RankPool:
        return ranks.get_pool(world_size, **self.env)

    @property
    def env(self) -> dict[str, str]:
        """For fresh_ranks(..., env=transport.env)."""
        return {"PYDIST_TRANSPORT": self.name}


# Scoped to the session, so that pytest groups the tests of a transport and few pools are alive.
@pytest.fixture(scope="session", params=["shared_memory", "process_group"])
def transport(request: pytest.FixtureRequest) -> Transport:
    return Transport(request.param)


@pytest.fixture
def pool1() -> ranks.RankPool:
    return ranks.get_pool(1)


@pytest.fixture
def pool2() -> ranks.RankPool:
    return ranks.get_pool(2)


@pytest.fixture
def pool3() -> ranks.RankPool:
    return ranks.get_pool(3)


@pytest.fixture
def pool4() -> ranks.RankPool:
    return ranks.get_pool(4)


@pytest.fixture
def pool8() -> ranks.RankPool:
    return ranks.get_pool(8)


def pytest_report_header() -> list[str]:
    if _has_conformance:
        return []
    return [f"tests/conformance needs torch {CONFORMANCE_VERSION}, and is left out"]


def pytest_sessionstart(session: pytest.Session) -> None:
    # Orphans of ranks become children of this process, so that the end of the session sees them.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    session.stash[_shared_memory_before] = _shared_memory_names()
    session.stash[_children_before] = set(_children())


_shared_memory_before = pytest.StashKey[set[str]]()
_children_before = pytest.StashKey[set[int]]()
_complaints = pytest.StashKey[list[str]]()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """What is left behind or was skipped quietly; pytest_terminal_summary prints it."""
    ranks.close_all()
    found = [f"while closing: {problem}" for problem in ranks.problems]
    found += _leftover_processes(session.stash[_children_before])
    found += _leftover_shared_memory(session.stash[_shared_memory_before])
    found += [f"skipped, and not in ALLOWED_SKIPS: {test}" for test in _unexpected_skips(session)]
    session.config.stash[_complaints] = found
    if found and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for complaint in terminalreporter.config.stash.get(_complaints, []):
        terminalreporter.write_line(f"FAILED session: {complaint}", red=True)


def _unexpected_skips(session: pytest.Session) -> Iterator[str]:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    for report in reporter.stats.get("skipped", []) if reporter else []:
        if not any(part in report.nodeid for part, _ in ALLOWED_SKIPS):
            yield f"{report.nodeid}: {report.longreprtext}"


def _children() -> list[int]:
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return found


def _leftover_processes(before: set[int]) -> list[str]:
    """Children that are not gone within a second; orphans that have ended are reaped."""
    deadline = time.monotonic() + 1
    while True:
        left = {pid: text for pid in set(_children()) - before if (text := _describe(pid))}
        if not left or time.monotonic() > deadline:
            return [f"process {pid} is left behind: {text}" for pid, text in left.items()]
        time.sleep(0.05)


def _describe(pid: int) -> str | None:
    """The command line of a process; None once it has ended."""
    try:
        if os.waitpid(pid, os.WNOHANG)[0] == pid:
            return None
        text = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
        return text or "a process without a command line"
    except (ChildProcessError, FileNotFoundError):
        return None


def _shared_memory_names() -> set[str]:
    return {path.name for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.exists() else set()


def _leftover_shared_memory(before: set[str]) -> list[str]:
    """New names that no living process of somebody else's has mapped or open."""
    left = _shared_memory_names() - before
    if not left:
        return []
    time.sleep(1)  # another program's short-lived names go by themselves
    held = _names_in_use()
    left = {name for name in left & _shared_memory_names() if name not in held}
    return [f"/dev/shm/{name} is left behind" for name in sorted(left)]


def _names_in_use() -> set[str]:
    prefix = f"{SHARED_MEMORY}/"
    held: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "maps").read_text().split()
            words += [os.readlink(link) for link in (process / "fd").iterdir()]
        except OSError:
            continue
        held |= {word[len(prefix) :] for word in words if word.startswith(prefix)}
    return held
