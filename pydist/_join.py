"""Owns join() as users and torch's Join see it: ranks that have run out of inputs go along."""

import weakref
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, JoinHook, _JoinConfig

from pydist._join_session import Model, Session, What
from pydist._process_group import MAX
from pydist.errors import UsageError


class Member(JoinHook):
    """One model's part in a session; torch's Join calls the two hooks on joined ranks."""

    def __init__(self, model: Model, session: Session) -> None:
        self._model = weakref.ref(model)
        self.name = model._model_name
        self._config = model._join_config
        self._notifies = False
        self.session = session
        self._index = len(session.members)
        session.members.append(self)

    @property
    def model(self) -> Model:
        model = self._model()
        assert model is not None  # Join keeps it
        return model

    @property
    def is_complete(self) -> bool:
        """Whether torch's Join has all its members: it has exchanged their settings since."""
        model = self._model()
        return model is None or model._join_config is not self._config

    def before_forward(self, synchronizes_buffers: bool) -> None:
        """Of an active rank: an iteration begins, but for an evaluation that needs no peers."""
        model, session = self.model, self.session
        self._notifies = synchronizes_buffers or torch.is_grad_enabled() or model.module.training
        if not self._notifies:
            return
        if model._join_config.is_first_joinable:
            session.end_iteration()
        work = Join.notify_join_context(model)  # type: ignore[arg-type]
        if work is not None:
            session.begin_iteration(int(work.get_future().wait()[0]))
        session.check_notified(self.name)

    def buffer_root(self) -> int:
        """The rank whose buffers all get: the lowest that still has inputs. Collective."""
        return self.session.announce(What.BUFFERS, self._index)

    def after_forward(self, synchronize: bool) -> None:
        """Where no round will end the iteration, and no forward is sure to come: it ends now."""
        if not self._notifies or self.session.open_ended:
            return
        if not (synchronize and torch.is_grad_enabled()):
            self.session.end_iteration(self._index)

    def main_hook(self) -> None:
        self.session.shadow(self._index)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Gives all ranks the model of the last to join; of several, of the highest rank."""
        model = self.model
        engine = model._engine
        root = torch.tensor([engine.rank if is_last_joiner else -1])
        engine.operations.all_reduce(root, MAX, False)
        model._authoritative_rank = int(root)
        kinds = ("parameter", "buffer") if model.forward_sync_buffers else ("parameter",)
        state = [tensor.detach() for kind, _, tensor in model._state() if kind in kinds]
        engine.broadcast_tensors(state, model._authoritative_rank)
        self.session.close()

    def release(self) -> None:
        model = self._model()
        if model is None:
            return
        model._join_config = _JoinConfig.construct_disabled_join_config()
        # Ranks that joined may have seen other forwards last.
        model.require_forward_param_sync = True
        if model._reducer is not None:
            model._reducer.set_divisor(0)
            model._reducer.set_before_end(None)


def enter(model: Model, divide_by_initial_world_size: bool) -> Member:
    """Makes the model a member of the session that is being put together, or of a new one."""
    _check_groups(model)
    engine = model._engine
    session = engine.join_session
    if not isinstance(session, Session) or not session.takes(model):
        session = Session(engine, not divide_by_initial_world_size)
        engine.join_session = session
    model.logger._set_uneven_input_join()
    return Member(model, session)


def _check_groups(model: Model) -> None:
    for name, layer in model.module.named_modules():
        if not isinstance(layer, torch.nn.SyncBatchNorm):
            continue
        group = layer.process_group if layer.process_group else dist.group.WORLD
        if group != model.process_group:
            raise UsageError(
                f"layer {name} of {model._model_name} is a SyncBatchNorm over other ranks than "
                "the model's, which join() cannot shadow; convert it with the process_group of "
                "the model"
            )


class JoinOne(Join):
    """What DataParallel.join() returns: one model, whose iterations may be of any shape.

    Any number of forwards and backwards may come in an iteration, also none.
    """

    def __init__(self, model: Any, enable: bool, throw: bool, divide_by_initial: bool) -> None:
        super().__init__([model], enable, throw, divide_by_initial_world_size=divide_by_initial)
        self._session: Session = model._membership.session
        self._session.open_ended = True

    def __exit__(
        self,
        type: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if type is None and self._enable:
                self._session.end_iteration()
            super().__exit__(type, value, traceback)
        finally:
            if self._enable:
                self._session.close()


class JoinSurface:
    """DataParallel's part in join()."""

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """A context in which ranks may run out of inputs at different times.

        A rank that leaves it joins: until all have, it takes part in what the others do with
        zeros for gradients, also in the communication of SyncBatchNorm layers. Its ``.grad`` stay
        as they are. In the end all ranks get the parameters, and the buffers if they are
        synchronised, of the last to join. Optimizer state is not shared: where ranks go on to
        another epoch, that of a rank that joined early has seen fewer steps.

        Args:
            divide_by_initial_world_size: gradients are divided by the number of all ranks; if
                False, by that of the ranks that still have inputs. A communication hook divides
                by itself.
            enable: False: inputs are known to be even, and nothing is done.
            throw_on_early_termination: all ranks raise RuntimeError when the first runs out.

        Raises:
            UsageError: a SyncBatchNorm layer over other ranks than the model's.
            MismatchError: ranks with inputs do different things while others have joined.
        """
        return JoinOne(self, enable, throw_on_early_termination, divide_by_initial_world_size)

    def join_hook(self: Any, **kwargs: Any) -> Member:
        """For torch's Join([model, ...]); list the model before an optimizer that it is for.

        There, an iteration is one forward and one backward at most; and since an optimizer's hook
        may step on joined ranks, their ``.grad`` become the means as on the others.
        """
        if self._reducer is None:  # a copy
            self._build(init_sync=False)
        self._membership = enter(self, kwargs.get("divide_by_initial_world_size", True))
        return self._membership  # type: ignore[no-any-return]

    @property
    def join_device(self: Any) -> torch.device:
        """Where torch's Join counts the ranks."""
        return torch.device(self.device)

    @property
    def join_process_group(self: Any) -> dist.ProcessGroup:
        """The ranks."""
        return self.process_group  # type: ignore[no-any-return]
