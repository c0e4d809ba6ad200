"""Owns that the inspection of the kernels' machine code reads cuobjdump, and says what is worse."""

import dataclasses
import sys
from pathlib import Path

import pytest

CUDA = Path(__file__).parent / "cuda"
sys.path.append(str(CUDA))

import inspect_kernels  # noqa: E402 - found through the line above
from inspect_kernels import Facts  # noqa: E402

REDUCE = "void pydist::device::reduce<pydist::Float32, pydist::BFloat16>(pydist::Arguments)"
RESOURCES = f"""
Resource usage:
 Common:
  GLOBAL:0
 Function {REDUCE}:
  REG:40 STACK:8 SHARED:0 LOCAL:0 CONSTANT[0]:584 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function void at::native::another<float>(int):
  REG:9 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:584 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
INSTRUCTIONS = f"""
\t\tFunction : {REDUCE}
\t.headerflags\t@"EF_CUDA_SM90"
        /*0000*/                   LDC R1, c[0x0][0x28] ;          /* 0x00000a00ff017b82 */
        /*0010*/              @!P0 LDG.E.EF.128 R8, desc[UR4][R2.64] ;  /* 0x0000000402088981 */
        /*0020*/                   LD.E.128 R8, desc[UR4][R2.64] ;  /* 0x0000000402088981 */
        /*0030*/             @!UP1 LDG.E R4, desc[UR4][R2.64] ;  /* 0x0000000402088981 */
        /*0040*/                   STL [R1], R8 ;  /* 0x0000000402088981 */
        /*0050*/                   STG.E.128 desc[UR4][R2.64], R8 ;  /* 0x0000000402088981 */
"""
ATTRIBUTES = f"""
.nv.info. {REDUCE}
\t<0x10>
\tAttribute:\tEIATTR_MAX_THREADS
\tFormat:\tEIFMT_SVAL
\tValue:\t0x200 0x1 0x1
\t<0x11>
\tAttribute:\tEIATTR_CBANK_PARAM_SIZE
\tFormat:\tEIFMT_HVAL
\tValue:\t0x38
"""
GOOD = Facts(registers=40, argument_nbytes=56, max_threads=512, loads_128=4, stores_128=1)


def test_what_cuobjdump_prints_is_read() -> None:
    table: dict[str, Facts] = {}
    inspect_kernels.add_resources(table, RESOURCES)
    inspect_kernels.add_instructions(table, INSTRUCTIONS)
    inspect_kernels.add_attributes(table, ATTRIBUTES)
    expected = dataclasses.replace(GOOD, loads_128=1, spill_nbytes=9, generic=1)
    assert table == {"reduce_float32_to_bfloat16": expected}


def test_nothing_worse_is_nothing_to_complain_of() -> None:
    better = dataclasses.replace(GOOD, registers=30, stores_128=2)
    assert list(GOOD.complaints("reduce", GOOD)) == []
    assert list(better.complaints("reduce", GOOD)) == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"registers": 49}, "49 registers, expected 40"),
        ({"spill_nbytes": 8}, "spills"),
        ({"argument_nbytes": 64}, "64 bytes of arguments, expected 56"),
        ({"max_threads": 1024}, "launch bounds of 1024 threads"),
        ({"loads_128": 3}, "3 loads of 128 bits, expected 4"),
        ({"stores_128": 0}, "no accesses of 16 bytes"),
        ({"generic": 1}, "1 generic accesses"),
    ],
)
def test_what_is_worse_is_named(change: dict[str, int], text: str) -> None:
    worse = dataclasses.replace(GOOD, **change)
    assert any(text in complaint for complaint in worse.complaints("reduce", GOOD))


def test_every_kernel_is_expected_and_found() -> None:
    expected = inspect_kernels.read_expected()
    assert set(expected) == set(inspect_kernels.ARCHITECTURES)
    for kernels in expected.values():
        assert len(kernels) == 3 + 25
    missing = {name: dict(kernels) for name, kernels in expected.items()}
    del missing["sm_90"]["copy_many"]
    assert list(inspect_kernels.complaints(missing, expected)) == [
        "sm_90 copy_many: not in the library"
    ]
    unknown = {name: {**kernels, "other": GOOD} for name, kernels in expected.items()}
    assert all("not in kernels.json" in c for c in inspect_kernels.complaints(unknown, expected))
