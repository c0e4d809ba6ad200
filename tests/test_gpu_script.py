"""tests/gpu/run.sh works: emulated it checks everything, and a check that fails is seen to fail."""

import dataclasses
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "tests" / "gpu"
sys.path.append(str(ROOT))  # last: an installed pydist goes before the source tree

from bench import command_line, gpu, render  # noqa: E402  (found through the line above)
from bench.record import Record, load  # noqa: E402

TIMEOUT_S = 900
SECTIONS = (
    "kernels",
    "communicator",
    "training",
    "pipeline",
    "pack_bench",
    "step_bench",
    "two_ranks",
)


# What torch does on the CPU is in no graph.
NEED_A_GPU = (
    "gradients: a step captured in a graph",
    "gradients and loss: a step captured in a graph",
)


def run_script(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(FOLDER / "run.sh"), *arguments],
        env={**os.environ, "PYTHON": sys.executable, **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@dataclasses.dataclass
class Emulated:
    """One run of everything."""

    output: str
    record: Record


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    out = tmp_path_factory.mktemp("gpu") / "gpu.json"
    run = run_script("--emulate", "--out", str(out))
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
    return Emulated(run.stdout, load(out))


@pytest.mark.parametrize("section", SECTIONS)
def test_every_section_passes(emulated: Emulated, section: str) -> None:
    checks = [c for c in gpu.checks(emulated.record) if c.parameters["section"] == section]
    assert checks, "nothing was checked"
    for case in checks:
        expected = "skipped" if case.name in NEED_A_GPU else "passed"
        assert case.facts["outcome"] == expected, f"{case.name}: {case.facts['detail']}"
        assert f" {case.name} |" in emulated.output


def test_there_are_no_other_sections(emulated: Emulated) -> None:
    found = {case.parameters["section"] for case in gpu.checks(emulated.record)}
    assert found == set(SECTIONS)


def test_the_table_says_that_this_is_no_gpu(emulated: Emulated) -> None:
    assert "emulated" in emulated.output
    assert "this is no GPU" in emulated.output
    assert "Aims:" not in emulated.output, "tiny sizes on a CPU say nothing about aims"


def test_the_record_has_all_samples(emulated: Emulated) -> None:
    record = emulated.record
    assert record.mode == "quick"
    assert record.date
    assert {"card", "driver", "cpu"} <= record.machine.keys()
    assert {"python", "torch", "pydist"} <= record.versions.keys()
    timed = gpu.of_kind(record, "pack") + gpu.of_kind(record, "step")
    assert len({case.parameters["kind"] for case in timed}) == 2
    for case in timed:
        assert case.medians_s == case.recomputed_medians_s()
        assert all(min(samples) > 0 for samples in case.samples_s.values())
        assert not any(case.wrong_results.values()), case.name


# One check of each section that compares values.
PLANTED = (
    ("kernels", "reduce, float32 to bfloat16: sums of up to 17 segments"),
    ("training", "gradients: float32"),
    ("pipeline", "gradients and loss: 1f1b, 1 stages"),
)


@pytest.mark.parametrize(("section", "check"), PLANTED)
def test_a_wrong_element_fails_the_run(section: str, check: str, tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    run = run_script("--emulate", "--only", section, "--plant", check, "--out", str(out))
    assert run.returncode == 1, f"{run.stdout}\n{run.stderr}"
    failed = gpu.failed(load(out))
    assert [case.name for case in failed] == [check]
    assert "elements differ" in str(failed[0].facts["detail"])
    assert " passed, 1 failed, " in run.stdout


ENDINGS = {
    "hangs": ("time.sleep(60)", "not done after its limit of 4 s"),
    "dies": ("os.abort()", "status -6"),
    "raises": ("raise ValueError('of the section')", "status 1"),
}


def test_a_section_that_does_not_end_well_keeps_its_rows(tmp_path: Path) -> None:
    for name, (ending, _) in ENDINGS.items():
        (tmp_path / f"{name}.py").write_text(
            textwrap.dedent(f"""
                import os, time
                def run(place, rows):
                    rows.add("before", "passed", 0.0, "")
                    {ending}
            """)
        )
    code = f"""
import sys
sys.path[:0] = [{str(tmp_path)!r}, {str(FOLDER)!r}]
sys.path.append({str(ROOT)!r})
import json, pathlib
from place import Place
from sections import Section, run_section
folder = pathlib.Path({str(tmp_path)!r})
for name in {list(ENDINGS)}:
    cases = run_section(Section(name, 4, enters=False), Place(True), 4, folder, None)
    print(json.dumps([[case.name, case.facts["outcome"], case.facts["detail"]] for case in cases]))
"""
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    for line, (_, expected) in zip(run.stdout.splitlines(), ENDINGS.values(), strict=True):
        before, after = json.loads(line)
        assert before == ["before", "passed", ""]
        assert after[:2] == ["the whole section", "failed"]
        assert expected in after[2]


def test_a_machine_without_a_gpu_says_what_it_lacks() -> None:
    run = run_script(CUDA_VISIBLE_DEVICES="")
    assert run.returncode == 1
    assert "This machine lacks" in run.stderr


def measured_on_a_gpu(record: Record) -> Record:
    """As it would be: the same samples, said to be a GPU's."""
    machine = {**record.machine, "card": "a card"}
    return dataclasses.replace(record, mode="full", machine=machine)


def test_results_of_a_gpu_get_a_section_with_their_aims(emulated: Emulated) -> None:
    page = render.rendered([measured_on_a_gpu(emulated.record)], {})
    assert "## gpu" in page
    assert "Card: a card" in page
    assert "| step, of DDP's |" in page.replace("  ", "")
    assert "measured on a GPU" not in page
    assert "No figure here was measured on a GPU" in render.rendered([], {})


def test_aims_are_met_or_missed_by_the_samples(emulated: Emulated) -> None:
    record = measured_on_a_gpu(emulated.record)
    (step,) = gpu.of_kind(record, "step")
    own_s = step.samples_s[gpu.AIMED_CONTENDER]
    for factor, met in ((2.0, True), (0.5, False)):
        samples_s = {**step.samples_s, "ddp": [factor * s for s in own_s]}
        changed = dataclasses.replace(step, samples_s=samples_s, medians_s={})
        (aim,) = gpu.aims(dataclasses.replace(record, cases=[changed]))
        assert aim.met is met
    assert "Aims:" in command_line.lines_of(record)
