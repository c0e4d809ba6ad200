"""Owns the direction of the layers: no file includes or imports what stands above it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CSRC = ROOT / "csrc"

# The lowest first; bindings are the files that stand directly in csrc/. cuda is another module.
CPP_LAYERS = [
    "base",
    "transport",
    "collective",
    "backend",
    "bucket",
    "pipeline",
    "bindings",
    "cuda",
]
# What that one shares with the engine's; it is linked with none of its sources.
SHARED_WITH_CUDA = ("base/", "collective/device_kernels/", "transport/nccl_api.h")
# Files of the pure layers that may know torch, and files of other layers that may not.
WITH_TORCH_IN_PURE_LAYERS = {"transport/c10d_store.h", "transport/c10d_store.cpp"}
PURE_IN_OTHER_LAYERS = [
    "bucket/arena_units",
    "bucket/copy_tiles",
    "bucket/device_pack",
    "bucket/host_round",
    "bucket/layout",
    "bucket/ordered_round",
    "bucket/pack",
    "bucket/round",
    "bucket/round_stats",
    "bucket/shared_round",
    "pipeline/action",
    "pipeline/builder_kinds",
    "pipeline/builders",
    "pipeline/builders_forward",
    "pipeline/builders_looped",
    "pipeline/builders_v",
    "pipeline/builders_zero_bubble",
    "pipeline/csv",
    "pipeline/grid",
    "pipeline/lowering",
    "pipeline/readiness",
    "pipeline/arena_blocks",
    "pipeline/channel_options",
    "pipeline/description_book",
    "pipeline/failure_record",
    "pipeline/schedule",
    "pipeline/search",
    "pipeline/search_problem",
    "pipeline/simulator",
    "pipeline/state_search",
    "pipeline/validator",
    "pipeline/waiting_cycle",
]
PURE_LAYERS = ["base", "transport", "collective"]
CUDA_HEADER = re.compile(r"^(cuda|nccl|(c10|ATen)/cuda/)")
TORCH_HEADER = re.compile(r"^(torch|ATen|c10|caffe2|pybind11|Python\.h)")

# The lowest first; modules of one line do not import each other.
PYTHON_LAYERS = [
    {"_version", "errors", "_build_info"},
    {"_import_checks", "_C", "_cuda", "_schedule_plot"},
    {"_device", "_message_queues", "schedule"},
    {"_process_group", "_torch_groups"},
    {"_hosts"},
    {"_connect"},
    {"_engine", "backend"},
    {"_collective_calls"},
    {"_messages", "_rooted"},
    {
        "_advice",
        "collectives",
        "_backward_optimizers",
        "_balance",
        "_buffers",
        "_comm_hooks",
        "_join_session",
        "_keywords",
        "_mesh",
        "_mixed_precision",
        "_module_watch",
        "_nesting",
        "_outputs",
        "_pipeline_groups",
        "_partition",
        "_running_statistics",
        "_sparse",
        "_trees",
        "_unsplit",
        "_verification",
    },
    {
        "_auto_schedule",
        "_clip",
        "_dynamo",
        "_gather",
        "_layer_times",
        "_microbatches",
        "_stage",
        "_stage_device",
        "_tied_weights",
        "grad_scaler",
    },
    {"_optim_state", "_pipeline_state"},
    {"report", "skip", "sync_batchnorm"},
    {"_arguments", "_join", "_logging_data", "_replica_audit", "_torch_surface"},
    {"_wrapping"},
    {"_hook_surface"},
    {"data_parallel"},
    {"_pipeline_state_surface", "_pipeline_step", "_stage_reduction"},
    {"_pipeline_build", "_schedule_command"},
    {"_cli", "pipeline_parallel"},
    {"__init__", "__main__"},
]

SOURCES = sorted(
    path for path in CSRC.rglob("*") if path.suffix in {".h", ".cpp", ".inl", ".cuh", ".cu"}
)
MODULES = sorted((ROOT / "pydist").glob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(CSRC).as_posix()


def layer_of(name: str) -> str:
    return name.split("/")[0] if "/" in name else "bindings"


def includes(path: Path) -> Iterator[str]:
    yield from re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.MULTILINE)


def is_pure(name: str) -> bool:
    if layer_of(name) in PURE_LAYERS:
        return name not in WITH_TORCH_IN_PURE_LAYERS
    return name.rpartition(".")[0] in PURE_IN_OTHER_LAYERS


def test_there_is_something_to_check() -> None:
    assert {layer_of(name_of(path)) for path in SOURCES} <= set(CPP_LAYERS)
    assert any(name_of(path).startswith("base/") for path in SOURCES)
    assert MODULES


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_file_includes_only_what_stands_below(path: Path) -> None:
    own = CPP_LAYERS.index(layer_of(name_of(path)))
    for included in includes(path):
        if (CSRC / included).exists():
            layer = layer_of(included)
            assert CPP_LAYERS.index(layer) <= own, f"{name_of(path)} includes {included}"
        else:
            assert not included.startswith(("../", "./", "csrc/")), f"{included}: not from csrc/"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_torch_headers_stay_where_they_belong(path: Path) -> None:
    name = name_of(path)
    for included in includes(path):
        if is_pure(name):
            assert not TORCH_HEADER.match(included), f"pure {name} includes {included}"
        if layer_of(name) != "bindings":
            assert included != "torch/extension.h", f"{name}: 28 s of compile time"
            assert not included.startswith("pybind11"), f"{name}: pybind11 outside the bindings"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_cuda_stays_where_it_belongs(path: Path) -> None:
    name = name_of(path)
    for included in includes(path):
        if layer_of(name) == "cuda" and (CSRC / included).exists():
            assert included.startswith(("cuda/", *SHARED_WITH_CUDA)), f"{name} includes {included}"
        elif layer_of(name) == "cuda":
            assert not included.startswith("ATen/"), f"{name}: 15 s of compile time for {included}"
        elif path.suffix != ".cuh":
            assert not CUDA_HEADER.match(included), f"{name} is compiled without {included}"
        if path.suffix in {".cu", ".cuh"}:
            assert not TORCH_HEADER.match(included), f"{name}: 24 s of compile time for {included}"


def test_a_pure_file_includes_only_pure_files() -> None:
    for path in SOURCES:
        for included in includes(path):
            if is_pure(name_of(path)) and (CSRC / included).exists():
                assert is_pure(included), f"pure {name_of(path)} includes {included}"


def imports(path: Path) -> Iterator[str]:
    """Modules that a file imports when it runs, in functions too; not those for types alone."""
    tree = ast.parse(path.read_text())
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
    typing_only = [node for node in blocks if ast.unparse(node.test).endswith("TYPE_CHECKING")]
    skipped = {inner for node in typing_only for inner in ast.walk(node)}
    for node in set(ast.walk(tree)) - skipped:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")
            if node.module == "pydist" and node.level == 0:
                yield from (f"pydist.{alias.name}" for alias in node.names)


def python_layer(module: str) -> int:
    for index, names in enumerate(PYTHON_LAYERS):
        if module in names:
            return index
    raise AssertionError(f"pydist/{module}.py has no place in PYTHON_LAYERS")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_module_imports_only_what_stands_below(path: Path) -> None:
    own = python_layer(path.stem)
    known = set().union(*PYTHON_LAYERS)
    for imported in imports(path):
        top, _, rest = imported.partition(".")
        assert top not in {"tests", "bench", "examples", ""}, f"{path.stem} imports {imported}"
        if top == "pydist" and rest.split(".")[0] in known:
            assert python_layer(rest.split(".")[0]) < own, f"{path.stem} imports {imported}"


def test_nothing_imports_the_tests() -> None:
    modules = {path.stem for path in (ROOT / "tests").glob("*.py")}
    for folder in ("pydist", "examples"):
        for path in (ROOT / folder).glob("*.py"):
            found = modules & {name.split(".")[0] for name in imports(path)}
            assert not found, f"{path.name} imports {found}"
