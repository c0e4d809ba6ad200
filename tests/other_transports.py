"""Owns the run of tests over a transport that conftest.py has none of."""

import importlib
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any


def gather_tests(modules: Sequence[str], left_out: AbstractSet[str]) -> dict[str, Any]:
    """By new names, the tests of test_<module> that take the fixture `transport`.

    `left_out`: names of tests, without "test_"; each of them must exist.
    """
    found = dict(_all_tests(modules))
    names = {name.partition("__")[2]: name for name in found}
    assert left_out <= set(names), left_out - set(names)
    return {name: test for name, test in found.items() if name.partition("__")[2] not in left_out}


def _all_tests(modules: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for module in modules:
        for name, value in vars(importlib.import_module(f"test_{module}")).items():
            code = getattr(value, "__code__", None)
            arguments = code.co_varnames[: code.co_argcount] if code else ()
            if name.startswith("test_") and "transport" in arguments:
                yield f"test_{module}__{name.removeprefix('test_')}", value
