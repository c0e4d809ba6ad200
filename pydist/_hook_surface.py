"""Owns the registering of communication hooks on a wrapped module."""

from typing import Any

from pydist._comm_hooks import Hook, builtin_hook, check_comm_hook, hook_name
from pydist._logging_data import note_errors
from pydist._verification import verify_settings
from pydist._wrapping import Wrapping
from pydist.errors import UsageError


class HookSurface(Wrapping):
    """DataParallel's methods around communication hooks."""

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Leaves communication to ``hook(state, bucket)``, which returns a future of the result.

        To be called by all ranks, once, before the first backward. From then on gradients travel in
        contiguous buckets of ``bucket_cap_mb``. The hook gets them in order, as
        :class:`torch.distributed.GradBucket`, one after another: the next when the future for the
        one before is complete. Gradients are not divided by the number of ranks. What the future
        holds, a tensor of as many elements, becomes the gradients of the bucket's parameters.

        An exception in the hook is raised by backward(); peers on which it was not raised raise
        PeerError. After a backward in which it was raised on all ranks, training can go on.

        Raises:
            RuntimeError: a hook is registered already.
            TypeError, UsageError: this is no hook.
            MismatchError: ranks register different hooks.
        """
        with note_errors(self.logger):
            check_comm_hook(hook)
        self._set_comm_hook(hook, state, hook_name(hook))

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Registers the hook that torch.distributed.BuiltinCommHookType names."""
        self._set_comm_hook(builtin_hook(comm_hook_type), self.process_group, str(comm_hook_type))

    def _set_comm_hook(self, hook: Hook, state: Any, name: str) -> None:
        if self._comm_hooks:
            raise RuntimeError(
                "register_comm_hook or register_builtin_comm_hook can only be called once."
            )
        if self._wire_dtype is not None:
            raise UsageError(
                f"{self._model_name} was made with wire_dtype, but how gradients travel is a "
                "communication hook's own affair; leave away one of the two"
            )
        if self._reducer is None:  # a copy
            self._build(init_sync=False)
        if self._reducer.has_unreduced:
            raise UsageError(
                f"{self._model_name} has gradients that ranks have not averaged yet; register the "
                "communication hook before the first backward"
            )
        verify_settings(self._engine, self._model_name, {"communication hook": name})
        self._reducer.detach_hooks()
        self._comm_hooks.append((hook, state))
        _, parameters = self._trainable_candidates()
        self._make_reducer(parameters)
        assert self.logger is not None
        self.logger._set_comm_hook_name(name)
