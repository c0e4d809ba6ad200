"""Owns the private names of torch's reducer that torch's own hooks and tests use."""

import weakref
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import GradBucket

from pydist._comm_hooks import run_hooks, sum_over_ranks

if TYPE_CHECKING:
    from pydist.data_parallel import DataParallel


class TorchReducer:
    """``model.reducer``: torch's reducer as far as anybody outside looks into it."""

    def __init__(self, model: "DataParallel") -> None:
        self._model = weakref.proxy(model)

    def _run_allreduce_hook(self, bucket: GradBucket) -> Any:
        """A future of the bucket's sum over ranks."""
        return sum_over_ranks(self._model.process_group, bucket)

    def _run_comm_hook(self, bucket: GradBucket) -> Any:
        """What a backward does with the bucket: the registered hook, else the sum over ranks."""
        if self._model._comm_hooks:
            return run_hooks(self._model, bucket)
        return self._run_allreduce_hook(bucket)
