"""Owns the tests of conftest.py: a session that skips quietly or leaves things behind fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

LEAVES_A_PROCESS = """
import subprocess, sys
def test_it():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(8)"])
"""
LEAVES_AN_ORPHAN = """
import subprocess, sys
def test_it():
    subprocess.run([sys.executable, "-c", "import os, time; os.fork() == 0 and time.sleep(8)"])
"""
LEAVES_SHARED_MEMORY = """
def test_it():
    open("/dev/shm/pydist-test-leftover", "w").close()
"""
SKIPS = """
import pytest
def test_it():
    pytest.skip("no reason")
"""
IS_FINE = """
def test_it():
    pass
"""


def run_session(folder: Path, text: str) -> "subprocess.CompletedProcess[str]":
    """A pytest of its own with this suite's conftest.py."""
    (folder / "test_inner.py").write_text(text)
    lines = (TESTS / "conftest.py").read_text()
    here = "Path(__file__).parent"
    assert here in lines
    (folder / "conftest.py").write_text(lines.replace(here, f"Path({str(TESTS)!r})"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_inner.py"]
    return subprocess.run(
        command, cwd=folder, env=os.environ.copy(), capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (LEAVES_A_PROCESS, "is left behind"),
        (LEAVES_AN_ORPHAN, "is left behind"),
        (LEAVES_SHARED_MEMORY, "/dev/shm/pydist-test-leftover is left behind"),
        (SKIPS, "skipped, and not in ALLOWED_SKIPS"),
    ],
    ids=["process", "orphan", "shared memory", "skip"],
)
def test_a_session_fails_for_what_it_leaves(tmp_path: Path, text: str, complaint: str) -> None:
    try:
        result = run_session(tmp_path, text)
    finally:
        Path("/dev/shm/pydist-test-leftover").unlink(missing_ok=True)
    assert result.returncode == 1, result.stdout + result.stderr
    assert complaint in result.stdout


def test_a_clean_session_passes(tmp_path: Path) -> None:
    result = run_session(tmp_path, IS_FINE)
    assert result.returncode == 0, result.stdout + result.stderr
