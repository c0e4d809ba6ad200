"""Owns the one-process emulation of data-parallel ranks and the comparison of gradients with it.

Every rank can compute what all ranks should get: inputs depend only on the rank and the step, so
a replica of the plain module per rank, run one after another, gives all local gradients.
"""

import contextlib
import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Relative to a value, and absolute as a share of the largest value of its tensor.
TOLERANCES: dict[torch.dtype, float] = {
    torch.float64: 1e-12,
    torch.complex128: 1e-12,
    torch.float32: 1e-6,
    torch.complex64: 1e-6,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
}

LocalLoss = Callable[..., Tensor | None]  # of module, rank and further arguments
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def draw(rank: int, step: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The input of one rank in one step, the same wherever it is computed."""
    generator = torch.Generator().manual_seed(10_000 * (step + 1) + rank)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


class OneProcess:
    """Replicas of a plain module, one per rank, stepped in this process as the ranks would be."""

    def __init__(
        self, module: nn.Module, world_size: int, make_optimizer: MakeOptimizer | None = None
    ) -> None:
        self.replicas = [copy.deepcopy(module) for _ in range(world_size)]
        self.optimizers = (
            [make_optimizer(replica.parameters()) for replica in self.replicas]
            if make_optimizer is not None
            else []
        )
        self._used: set[str] = set()

    @property
    def module(self) -> nn.Module:
        return self.replicas[0]

    def backward(self, local_loss: LocalLoss, *arguments: Any, synced: bool = True) -> None:
        """local_loss(replica, rank, *arguments).backward() for every rank, and then the mean
        unless under no_sync. A rank whose loss is None takes part without a gradient of its own.
        """
        for rank, replica in enumerate(self.replicas):
            with self._noting_use(replica):
                loss = local_loss(replica, rank, *arguments)
                if loss is not None:
                    loss.backward()
        if synced:
            self.average()

    def average(self) -> None:
        """The mean of current gradients, zeros where there is none, of what was used anywhere
        since the last mean; other gradients stay as they are."""
        named = [replica.named_parameters() for replica in self.replicas]
        for parameters in zip(*named, strict=True):
            if parameters[0][0] in self._used:
                mean = _mean([parameter for _, parameter in parameters])
                for _, parameter in parameters:
                    parameter.grad = mean.clone()
        self._used.clear()

    def step(self, local_loss: LocalLoss, *arguments: Any) -> None:
        """zero_grad, backward and optimizer step."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.backward(local_loss, *arguments)
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for replica in self.replicas:
            replica.zero_grad(set_to_none=set_to_none)

    @contextlib.contextmanager
    def _noting_use(self, replica: nn.Module) -> Iterator[None]:
        hooks = [
            parameter.register_hook(lambda _, name=name: self._used.add(name))
            for name, parameter in replica.named_parameters()
            if parameter.requires_grad
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _mean(parameters: list[nn.Parameter]) -> Tensor:
    dtype = parameters[0].dtype
    wide = torch.complex128 if dtype.is_complex else torch.float64
    total = torch.zeros_like(parameters[0], dtype=wide)
    for parameter in parameters:
        if parameter.grad is not None:
            total += parameter.grad.to(wide)
    return (total.detach() / len(parameters)).to(dtype)


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's module of a wrapper; a plain module itself."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return model.module  # type: ignore[no-any-return]
    return model


def assert_gradients_match(model: nn.Module, expected: nn.Module) -> None:
    """Every gradient is that of the plain module: absent where absent, else within tolerance."""
    _assert_all_close(
        {name: parameter.grad for name, parameter in unwrapped(model).named_parameters()},
        {name: parameter.grad for name, parameter in expected.named_parameters()},
    )


def assert_parameters_match(model: nn.Module, expected: nn.Module, factor: float = 10) -> None:
    """Parameters after some steps; factor allows for what the optimizer makes of rounding."""
    _assert_all_close(
        dict(unwrapped(model).named_parameters()), dict(expected.named_parameters()), factor
    )


def _assert_all_close(found: dict[str, Any], expected: dict[str, Any], factor: float = 1) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        problem = difference(found[name], value, factor)
        assert problem is None, f"{name}: {problem}"


def difference(found: Tensor | None, expected: Tensor | None, factor: float = 1) -> str | None:
    """What is wrong with a tensor, in words; None if nothing is."""
    if found is None or expected is None:
        return None if found is expected else f"found {found}, expected {expected}"
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return f"found {found.dtype} {found.shape}, expected {expected.dtype} {expected.shape}"
    if found.numel() == 0:
        return None
    relative = factor * TOLERANCES[expected.dtype]
    found, expected = found.detach(), expected.detach()
    absolute = relative * float(expected.abs().max())
    if torch.allclose(found, expected, rtol=relative, atol=absolute):
        return None
    worst = int((found - expected).abs().argmax())
    return f"element {worst}: found {found.flatten()[worst]}, expected {expected.flatten()[worst]}"


def digest(tensors: Iterable[Tensor | None]) -> str:
    """Equal exactly where the tensors are equal in every bit."""
    result = hashlib.sha256()
    for tensor in tensors:
        if tensor is None:
            result.update(b"none")
            continue
        result.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().resolve_conj().contiguous().reshape(-1)
        result.update(flat.view(torch.uint8).numpy().tobytes())
    return result.hexdigest()


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in unwrapped(model).parameters()]


def assert_same_on_all_ranks(
    tensors: Iterable[Tensor | None], group: dist.ProcessGroup | None = None
) -> None:
    """Every bit is the same on all ranks of the group."""
    digests: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(digests, digest(tensors), group=group)
    assert len(set(digests)) == 1, f"the ranks differ: {digests}"


def assert_reduced(model: nn.Module, expected: OneProcess) -> None:
    """Gradients are the mean over ranks, and the same in every bit on all of them."""
    assert_gradients_match(model, expected.module)
    assert_same_on_all_ranks(gradients(model))


def assert_step_reduced(
    model: nn.Module, expected: OneProcess, loss: LocalLoss, rank: int, step: int
) -> None:
    """One step of both from no gradients: loss(module, rank, step) and its backward."""
    model.zero_grad()
    expected.zero_grad()
    local = loss(model, rank, step)
    assert local is not None
    local.backward()
    expected.backward(loss, step)
    assert_reduced(model, expected)


def expect_error(
    kind: type[Exception] | tuple[type[Exception], ...], call: Callable[[], Any]
) -> Exception:
    """The error that the call must raise; pytest.raises would end a rank that has none."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"expected {kind}, but nothing was raised")
