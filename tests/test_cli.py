"""Owns the tests of the command `pydist`."""

import subprocess
import sys
from pathlib import Path

import pytest

import pydist
from pydist import _cli, schedule


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        _cli.main(arguments)
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_it_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "pydist", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout == f"pydist {pydist.__version__}\n"


def test_a_schedule_is_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture, text = tmp_path / "f.png", tmp_path / "f.csv"
    size = ["--kind", "zb-v", "--ranks", "4", "--microbatches", "8"]
    assert _cli.main(["schedule", *size, "--plot", str(picture), "--write-csv", str(text)]) == 0
    shown = capsys.readouterr().out
    built = schedule.build("zb-v", 4, 8)
    assert shown.startswith(f"{built.title}\n{built.simulate()}")
    assert "makespan           25.5\n" in shown
    assert "makespan bubble    1.5 (5.9 %)" in shown
    assert "span bubble        0 (0.0 %)" in shown
    assert "peak activations   4 4 4 4 " in shown
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert text.read_text() == built.to_csv()

    assert _cli.main(["schedule", "--csv", str(text), "--forward", "2"]) == 0
    assert f"makespan           {built.simulate(2.0).makespan:g}\n" in capsys.readouterr().out


def test_kinds_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    """One row for each kind; what these sizes do not allow is said."""
    assert _cli.main(["schedule", "--ranks=4", "--microbatches=4", "--backward=1.5"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[0] == "kind"
    found = {row.split()[0]: row.split() for row in rows}
    assert found["1f1b"][1:3] == ["1", "17.5"]  # (m + p - 1)(F + B)
    assert "auto:" in found
    assert rows[-1].startswith("left out: schedule 'dualpipe-v' needs at least twice")
    assert {"gpipe", "zb-v", "interleaved-zb"} < set(found)


def test_an_order_that_costs_bits_is_noted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "descending.csv"
    path.write_text("0F0,0F1,0B1,0B0\n")
    assert _cli.main(["schedule", "--csv", str(path)]) == 0
    assert "gradients of stage 0 are not added in ascending order" in capsys.readouterr().out


def test_what_cannot_be_shown_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    size = ["--ranks", "2", "--microbatches", "2"]
    assert "give --ranks and --microbatches" in refusal(capsys, "schedule")
    error = refusal(capsys, "schedule", "--kind", "zb-v", "--stages-per-rank", "3", *size)
    assert error.startswith("pydist schedule: error: schedule 'zb-v' has 2 stages on each rank")
    assert "no schedule is called 'x'" in refusal(capsys, "schedule", "--kind", "x", *size)
    assert "No such file" in refusal(capsys, "schedule", "--csv", str(tmp_path / "none.csv"))
    assert "forward is -1.0" in refusal(capsys, "schedule", "--kind", "1f1b", "--forward=-1", *size)
    assert "COMMAND" in refusal(capsys)
