"""Owns wrappers inside wrappers: the outermost one averages, those inside it stand aside."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.parallel import DistributedDataParallel

from pydist.errors import UsageError


class Nesting:
    """One wrapper's place: what is wrapped inside its module, and whether it is inside another."""

    def __init__(self) -> None:
        self.inner: list[Nesting] = []
        self.has_outer = False
        self._num_outer_forwards = 0

    def enclose(self, module: torch.nn.Module, ignored: set[str]) -> None:
        """Takes over from the wrappers inside `module`, but for those whose parameters it ignores:
        they go on averaging them."""
        self.inner = []
        for name, part in module.named_modules():
            if not isinstance(part, DistributedDataParallel):
                continue
            prefix = f"{name}." if name else ""
            inside = {prefix + parameter for parameter, _ in part.named_parameters()}
            if inside <= ignored:
                continue
            if inside & ignored:
                raise UsageError(
                    f"of the wrapped module {name or 'itself'} some parameters are ignored here "
                    f"({min(inside & ignored)}) and others are not ({min(inside - ignored)}); "
                    "ignore all of them, which leaves it on its own, or none"
                )
            nesting = getattr(part, "_nesting", None)
            if not isinstance(nesting, Nesting):
                raise UsageError(
                    f"module {name or 'itself'} is a {type(part).__name__} of torch already, and "
                    "its gradients would be averaged twice; wrap the outermost module only"
                )
            nesting.has_outer = True
            self.inner.append(nesting)

    @contextmanager
    def averaging_for_inner(self) -> Iterator[None]:
        """While the outer wrapper's forward runs, those inside just call their modules."""
        for nesting in self.inner:
            nesting._num_outer_forwards += 1
        try:
            yield
        finally:
            for nesting in self.inner:
                nesting._num_outer_forwards -= 1

    def stands_aside(self) -> bool:
        """True in an outer wrapper's forward, also where a backward runs it again (checkpoints)."""
        if not self.has_outer:
            return False
        return self._num_outer_forwards > 0 or torch._C._current_graph_task_id() != -1
