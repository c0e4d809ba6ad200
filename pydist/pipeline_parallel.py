"""Owns PipelineParallel: a model whose stages are on several ranks, trained by a schedule."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pydist._auto_schedule import AutoSchedule
from pydist._balance import Balance
from pydist._C import StepKind
from pydist._engine import group_engine
from pydist._partition import ModuleSource
from pydist._pipeline_build import AUTO, PipelineSettings, build_pipeline
from pydist._pipeline_groups import resolve_pipeline_groups
from pydist._pipeline_state_surface import PipelineState
from pydist._pipeline_step import (
    Loss,
    Metrics,
    Outputs,
    ScalesLoss,
    StepInputs,
    StepResult,
    Total,
    scale_of,
)
from pydist._stage_device import check_place
from pydist._stage_reduction import Replicas, StageReduction, replicated
from pydist.errors import UsageError
from pydist.schedule import ActionRecord, Schedule


class PipelineParallel(PipelineState):
    """Trains a model whose stages are on several ranks; gradients are those of the unsplit model.

    Stages are on the CPU, or those of each rank on one GPU (`.to(device)` before). There, values go
    from GPU to GPU over NCCL, a step waits for none, and the loss is a tensor on this rank's GPU.
    A step may be captured in a CUDA graph, on all ranks at once, where nothing else in it waits;
    random numbers then come from the user's stream.

    Args:
        module: an nn.Sequential, which is split into stages, or a list with one module (or
            zero-argument callable that makes it, called for local stages only) per stage. In a
            list, a stage's output is the next one's argument; a tuple becomes positional arguments.
        num_microbatches: pieces that each batch is cut into.
        loss_fn: loss_fn(output, target) -> tensor with one element, for one microbatch.
        schedule: a name of pydist.schedule.kinds(), or a Schedule. "auto" times the stages in the
            first three steps, and then takes what is best for these times.
        stages_per_rank: 2 for interleaved and V kinds, else 1, unless given.
        balance: layers of each stage, or "uniform", or "parameters" (the default).
        chunk_dim: the dimension that batches are cut along: one for all, or by argument name
            ("target" and "output" for those; 0 for what is not named).
        replicate: names of arguments that every microbatch gets whole.
        loss_reduction: what loss_fn does over the rows of a batch: "mean" or "sum".
        loss_weight: loss_weight(target) -> number, what a microbatch weighs in the mean: the number
            of valid tokens, say. By default its number of rows.
        process_group: the ranks of the pipeline; default: all.
        data_parallel_group: the ranks that hold the same stages, one of each of several pipelines
            that train replicas of the model. Gradients are the mean over them, and replicas start
            as the first one is. A stage's gradients are averaged around the action that is its last
            B or W, once a step, while other actions go on.
        device_mesh: in the place of both groups: a mesh with a dimension "pp", "dp" for replicas,
            and "tp" if torch's tensor parallelism has cut the stages over it, in any order.
        data_parallel_options: further arguments of DataParallel, by name, for every stage
            (bucket_cap_mb, gradient_as_bucket_view, wire_dtype, unused_parameters, ...).
        tied: groups of names of parameters that are one in the unsplit model, one in each of
            several stages, for stages that callables make; others are found.
        deferred_batch_norm: BatchNorm layers update their running statistics once a step, from all
            microbatches as if they had been one.
        example_input: the input of one microbatch, on every rank, for balance="time".

    Raises:
        UsageError: the model, the schedule and the ranks do not fit each other.
        MismatchError: ranks were given different settings; on every rank.
    """

    def __init__(
        self,
        module: nn.Sequential | Sequence[ModuleSource],
        num_microbatches: int,
        loss_fn: Loss | None = None,
        schedule: str | Schedule = "1f1b",
        stages_per_rank: int | None = None,
        balance: Balance | None = None,
        chunk_dim: int | Mapping[str, int] = 0,
        replicate: Sequence[str] = (),
        loss_reduction: str = "mean",
        loss_weight: Callable[[Any], Any] | None = None,
        process_group: dist.ProcessGroup | None = None,
        data_parallel_group: dist.ProcessGroup | None = None,
        device_mesh: Any = None,
        *,
        data_parallel_options: Mapping[str, Any] | None = None,
        tied: Sequence[Sequence[str]] = (),
        deferred_batch_norm: bool = False,
        example_input: Any = None,
    ) -> None:
        super().__init__()
        groups = resolve_pipeline_groups(process_group, data_parallel_group, device_mesh)
        if data_parallel_options and groups.replicas is None:
            raise UsageError(
                f"data_parallel_options ({', '.join(data_parallel_options)}) would have no effect: "
                "there are no replicas; give data_parallel_group, or device_mesh with a dimension "
                '"dp"'
            )
        self._engine = group_engine(groups.pipeline)
        settings = PipelineSettings(
            num_microbatches=num_microbatches,
            schedule=schedule,
            stages_per_rank=stages_per_rank,
            balance=balance,
            chunk_dim=chunk_dim,
            replicate=replicate,
            loss_reduction=loss_reduction,
            tied=tied,
            deferred_batch_norm=deferred_batch_norm,
            example_input=example_input,
        )
        name = type(self).__name__
        views = bool((data_parallel_options or {}).get("gradient_as_bucket_view"))
        with replicated(groups.replicas, name) as replica:
            self._parts = build_pipeline(self._engine, name, module, settings, replica, views)
        self._replicas: Replicas | None = None
        if groups.replicas is not None:
            self._replicas = Replicas(
                self._parts.local_stages,
                groups.replicas,
                data_parallel_options,
                agreed={
                    "num_microbatches": num_microbatches,
                    "actions of this rank": self._parts.schedule.actions[self._engine.rank],
                    "loss_reduction": loss_reduction,
                },
            )
        self.loss_fn = loss_fn
        self.loss_weight = loss_weight
        self._settings = settings
        self._takes_one_argument = isinstance(module, nn.Sequential)
        self._num_steps = 0  # that succeeded; layers' seeds depend on it
        self._wants_records = self._recorded = False
        # Under their names in the unsplit model; not by add_module, which refuses some of these.
        self._modules.update(self._parts.local_layers)
        self._split_model = self._parts
        self._aliases = frozenset(map(id, self._parts.aliases))
        self._clip = None
        self._auto: AutoSchedule | None = None
        if schedule == AUTO:
            replicas = None if groups.replicas is None else group_engine(groups.replicas)
            self._auto = AutoSchedule(self._engine, num_microbatches, replicas)
        self._next_schedule: Schedule | None = None

    # -- what is where --------------------------------------------------------------------------

    @property
    def schedule(self) -> Schedule:
        """The actions of all ranks, from the next step on."""
        return self._next_schedule or self._parts.schedule

    @property
    def num_steps(self) -> int:
        """Steps that succeeded, which the seeds of dropout count.

        Save it with a checkpoint and set it, on every rank, in the run that resumes: with the same
        torch.manual_seed before PipelineParallel is made, that goes on with the masks that it would
        have had without the interruption. Not collective.
        """
        return self._num_steps

    @num_steps.setter
    def num_steps(self, number: int) -> None:
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise UsageError(f"num_steps is {number!r}; expected a whole number from 0 up")
        self._num_steps = number

    @property
    def local_stages(self) -> dict[int, nn.Module]:
        """The stages that this rank holds, by index."""
        return dict(self._parts.local_stages)

    @property
    def has_first_stage(self) -> bool:
        """Whether this rank needs the batch."""
        return 0 in self._parts.local_stages

    @property
    def has_last_stage(self) -> bool:
        """Whether this rank needs the target."""
        return self._parts.schedule.num_stages - 1 in self._parts.local_stages

    @property
    def replicas(self) -> dict[int, StageReduction]:
        """What averages each local stage's gradients over replicas: a DataParallel, which has
        report() and register_comm_hook(), and whose forward is not to be called. Empty without
        replicas.
        """
        return {} if self._replicas is None else dict(self._replicas.stages)

    def train(self, mode: bool = True) -> "PipelineParallel":
        """Sets the mode of the local stages. Not collective."""
        super().train(mode)
        for stage in self._parts.local_stages.values():
            stage.train(mode)
        return self

    def record(self, on: bool = True) -> None:
        """Switches the recording of actions on or off, from the next step. Not collective.

        Times are the host's: on a GPU, an action ends when all its work is enqueued.
        """
        self._wants_records = on

    def records(self) -> list[ActionRecord]:
        """This rank's actions in the last step, in order; empty unless `record` is on."""
        return self._last_records() if self._recorded else []

    def _last_records(self) -> list[ActionRecord]:
        return [ActionRecord(*record) for record in self._parts.executor.records()]

    # -- running --------------------------------------------------------------------------------

    def step(
        self,
        *args: Any,
        target: Any = None,
        metrics: Metrics | None = None,
        return_outputs: bool = False,
        loss_scale: float | ScalesLoss = 1.0,
        **kwargs: Any,
    ) -> Any:
        """Forward and backward of one batch; gradients add up in ``.grad``. Collective.

        The first stage's rank needs the batch (``args``), the last one's the target, each on its
        stage's device; others may pass None or nothing. Keyword arguments go to every stage whose
        forward names them, and must be given on these stages' ranks.

        Args:
            metrics: metrics(output, target) -> dict of numbers or tensors, for one microbatch,
                without gradients; they are summed with the loss's weights.
            return_outputs: also return the last stage's outputs, on its rank.
            loss_scale: a number or pydist.GradScaler that gradients are multiplied with; the loss
                that is returned is not.

        Returns:
            The loss, detached, on every rank; or a StepResult where `metrics` or `return_outputs`
            are given.

        Raises:
            What a stage, the loss or backward raised here, with a note that names the action;
            PeerError where that happened on another rank. The next step works.
        """
        result = self._run_with_loss(
            StepKind.TRAIN, (args, kwargs, target), metrics, return_outputs, loss_scale
        )
        if self._auto is not None:
            self._next_schedule = self._auto.after_step(self._last_records())
        return result

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of steps within are not averaged over replicas; those of the next step outside
        are, together with what they were added to. Does nothing without replicas.
        """
        if self._replicas is None:
            yield
            return
        with self._replicas.no_sync():
            yield

    def evaluate(
        self,
        *args: Any,
        target: Any = None,
        metrics: Metrics | None = None,
        return_outputs: bool = False,
        **kwargs: Any,
    ) -> Any:
        """The loss of one batch as `step` returns it, without backward. Collective."""
        return self._run_with_loss(
            StepKind.EVALUATE, (args, kwargs, target), metrics, return_outputs, 1.0
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of one batch, without gradients, on the last stage's rank; None on others.

        Collective.
        """
        outputs = self._make_outputs()
        self._run(StepKind.FORWARD, (args, kwargs, None), outputs)
        return outputs.merged

    def _run_with_loss(
        self,
        kind: StepKind,
        given: tuple[tuple[Any, ...], dict[str, Any], Any],
        metrics: Metrics | None,
        return_outputs: bool,
        loss_scale: float | ScalesLoss,
    ) -> Any:
        outputs = self._make_outputs() if return_outputs else None
        loss, totals, _ = self._run(kind, given, outputs, metrics, loss_scale)
        if metrics is None and outputs is None:
            return loss
        return StepResult(loss, totals, None if outputs is None else outputs.merged)

    def _run(
        self,
        kind: StepKind,
        given: tuple[tuple[Any, ...], dict[str, Any], Any],
        outputs: Outputs | None,
        metrics: Metrics | None = None,
        loss_scale: float | ScalesLoss = 1.0,
    ) -> Any:
        training = kind is StepKind.TRAIN
        replicas = self._replicas if training else None
        self._begin_run(training)
        with self._refusing(kind, replicas, met=False):
            inputs, weights = self._prepare(kind, given)
            scale = scale_of(loss_scale, self._engine.size)
        if replicas is not None:
            with self._refusing(kind, replicas, met=True):
                total = replicas.begin_step(inputs.total_weight)
            if inputs.total_weight:  # else microbatches weigh the same on all replicas
                factor = inputs.total_weight * replicas.size / total
                weights = [weight * factor for weight in weights]
        frame = self._parts.frame
        mean = None if replicas is None else replicas.mean_of_earlier()
        with frame.around(training):
            result = self._parts.executor.run(
                kind=kind,
                step=self._num_steps + 1,
                num_rows=inputs.cut.rows,
                loss_gradients=[weight * scale for weight in weights],
                reducers={} if replicas is None else replicas.reducers(),
                averages=replicas is not None and replicas.synchronizes,
                python={
                    "arguments": inputs.cut.args,
                    "keywords": inputs.keywords or None,
                    "targets": inputs.cut.targets,
                    "finish": Total(weights, self._num_steps + 1),
                    "before_end": lambda: frame.before_end(training, inputs.cut, outputs, mean),
                    "loss_fn": None if kind is StepKind.FORWARD else self.loss_fn,
                    "metrics": metrics,
                    "outputs": None if outputs is None else outputs.by_microbatch,
                },
            )
        if training:
            self._num_steps = result[2]
        if replicas is not None:
            replicas.end_step()
        return result

    def _begin_run(self, training: bool) -> None:
        """The executor runs the schedule, and records, as is wanted by now."""
        parts = self._parts
        if training and self._next_schedule is not None:
            parts.change_schedule(self._next_schedule)
            self._next_schedule = None
        self._recorded = self._wants_records
        auto = training and self._auto is not None and self._auto.records
        parts.executor.record(self._recorded or auto, auto and parts.is_asynchronous)

    @contextmanager
    def _refusing(self, kind: StepKind, replicas: Replicas | None, met: bool) -> Iterator[None]:
        """Tells all ranks of what raises here, before the step's actions."""
        try:
            yield
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            try:
                self._parts.executor.refuse(kind, text)
            finally:
                if replicas is not None:
                    replicas.refuse(text, met)
            raise

    def _prepare(
        self, kind: StepKind, given: tuple[tuple[Any, ...], dict[str, Any], Any]
    ) -> tuple[StepInputs, list[float]]:
        args, kwargs, target = given
        if kind is StepKind.TRAIN and not torch.is_grad_enabled():
            raise UsageError("step() needs gradients; within no_grad() call evaluate()")
        if self.has_first_stage and not kwargs and all(arg is None for arg in args):
            raise UsageError("this rank holds the first stage, which needs the batch; got None")
        if self._takes_one_argument and len(args) > 1:
            raise UsageError(
                f"got {len(args)} positional arguments, but an nn.Sequential takes one, the batch; "
                "give the target as target="
            )
        parts = self._parts
        if kind is StepKind.TRAIN and not parts.trains:
            raise UsageError(
                f"the schedule {parts.schedule.name} has no backward, which step() needs; call "
                "evaluate(), or make the pipeline with another schedule"
            )
        if self.has_first_stage:
            check_place(args, "the batch", parts.device, "first")
        if self.has_last_stage:
            check_place(target, "the target", parts.device, "last")
        parts.frame.prepare(kind is StepKind.TRAIN)
        inputs = StepInputs(parts.slicer, parts.routes, given, list(parts.local_stages))
        if kind is StepKind.FORWARD or not self.has_last_stage:
            return inputs, []
        if self.loss_fn is None:
            raise UsageError("PipelineParallel was made without loss_fn, which a loss needs")
        return inputs, inputs.weights(self._settings.loss_reduction, self.loss_weight)

    def _make_outputs(self) -> Outputs:
        return Outputs(self._settings.num_microbatches, self._parts.slicer.dim("output"))
