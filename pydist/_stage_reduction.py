"""Owns data parallelism around a pipeline: a rank's stages, averaged over the replicas.

Several pipelines train replicas of one model. The ranks that hold the same stages form a group;
here is what such a rank does in a step beside its pipeline's actions:

    begin_step            meets the replicas: has any of them failed, what do all together weigh?
    (C++, per stage)      Reducer.begin_backward .. end_backward around every backward, a round
                          around the last; finish_round at the end of the rank's actions
    fail                  a step that raised here is over on the replicas too

A reducer that was in a failed step is of no further use. The next step makes new ones, and first
makes sure that no replica took an optimizer step that others did not.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

from pydist import _C
from pydist._engine import group_engine
from pydist._mesh import check_crossing
from pydist._process_group import MEAN, SUM
from pydist._replica_audit import compare_replicas
from pydist._verification import verify_settings
from pydist.data_parallel import DataParallel
from pydist.errors import PeerError, UsageError

# Of DataParallel's arguments, those that mean the same for every stage.
OPTIONS = frozenset(
    {
        "algorithm",
        "audit_every",
        "batched_grad_copy",
        "broadcast_buffers",
        "bucket_cap_mb",
        "bucket_cap_mb_list",
        "find_unused_parameters",
        "forward_sync_buffers",
        "gradient_as_bucket_view",
        "init_sync",
        "skip_all_reduce_unused_params",
        "static_graph",
        "unused_parameters",
        "wire_dtype",
    }
)
_INSTEAD = {
    "device_mesh": "it is an argument of PipelineParallel",
    "mixed_precision": "step() within torch.autocast computes in a narrower type, and wire_dtype "
    "lets gradients travel in one",
    "process_group": "give data_parallel_group to PipelineParallel",
}


class StageReduction(DataParallel):
    """One stage's module as a replica: a DataParallel whose rounds somebody else brackets.

    Its forward is never called: the pipeline's executor calls the module, and the reducer where
    the stage's backwards begin and end.
    """

    _remedy = "the next step makes a new one, unless a rank has died"
    _clue = "what did it print last?"

    def __init__(
        self,
        module: torch.nn.Module,
        stage: int,
        group: dist.ProcessGroup,
        options: Mapping[str, Any],
    ) -> None:
        check_crossing(module, dist.get_process_group_ranks(group))
        self._stage = stage
        self._suspect = False  # replicas may differ since a failed step
        super().__init__(module, process_group=group, **options)

    @property
    def _model_name(self) -> str:
        return f"stage {self._stage} ({type(self.module).__name__})"

    def _check_trainable(self, parameters: list[torch.Tensor]) -> None:
        """A stage may have nothing to train, or not yet."""

    @property
    def reducer_of_stage(self) -> "_C.Reducer":
        """Whose brackets the executor calls in this step."""
        reducer: _C.Reducer = self._reducer
        return reducer

    @property
    def is_sound(self) -> bool:
        """False where the next step has to start from new reducers and compared replicas."""
        return not (self._suspect or self._reducer.has_failed)

    def recover(self) -> None:
        """After a failed step: a new reducer, if the replicas are still equal. Collective."""
        self._suspect = True
        self._reducer.detach_hooks()
        _, parameters = self._trainable_candidates()
        self._make_reducer(parameters)
        state = [entry for entry in self._state() if entry[0] == "parameter"]
        compare_replicas(self._engine, self._model_name, state, " after a step that failed")
        self._suspect = False

    def begin_step(self, synchronize: bool) -> None:
        """Notices what changed in the module, and gives all replicas the first one's buffers."""
        self.require_backward_grad_sync = synchronize
        with torch.enable_grad():
            self._pre_forward()
        self.require_forward_param_sync = synchronize


class Replicas:
    """This rank's stages and the ranks of other pipelines that hold the same ones. Collective.

    Args:
        stages: by index, the modules of this rank.
        group: the ranks that hold the same stages; each in a pipeline of its own.
        options: further arguments of DataParallel, for every stage.
        agreed: what else must be the same on all replicas, as JSON has it.

    Raises:
        UsageError: an option is unknown, or not for stages.
        MismatchError: a stage, or what is agreed, differs between replicas.
    """

    def __init__(
        self,
        stages: Mapping[int, torch.nn.Module],
        group: dist.ProcessGroup,
        options: Mapping[str, Any] | None = None,
        agreed: Mapping[str, Any] | None = None,
    ) -> None:
        check_options(options or {})
        self._engine = group_engine(group)
        verify_settings(
            self._engine,
            "the replicas' PipelineParallel",
            {"stages": sorted(stages), **(agreed or {})},
        )
        self.rank, self.size = self._engine.rank, self._engine.size
        self._synchronize = True
        self._unreduced = False  # steps under no_sync since the last one outside
        self._ended = False  # the last step succeeded here
        self.stages = {
            index: StageReduction(module, index, group, options or {})
            for index, module in sorted(stages.items())
        }

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Steps begun here leave gradients local; the next step outside averages all of them."""
        before, self._synchronize = self._synchronize, False
        try:
            yield
        finally:
            self._synchronize = before

    def mean_of_earlier(self) -> Callable[[torch.Tensor], None] | None:
        """In a step that averages gradients: what does so for those of the steps under no_sync
        before it, where they are not with the stages' reducers; None where there were none.
        """
        return self._average if self._synchronize and self._unreduced else None

    def _average(self, gradient: torch.Tensor) -> None:
        dense = gradient.cpu().contiguous()  # itself, where it is that already
        self._engine.operations.all_reduce(dense, MEAN, False)
        if dense is not gradient:
            gradient.copy_(dense)

    def end_step(self) -> None:
        """After a training step that succeeded."""
        self._unreduced = not self._synchronize
        self._ended = True

    @property
    def synchronizes(self) -> bool:
        """False within no_sync()."""
        return self._synchronize

    def begin_step(self, weight: float = 0.0) -> float:
        """Meets the other replicas before a training step's first action; the sum of weights.

        Raises:
            MismatchError: replicas differ, since a step failed on some rank after it had ended on
                others; on every replica, and again until they are equal.
            PeerError: a replica has died; or the last step failed on a replica, but not here.
        """
        ended, self._ended = self._ended, False
        sound = all(stage.is_sound for stage in self.stages.values())
        told = torch.tensor([0.0 if sound else 1.0, weight], dtype=torch.float64)
        self._engine.operations.all_reduce(told, SUM, False)
        num_failed, total = told.tolist()
        for stage in self.stages.values():
            if num_failed:
                stage.recover()
        if num_failed and ended:
            raise PeerError(
                "the last step failed on another replica after it had ended on this one, whose "
                "gradients may be ahead; zero_grad() on all ranks, and go on"
            )
        for stage in self.stages.values():
            stage.begin_step(self._synchronize)
        return float(total)

    def reducers(self) -> dict[int, "_C.Reducer"]:
        """Of each stage, for this step."""
        return {index: stage.reducer_of_stage for index, stage in self.stages.items()}

    def refuse(self, cause: str, met: bool) -> None:
        """This rank does not go on with a step, in which it has met the others or not yet."""
        if not met:
            with suppress(Exception):  # the cause is what counts
                self.begin_step()
        self.fail(f"rank {dist.get_rank()} raised {cause}")

    def fail(self, reason: str) -> None:
        """This rank's step is over: `reason`, a whole sentence, is what the replicas raise."""
        for stage in self.stages.values():
            stage.reducer_of_stage.give_up(reason)


@contextmanager
def replicated(group: dist.ProcessGroup | None, model_name: str) -> Iterator[int]:
    """This rank's number among the replicas; what raises within raises on all of them."""
    if group is None:
        yield 0
        return
    engine = group_engine(group)
    with engine.all_or_none(f"making {model_name}"):
        yield engine.rank


def check_options(options: Mapping[str, Any]) -> None:
    """Raises UsageError for what DataParallel does not take, or not for a stage."""
    for name in options:
        if name in OPTIONS:
            continue
        instead = _INSTEAD.get(name, f"expected some of {', '.join(sorted(OPTIONS))}")
        raise UsageError(f"data_parallel_options has {name!r}, which stages do not take: {instead}")
