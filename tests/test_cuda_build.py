"""Owns the tests of the decision whether pydist._cuda is built; their toolkits are scripts."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "build_backend"))

import cuda_build

ROOT = Path(__file__).parents[1]
NVCC = """#!/bin/sh
case "$1" in
  --version) echo "Cuda compilation tools, release {release}, V{release}.88" ;;
  --list-gpu-arch) printf "{architectures}" ;;
  --dryrun) echo "#$ TOP={home}/bin/.." >&2 ;;
esac
"""


def make_executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def make_toolkit(
    home: Path, release: str = "13.0", architectures: str = "compute_80\\ncompute_90\\n"
) -> Path:
    text = NVCC.format(release=release, architectures=architectures, home=home)
    make_executable(home / "bin" / "nvcc", text)
    (home / "lib64").mkdir()
    (home / "lib64" / "libcudart.so").touch()
    return home


@pytest.fixture
def site_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one; and no toolkit in the environment."""
    for name in ("CUDA_HOME", "CUDA_PATH", "PYDIST_CUDA", "TORCH_CUDA_ARCH_LIST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    folder = tmp_path / "site-packages"
    folder.mkdir()
    return folder


def decide(site_packages: Path, cuda: str | None = "13.0") -> tuple[cuda_build.CudaBuild, str]:
    build, line = cuda_build.decide("2.14.1", cuda, site_packages)
    assert build is not None, line
    return build, line


def test_the_toolkit_that_cuda_home_names(
    site_packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = make_toolkit(tmp_path / "cuda")
    monkeypatch.setenv("CUDA_HOME", str(home))
    build, line = decide(site_packages)
    assert build.home == home
    assert build.release == "13.0"
    assert build.architectures == "8.0;9.0+PTX"
    assert build.runtime_library == home / "lib64" / "libcudart.so"
    assert line.startswith(f"pydist: building for CUDA 13.0 in {home}, architectures 8.0;9.0+PTX")


def test_newer_chips_where_nvcc_knows_them(
    site_packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = "compute_80\\ncompute_90\\ncompute_100\\n"
    home = make_toolkit(tmp_path / "cuda", architectures=known)
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert decide(site_packages)[0].architectures == "8.0;9.0+PTX;10.0"
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.6")
    assert decide(site_packages)[0].architectures == "8.6"


def test_a_script_on_the_path_leads_to_its_toolkit(
    site_packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = make_toolkit(tmp_path / "cuda")
    wrapper = tmp_path / "wrappers" / "nvcc"
    make_executable(wrapper, f'#!/bin/sh\nexec {home}/bin/nvcc "$@"\n')
    monkeypatch.setenv("PATH", f"{wrapper.parent}:/usr/bin:/bin")
    assert decide(site_packages)[0].home == home


def test_the_header_of_the_nccl_that_belongs_to_torchs_cuda(
    site_packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(make_toolkit(tmp_path / "cuda")))
    include = site_packages / "nvidia" / "nccl" / "include"
    include.mkdir(parents=True)
    (include / "nccl.h").touch()
    wheel = site_packages / "nvidia_nccl_cu12-2.28.7.dist-info"
    wheel.mkdir()
    (wheel / "METADATA").write_text("Name: nvidia-nccl-cu12\nVersion: 2.28.7\n")
    assert decide(site_packages)[0].nccl_include != include
    wheel.rename(site_packages / "nvidia_nccl_cu13-2.28.7.dist-info")
    (site_packages / "nvidia_nccl_cu13-2.28.7.dist-info" / "METADATA").write_text(
        "Name: nvidia-nccl-cu13\nVersion: 2.28.7\n"
    )
    build, line = decide(site_packages)
    assert build.nccl_include == include
    assert str(include) in line


def test_what_is_missing_is_said(
    site_packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def line_of(cuda: str | None) -> str:
        build, line = cuda_build.decide("2.14.1", cuda, site_packages)
        assert build is None
        with monkeypatch.context() as patch:
            patch.setenv("PYDIST_CUDA", "1")
            with pytest.raises(cuda_build.Unavailable) as error:
                cuda_build.decide("2.14.1", cuda, site_packages)
            assert line == f"pydist: building without CUDA: {error.value}"
        return line

    assert "torch 2.14.1 was built without CUDA" in line_of(None)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    assert f"CUDA_HOME={tmp_path / 'nowhere'} has no bin/nvcc" in line_of("13.0")
    monkeypatch.setenv("CUDA_HOME", str(make_toolkit(tmp_path / "cuda", release="12.8")))
    assert "torch 2.14.1 is for CUDA 13.0, but" in line_of("13.0")
    (tmp_path / "cuda" / "lib64" / "libcudart.so").unlink()
    assert "has no libcudart.so" in line_of("12.8")


def test_the_wish_counts(
    site_packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(make_toolkit(tmp_path / "cuda")))
    monkeypatch.setenv("PYDIST_CUDA", "0")
    assert cuda_build.decide("2.14.1", "13.0", site_packages) == (
        None,
        "pydist: building without CUDA, as PYDIST_CUDA=0 says",
    )
    monkeypatch.setenv("PYDIST_CUDA", "yes")
    with pytest.raises(cuda_build.Unavailable, match="0, 1 or unset, not 'yes'"):
        cuda_build.decide("2.14.1", "13.0", site_packages)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_setup_refuses_a_wish_that_it_cannot_grant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYDIST_CUDA", "1")
    command = [sys.executable, "setup.py", "--version"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode != 0
    expected = f"PYDIST_CUDA=1: torch {torch.__version__} was built without CUDA"
    assert expected in result.stderr
