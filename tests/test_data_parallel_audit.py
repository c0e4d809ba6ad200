"""Owns the tests of the replica audit: its hash, what it finds, how it words it, when it looks."""

import random
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import pydist
from conftest import Transport
from models import mlp, wavy_loss
from pydist import DataParallel, MismatchError, UsageError, check_replicas
from pydist._C import hash_tensors
from reference import draw, expect_error


def code(data: bytes) -> int:
    if not data:
        return hash_tensors([torch.empty(0, dtype=torch.uint8)])[0]
    return hash_tensors([torch.frombuffer(bytearray(data), dtype=torch.uint8)])[0]


def test_every_flipped_bit_changes_the_hash() -> None:
    """All bits of memories of several lengths around the 64 bytes that are read at a time; random
    bits of a large one. No two of these hashes are equal either."""
    source = random.Random(1)
    for nbytes in (1, 7, 8, 9, 63, 64, 65, 200):
        data = bytearray(source.randbytes(nbytes))
        found = {code(data)}
        for bit in range(8 * nbytes):
            data[bit // 8] ^= 1 << bit % 8
            found.add(code(data))
            data[bit // 8] ^= 1 << bit % 8
        assert len(found) == 8 * nbytes + 1
    large = torch.frombuffer(bytearray(source.randbytes(1 << 20)), dtype=torch.uint8)
    found = set(hash_tensors([large]))
    bits = source.sample(range(8 * large.numel()), 300)
    for bit in bits:
        large[bit // 8] ^= 1 << bit % 8
        found.update(hash_tensors([large]))
        large[bit // 8] ^= 1 << bit % 8
    assert len(found) == len(bits) + 1


@given(st.lists(st.integers(0, 8 * 200 - 1), min_size=1, max_size=8, unique=True))
@settings(max_examples=300, deadline=None)
def test_several_flipped_bits_change_the_hash(bits: list[int]) -> None:
    """In particular the highest bits of words, which plain multiplication leaves where they are:
    a tensor and its negative must differ."""
    data = bytearray(range(200))
    before = code(data)
    for bit in bits:
        data[bit // 8] ^= 1 << bit % 8
    assert code(data) != before


def test_signs_order_and_length_change_the_hash() -> None:
    values = torch.arange(1, 1025, dtype=torch.float64)
    zeros = torch.zeros(1024, dtype=torch.float64)
    others = [values, -values, values.flip(0), values.roll(8), values.roll(1), values[:1016]]
    others += [zeros, zeros[:1016], zeros[:8], zeros[:1], zeros[:0], -zeros]
    others += [torch.cat([values[8:16], values[:8], values[16:]])]
    assert len(set(hash_tensors([other.contiguous() for other in others]))) == len(others)
    assert hash_tensors([values, values]) == 2 * hash_tensors([values.clone()])


class Assorted(nn.Module):
    """Parameters and buffers of every kind that bits can hide in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.plain = nn.Parameter(torch.randn(300, 100))
        self.turned = nn.Parameter(torch.randn(6, 5).t())
        self.sliced = nn.Parameter(torch.randn(8, 8)[::2, 1::3])
        self.float_16 = nn.Parameter(torch.randn(33).half())
        self.bfloat_16 = nn.Parameter(torch.randn(33).bfloat16())
        self.float_64 = nn.Parameter(torch.randn((), dtype=torch.float64))
        self.complex_64 = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.complex_128 = nn.Parameter(torch.randn(5, dtype=torch.complex128))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.whole = nn.Parameter(torch.arange(9), requires_grad=False)
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("bytes", torch.arange(100, dtype=torch.uint8))
        self._ddp_params_and_buffers_to_ignore = ["ignored"]
        self.ignored = nn.Parameter(torch.randn(4))


def flip(tensor: Tensor, bit: int) -> None:
    """One bit of a tensor's elements in their order; of a bool, its value."""
    with torch.no_grad():
        if tensor.dtype == torch.bool:
            flat = tensor.reshape(-1).clone()
            flat[bit // 8] = ~flat[bit // 8]
            tensor.copy_(flat.view(tensor.shape))
            return
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).clone()
        data[bit // 8] ^= 1 << bit % 8
        tensor.copy_(data.view(tensor.dtype).view(tensor.shape))


def audit_assorted(rank: int, world_size: int) -> dict[str, str]:
    module = Assorted()
    model = DataParallel(module)
    check_replicas(model)
    check_replicas(model, buffers=True)
    check_replicas(module, torch.distributed.group.WORLD, buffers=True)
    found = {}
    source = random.Random(2)
    tensors = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in tensors:
        for _ in range(3 if tensor.numel() else 0):
            bit = source.randrange(8 * tensor.numel() * tensor.element_size())
            who = source.randrange(world_size)
            if rank == who:
                flip(tensor, bit)
            is_buffer = name in ("flags", "count", "bytes")
            if name == "ignored":
                check_replicas(model, buffers=True)
            else:
                if is_buffer:
                    check_replicas(model)
                error = expect_error(MismatchError, lambda: check_replicas(model, buffers=True))
                text = found[f"{name} {bit} {who}"] = str(error)
                kind = "buffer" if is_buffer else "parameter"
                assert f"differ: {kind} {name} is the first that differs, on rank {who}; " in text
                element = bit // 8 // tensor.element_size()
                assert f"Its element {place(element, tensor.shape)} is " in text
            if rank == who:
                flip(tensor, bit)
            check_replicas(model, buffers=True)
    return found


def place(index: int, shape: torch.Size) -> list[int]:
    grid = torch.arange(shape.numel()).view(shape)
    return [int(i) for i in torch.nonzero(grid == index)[0]] if shape else []


def test_one_flipped_bit_anywhere_is_found(transport: Transport) -> None:
    """Random bits of parameters of every kind, frozen and integral ones included, and of buffers
    where asked for: every rank says the same, the tensor, the rank and the element. What the model
    tells DDP to ignore is ignored."""
    texts = transport.pool(3).run(audit_assorted)
    assert texts[0] == texts[1] == texts[2]
    assert len(texts[0]) == 3 * 13


def audit_several(rank: int, world_size: int) -> list[str]:
    texts = []

    def check(module: nn.Module) -> None:
        texts.append(str(expect_error(MismatchError, lambda: check_replicas(module))))

    module = mlp(64, 3)
    with torch.no_grad():  # everybody has another value, and two tensors differ
        module[0].bias[5] = float(rank)
        module[4].weight[0, 0] = float(rank)
    check(module)
    with torch.no_grad():
        module[0].bias[5] = 1.0 if rank == 1 else 3.0
        module[4].weight[0, 0] = 0.0
    check(module)
    with torch.no_grad():
        module[0].bias[5] = 0.0 if rank != 1 else -0.0
    check(module)
    check(nn.Linear(3, 3 + (rank == 1)))
    check(nn.Sequential(*[nn.Linear(1, 1) for _ in range(2 + (rank == 1))]))
    error = expect_error(UsageError, lambda: check_replicas(nn.Linear(2, 2, device="meta")))
    assert "weight is on the meta device" in str(error)
    return texts


def test_differences_are_put_in_words(transport: Transport) -> None:
    """With a majority the others are named, without one all groups; values and bits are shown;
    modules that are not the same are told apart from replicas that have drifted."""
    results = transport.pool(3).run(audit_several)
    assert results[0] == results[1] == results[2]
    all_differ, one_differs, zeros, shapes, counts = results[0]
    assert "parameter 0.bias is the first that differs, between rank 0 and rank 1" in all_differ
    assert "without a majority. Its element [5] is 0.0 (0x00000000) on rank 0; 1.0" in all_differ
    assert "4.weight differs as well" in all_differ
    assert "0.bias is the first that differs, on rank 1; ranks 0, 2 agree" in one_differs
    assert "3.0 (0x40400000) on ranks 0, 2; 1.0 (0x3f800000) on rank 1" in one_differs
    assert "as well" not in one_differs
    assert "0.0 (0x00000000) on ranks 0, 2; -0.0 (0x80000000) on rank 1" in zeros
    assert "on rank 1 parameter weight of shape [4, 3]" in shapes
    assert "number 4 is on ranks 0, 2 missing; on rank 1 parameter 2.weight" in counts


def audit_training(rank: int, world_size: int, every: int, broken_step: int) -> Any:
    module = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16))
    module[0].weight.requires_grad_(False)
    model = DataParallel(module, audit_every=every)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(12):
        if step == broken_step and rank == world_size - 1:
            flip(module[0].weight, 7)
        with model.no_sync():
            wavy_loss(model(draw(rank, step, 4, 16))).backward()
        try:
            output = model(draw(rank, step, 4, 16))
        except MismatchError as error:
            if rank == world_size - 1:
                flip(module[0].weight, 7)
            check_replicas(model)
            wavy_loss(model(draw(rank, step, 4, 16))).backward()  # one may go on
            return step, str(error)
        wavy_loss(output).backward()
        optimizer.step()
        optimizer.zero_grad()
    return None


def test_the_audit_names_the_step(transport: Transport) -> None:
    """A bit of a frozen parameter flips before a step: with audit_every=1 that step's forward
    raises, on every rank; with 5 the next audited one's. Without a difference nothing is raised."""
    pool = transport.pool(2)
    for result in pool.run(audit_training, 1, 3):
        step, text = result
        assert step == 3
        assert "differ after 3 steps (after 2 they were equal): parameter 0.weight" in text
    for result in pool.run(audit_training, 5, 6):
        step, text = result
        assert step == 10
        assert "differ after 10 steps (after 5 they were equal): parameter 0.weight" in text
    assert pool.run(audit_training, 2, -1) == [None, None]


def audit_arguments(rank: int, world_size: int) -> None:
    for wrong in (0, -1, 2.5, "often"):
        error = expect_error(UsageError, lambda: DataParallel(mlp(4, 1), audit_every=wrong))  # noqa: B023
        assert f"audit_every is {wrong!r}" in str(error)
    error = expect_error(MismatchError, lambda: DataParallel(mlp(4, 1), audit_every=1 + rank))
    assert "audit_every is 2 on rank 1, and 1 on rank 0" in str(error)
    level = torch.distributed.get_debug_level()
    torch.distributed.set_debug_level(torch.distributed.DebugLevel.DETAIL)
    try:
        assert DataParallel(mlp(4, 1)).audit_every == 100
        assert DataParallel(mlp(4, 1), audit_every=7).audit_every == 7
    finally:
        torch.distributed.set_debug_level(level)
    assert DataParallel(mlp(4, 1)).audit_every is None


def test_arguments_of_the_audit(pool2: Any) -> None:
    """Nonsense is refused, ranks must agree, and TORCH_DISTRIBUTED_DEBUG=DETAIL switches it on."""
    pool2.run(audit_arguments)


def test_the_name_is_public() -> None:
    assert pydist.check_replicas is check_replicas
