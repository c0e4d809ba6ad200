"""Owns the tests of what is installed and of importing it: version, stub, archives, refusals."""

import contextlib
import inspect
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch

import pydist
from pydist import _C, _build_info, _import_checks

ROOT = Path(__file__).parents[1]
PACKAGE = Path(pydist.__file__).parent


def import_pydist(
    folder: Path, *path: Path, no_site: bool = False
) -> "subprocess.CompletedProcess[str]":
    """`import pydist` by a new interpreter in that folder, which comes first on its path."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(map(str, path)))
    options = ["-S"] if no_site else []
    return subprocess.run(
        [sys.executable, *options, "-c", "import pydist"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def refusal(result: "subprocess.CompletedProcess[str]") -> str:
    """The one sentence of the ImportError that an import ended with."""
    assert result.returncode != 0
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: pydist "), result.stderr
    return last


def copy_of_package(folder: Path, built: bool = True) -> Path:
    """The package as a folder of its own; without its extension where it is not `built`."""
    ignored = [] if built else ["*.so", "_build_info.py"]
    target = folder / "pydist"
    shutil.copytree(PACKAGE, target, ignore=shutil.ignore_patterns("__pycache__", *ignored))
    return target


def fake_torch(folder: Path, torch_version: str, distributed: bool | None) -> None:
    """A package named torch, as far as the checks look at it."""
    (folder / "torch" / "distributed").mkdir(parents=True)
    text = f"__version__ = {torch_version!r}\n"
    if distributed is not None:
        text += "from torch import distributed\n"
        code = f"def is_available():\n    return {distributed}\n"
        (folder / "torch" / "distributed" / "__init__.py").write_text(code)
    (folder / "torch" / "__init__.py").write_text(text)


def test_the_version_is_in_one_place() -> None:
    written = re.findall(r'__version__ = "([^"]+)"', (PACKAGE / "_version.py").read_text())
    assert written == [pydist.__version__]
    for name in ("pyproject.toml", "setup.py", "build_backend/pydist_build.py"):
        assert pydist.__version__ not in re.findall(r'"([\d.]+)"', (ROOT / name).read_text()), name
    with contextlib.suppress(PackageNotFoundError):  # built in place, not installed
        assert version("pydist") == pydist.__version__


def test_every_public_name_exists() -> None:
    assert len(set(pydist.__all__)) == len(pydist.__all__)
    for name in pydist.__all__:
        assert getattr(pydist, name) is not None


def test_errors_are_what_users_of_torch_catch() -> None:
    assert issubclass(pydist.UsageError, ValueError)
    for kind in (pydist.MismatchError, pydist.PeerError, pydist.TimeoutError):
        assert issubclass(kind, RuntimeError)
        assert kind.__module__ == "pydist"
    assert issubclass(pydist.TimeoutError, TimeoutError)


def test_the_stub_equals_the_module(tmp_path: Path) -> None:
    """mypy's stubtest compares names, arguments and kinds of everything in pydist._C."""
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy.stubtest", "pydist._C", "--ignore-disjoint-bases"]
    config = tmp_path / "mypy.ini"
    config.write_text("[mypy]\nignore_missing_imports = True\nfollow_imports = skip\n")
    # What pybind11 gives every class: its metaclass, and a constructor that refuses.
    pybind11 = tmp_path / "allowed"
    pybind11.write_text("pydist\\._C\\.[A-Z]\\w*(\\.__init__)?\n")
    path = os.pathsep.join([str(PACKAGE.parent), *sys.path])
    result = subprocess.run(
        [*command, "--mypy-config-file", str(config), "--allowlist", str(pybind11)],
        capture_output=True,
        text=True,
        timeout=300,
        env=dict(os.environ, MYPYPATH=str(PACKAGE.parent), PYTHONPATH=path),
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_everything_in_the_extension_has_a_docstring() -> None:
    for name, value in vars(_C).items():
        if not name.startswith("_") and (inspect.isroutine(value) or inspect.isclass(value)):
            assert value.__doc__, f"_C.{name} says nothing"


def test_the_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()
    assert (PACKAGE / "_C.pyi").exists()


def test_no_instruction_set_flag_is_passed() -> None:
    text = (ROOT / "setup.py").read_text()
    assert not re.search(r"-m(arch|tune|cpu|avx|fma|sse)", text)


def test_the_build_says_what_it_was_made_for() -> None:
    assert torch.__version__ == _build_info.TORCH_VERSION


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2.13.0+cpu", (2, 13, 0)),
        ("2.9", (2, 9, 0)),
        ("2.14.0a0+git0123", (2, 14, 0)),
        ("unknown", None),
    ],
)
def test_versions_are_parsed(text: str, expected: tuple[int, ...] | None) -> None:
    assert _import_checks.parse_version(text) == expected


def test_local_parts_of_versions_do_not_matter() -> None:
    _import_checks.check_built_for("2.13.0", "2.13.0+cpu")
    with pytest.raises(ImportError, match=r"built for torch 2\.9\.0 but found torch 2\.13\.0"):
        _import_checks.check_built_for("2.13.0", "2.9.0")


def test_another_torch_is_refused_before_the_extension_loads(tmp_path: Path) -> None:
    copy_of_package(tmp_path)
    fake_torch(tmp_path, "2.10.0", distributed=True)
    text = refusal(import_pydist(tmp_path))
    assert f"was built for torch {torch.__version__} but found torch 2.10.0" in text
    assert "--force-reinstall" in text


def test_a_missing_torch_is_one_sentence(tmp_path: Path) -> None:
    copy_of_package(tmp_path)
    assert "found none in this environment" in refusal(import_pydist(tmp_path, no_site=True))


@pytest.mark.parametrize("distributed", [False, None])
def test_a_torch_without_distributed_is_one_sentence(
    tmp_path: Path, distributed: bool | None
) -> None:
    copy_of_package(tmp_path)
    fake_torch(tmp_path, "2.13.0", distributed)
    assert "built without it" in refusal(import_pydist(tmp_path))


def test_an_unbuilt_source_tree_is_one_sentence(tmp_path: Path) -> None:
    copy_of_package(tmp_path, built=False)
    text = refusal(import_pydist(tmp_path))
    assert f"imported from {tmp_path / 'pydist'}" in text
    assert "pip install --no-build-isolation -e ." in text


def test_another_platform_is_one_sentence() -> None:
    _import_checks.check_platform("linux")
    with pytest.raises(ImportError, match="runs on Linux only, and this is 'darwin'"):
        _import_checks.check_platform("darwin")


def backend(hook: str, folder: Path, tree: Path = ROOT) -> Path:
    """Calls a hook of the build backend as a frontend does; returns the archive it made."""
    sys_path = [str(ROOT / "build_backend"), *sys.path]
    code = f"import pydist_build as b; print(); print(b.{hook}({str(folder)!r}))"
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tree,
        env=dict(os.environ, PYTHONPATH=os.pathsep.join(sys_path)),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return folder / result.stdout.splitlines()[-1]


def copy_of_tree(folder: Path) -> Path:
    names = ("__pycache__", "build", "build-cpp", "*.so", "_build_info.py", "*.egg-info", ".*")
    return Path(shutil.copytree(ROOT, folder / "tree", ignore=shutil.ignore_patterns(*names)))


def test_the_source_archive_can_be_built_from(tmp_path: Path) -> None:
    archive = backend("build_sdist", tmp_path, copy_of_tree(tmp_path))
    assert archive.name == f"pydist-{pydist.__version__}.tar.gz"
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    wanted = {"setup.py", "pyproject.toml", "LICENSE", "build_backend/pydist_build.py"}
    wanted.add("build_backend/cuda_build.py")
    wanted |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").rglob("*.*")}
    wanted |= {"pydist/py.typed", "pydist/_C.pyi", "pydist/__init__.py", "pydist_backend.py"}
    assert wanted <= names, sorted(wanted - names)
    assert not {name for name in names if name.endswith((".so", "_build_info.py"))}


@pytest.mark.slow
def test_the_wheel_holds_the_package_alone(tmp_path: Path) -> None:
    archive = backend("build_wheel", tmp_path, copy_of_tree(tmp_path))
    names = zipfile.ZipFile(archive).namelist()
    assert {name.split("/")[0].partition("-")[0] for name in names} == {
        "pydist",
        "pydist_backend.py",
    }
    inside = {name.partition("/")[2] for name in names}
    assert {"py.typed", "_C.pyi", "_build_info.py", "__init__.py"} <= inside
    assert any(name.endswith(".so") for name in inside)


def test_the_backend_asks_for_torch_only_where_there_is_none(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.append(sys.argv[1]); import pydist_build as b; "
        "b.candidate_folders = (lambda: iter([b.Path(sys.argv[2])])) if sys.argv[2] else "
        "b.candidate_folders; print(b.get_requires_for_build_wheel())"
    )
    found = Path(torch.__file__).parents[1]
    for folder, expected in ((str(tmp_path), "['torch>=2.9']"), (str(found), "[]")):
        result = subprocess.run(
            [sys.executable, "-c", code, str(ROOT / "build_backend"), folder],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert result.stdout.strip() == expected, result.stderr
