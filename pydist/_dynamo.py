"""Owns what keeps TorchDynamo out of the wrapper, while the wrapped module may be compiled.

A frame of ours that Dynamo traced would break its graph at every call into the engine, and guard
on what changes from step to step. The marks are those that torch's own decorators leave, but these
decorators import all of Dynamo, also for programs that never compile anything.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_eval_frame: Any = torch._C._dynamo.eval_frame
_SKIP = _eval_frame._FrameAction.SKIP
_DEFAULT = _eval_frame._FrameAction.DEFAULT
_Function = TypeVar("_Function", bound=Callable[..., Any])


def untraced(function: _Function) -> _Function:
    """Dynamo runs the function as it is, and looks at the functions that it calls."""
    return _mark(function, _DEFAULT)


def untraced_with_callees(function: _Function) -> _Function:
    """Dynamo runs the function as it is, and all that it calls."""
    return _mark(function, _SKIP)


def _mark(function: _Function, callees: Any) -> _Function:
    strategy = _eval_frame._FrameExecStrategy(_SKIP, callees)
    _eval_frame.set_code_exec_strategy(function.__code__, strategy)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # where Dynamo traces a caller
    return function
