"""Owns what crosses from stage to stage: every value arrives whole, private and in any order."""

import random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from channels import activation, gradient, make_channel, receive_tensor, send_tensor, step
from conftest import Transport
from pydist._C import Channel, arena_usage
from pydist.errors import UsageError

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.uint16,
]


def of_type(dtype: torch.dtype, *sizes: int) -> Tensor:
    return torch.arange(torch.Size(sizes).numel()).add(1).reshape(sizes).to(dtype)


def values() -> dict[str, Tensor]:
    base = torch.randn(4, 6, 8, 10)
    tensors = {str(dtype): of_type(dtype, 3, 5) for dtype in DTYPES}
    tensors |= {
        "no dimension": torch.tensor(3.5),
        "bool without dimension": torch.tensor(True),
        "no elements": torch.empty(0),
        "no rows": torch.empty(0, 7, dtype=torch.int32),
        "one element": torch.ones(1, 1, 1),
        "channels last": base.contiguous(memory_format=torch.channels_last),
        "transposed": torch.randn(5, 7).t(),
        "permuted": base.permute(3, 0, 2, 1),
        "every second": base[:, ::2, :, ::3],
        "columns": torch.randn(9, 9)[:, 3:5],
        "expanded": torch.randn(3, 1).expand(3, 4),
        "expanded scalar": torch.tensor(2.0).expand(2, 3),
        "view with an offset": torch.randn(100)[17:83],
        "conj": torch.randn(4, 3, dtype=torch.complex64).conj(),
        "neg": torch.randn(4, dtype=torch.complex64).conj().imag,
        "zero": torch._efficientzerotensor(3, 2),
        "with a graph": torch.randn(3, requires_grad=True) * 2,
        "leaf": torch.randn(2, 2, requires_grad=True),
        "large": torch.randn(700, 1000),
        "large, every second column": torch.randn(700, 1000)[:, ::2],
        "many dimensions": torch.randn(1, 2, 1, 3, 1, 2, 1, 2, 1),
    }
    return tensors


def same_bits(left: Tensor, right: Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    left, right = (t.detach().resolve_conj().resolve_neg().contiguous() for t in (left, right))
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))


def exchange_every_value(rank: int, world_size: int) -> None:
    torch.manual_seed(5)
    sent = values()
    channel = make_channel()
    for _ in range(2):
        with step(channel):
            if rank == 0:
                for microbatch, tensor in enumerate(sent.values()):
                    send_tensor(channel, 1, activation(microbatch), tensor)
                channel.send(1, activation(1000), [(t, t.requires_grad) for t in sent.values()])
            else:
                received = [
                    receive_tensor(channel, 0, activation(microbatch))
                    for microbatch in range(len(sent))
                ]
                slots, structure, absent = channel.receive(0, activation(1000))
                assert (structure, absent) == (b"", False)
                flags = [flag for _, flag in slots]
                assert flags == [tensor.requires_grad for tensor in sent.values()]
                together = [tensor for tensor, _ in slots]
                for name, expected, *found in zip(
                    sent, sent.values(), received, together, strict=True
                ):
                    for tensor in found:
                        assert same_bits(tensor, expected), name
                        assert not tensor.requires_grad
                        assert tensor.is_leaf
                        assert not tensor.is_conj()
                        assert not tensor.is_neg()
                        assert tensor.storage_offset() == 0
                        dense = torch.empty_like(expected, memory_format=torch.preserve_format)
                        assert tensor.stride() == dense.stride(), name


def test_every_value_arrives_with_its_bits_type_and_strides(transport: Transport) -> None:
    transport.pool(2).run(exchange_every_value)


def exchange_structures(rank: int, world_size: int) -> None:
    """Long ones do not fit into the ring (or the block), and absent and none are no zeros."""
    channel = make_channel(ring_nbytes=256)
    structures = [b"", b"x", b"\0" * 9, random.Random(3).randbytes(100_000)]
    with step(channel):
        for microbatch, structure in enumerate(structures):
            slots: list[tuple[Tensor | None, bool]] = [(None, True), (torch.ones(3), True)]
            slots += [(None, False)] * microbatch
            key = gradient(microbatch, port=microbatch)
            if rank == 0:
                channel.send(1, key, slots, structure, absent=microbatch == 1)
                continue
            found, found_structure, absent = channel.receive(0, key)
            assert found_structure == structure
            assert absent == (microbatch == 1)
            assert [flag for _, flag in found] == [flag for _, flag in slots]
            assert [tensor is None for tensor, _ in found] == [t is None for t, _ in slots]
            assert found[1][0] is not None
            assert found[1][0].tolist() == [1, 1, 1]
        if rank == 0:
            channel.send(1, ("result", 0, 0, 0), [], absent=True)
        else:
            assert channel.receive(0, ("result", 0, 0, 0)) == ([], b"", True)


def test_structures_of_any_length_none_and_absent(transport: Transport) -> None:
    transport.pool(2).run(exchange_structures)


def shuffle_messages(rank: int, world_size: int, num: int, ring_nbytes: int) -> None:
    """All send all first, in an order of their own, and take in another one."""
    channel = make_channel(ring_nbytes=ring_nbytes)
    peers = [peer for peer in range(world_size) if peer != rank]
    order = random.Random(rank)
    for turn in range(2):
        with step(channel):
            keys = [activation(i % 7, stage=i // 7, port=i % 3) for i in range(num)]
            keys += [gradient(i % 7, stage=i // 7, port=i % 3) for i in range(num)]
            pairs = [(peer, index) for peer in peers for index in range(len(keys))]
            order.shuffle(pairs)
            for peer, index in pairs:
                tensor = torch.full((index % 50,), float(1000 * rank + index + turn))
                send_tensor(channel, peer, keys[index], tensor)
            order.shuffle(pairs)
            for peer, index in pairs:
                tensor = receive_tensor(channel, peer, keys[index])
                expected = [float(1000 * peer + index + turn)] * (index % 50)
                assert tensor.tolist() == expected, (peer, keys[index])
    counters = channel.counters()
    assert counters["num_messages"] == 2 * 2 * num * len(peers)
    nbytes = sum(4 * (index % 50) for index in range(2 * num))
    assert counters["moved_nbytes"] == 2 * nbytes * len(peers)
    assert counters["peak_parked"] > num


@pytest.mark.parametrize("world_size", [2, 4])
def test_messages_are_matched_in_any_order(transport: Transport, world_size: int) -> None:
    """Two ranks that send to each other first, more than any ring has room for, cannot block."""
    num = 700 if transport.name == "shared_memory" else 150
    transport.pool(world_size).run(shuffle_messages, num // world_size, 128)


def send_thousands(rank: int, world_size: int, num: int) -> None:
    """In the order of sending, and all of them before the first is wanted."""
    channel = make_channel(ring_nbytes=1024)
    for late in (False, True):
        with step(channel, "forward"):
            for index in range(num):
                if rank == 0:
                    send_tensor(channel, 1, activation(index), torch.tensor(index))
                elif not late:
                    assert receive_tensor(channel, 0, activation(index)).item() == index
            if rank == 1 and late:
                for index in reversed(range(num)):
                    assert receive_tensor(channel, 0, activation(index)).item() == index


def test_thousands_of_tiny_messages(transport: Transport) -> None:
    num = 5000 if transport.name == "shared_memory" else 200
    transport.pool(2).run(send_thousands, num)


def send_much(rank: int, world_size: int, max_lent_nbytes: int) -> dict[str, int]:
    """Messages that the arena has no room for go through the ring."""
    torch.manual_seed(1)
    tensors = [torch.randn(1 << 20), torch.randn(300_001), torch.randn(1000, 1000).t()[::2]]
    channel = make_channel(max_lent_nbytes=max_lent_nbytes)
    for _ in range(2):
        with step(channel):
            for microbatch, tensor in enumerate(tensors):
                send_tensor(channel, 1 - rank, activation(microbatch), tensor + rank)
            for microbatch, tensor in reversed(list(enumerate(tensors))):
                found = receive_tensor(channel, 1 - rank, activation(microbatch))
                assert torch.equal(found, tensor + (1 - rank))
    return channel.counters()


def test_large_messages_with_and_without_room_in_the_arena(transport: Transport) -> None:
    for max_lent_nbytes, num_inline in ((1 << 30, 0), (5 << 20, 4), (0, 6)):
        for counters in transport.pool(2).run(send_much, max_lent_nbytes):
            assert counters["lent_nbytes"] <= max_lent_nbytes
            if transport.name == "shared_memory":
                assert counters["num_inline"] == num_inline


def change_after_sending(rank: int, world_size: int) -> None:
    """What one side does to its tensor, the other does not see; nor does the next message."""
    channel = make_channel()
    for num in (10, 100_000):
        for turn in range(6):
            with step(channel):
                mine = torch.full((num,), float(turn))
                send_tensor(channel, 1 - rank, activation(0), mine)
                mine.fill_(-1)
                send_tensor(channel, 1 - rank, activation(1), mine)
                del mine
                torch.full((num,), -2.0)  # in the memory that the tensor had
                first = receive_tensor(channel, 1 - rank, activation(0))
                first.add_(100)
                second = receive_tensor(channel, 1 - rank, activation(1))
                assert second.eq(-1).all()
                second.zero_()
                assert first.eq(turn + 100).all()
                again = first.clone()
                send_tensor(channel, 1 - rank, activation(2), first)
                first.zero_()
                assert receive_tensor(channel, 1 - rank, activation(2)).equal(again)


def test_messages_are_private(transport: Transport) -> None:
    transport.pool(2).run(change_after_sending)


def keep_received(rank: int, world_size: int) -> None:
    """Memory of a received tensor is used again, but not while anybody can still see it."""
    channel = make_channel()
    num = 50_000
    holders = ["tensor", "view", "detached", "numpy", "graph", "storage", "dlpack", "moved", "lazy"]
    kept: list[tuple[str, object, Tensor]] = []
    for turn in range(30):
        holder = holders[turn % len(holders)]
        with step(channel):
            if rank == 0:
                send_tensor(channel, 1, activation(0), torch.full((num,), float(turn)))
                continue
            tensor = receive_tensor(channel, 0, activation(0))
            assert tensor.eq(turn).all()
            expected = tensor.clone()
            if holder == "graph":
                weight = torch.ones(num, requires_grad=True)
                kept.append((holder, (tensor * weight).sum(), expected))
            elif holder == "moved":  # its memory becomes another tensor's
                other = torch.empty(0)
                other.set_(tensor.untyped_storage())  # type: ignore[call-overload]
                kept.append((holder, other.view(torch.float32), expected))
            else:
                kept.append((holder, hold(holder, tensor), expected))
            del tensor
        for name, held, expected in kept:
            if name == "graph":
                (found,) = torch.autograd.grad(held, weight_of(held), retain_graph=True)
            else:
                found = as_tensor(held)
            assert torch.equal(found, expected), name
        if len(kept) > 12:
            del kept[:5]


def hold(holder: str, tensor: Tensor) -> object:
    if holder == "view":
        return tensor.view(2, -1)
    if holder == "detached":
        return tensor.detach()
    if holder == "numpy":
        return tensor.numpy()
    if holder == "storage":
        return tensor.untyped_storage()
    if holder == "dlpack":
        return torch.from_dlpack(tensor)
    if holder == "lazy":
        return torch._lazy_clone(tensor)
    return tensor


def as_tensor(held: object) -> Tensor:
    if isinstance(held, Tensor):
        return held.reshape(-1)
    if isinstance(held, torch.UntypedStorage):
        return torch.empty(0).set_(held)  # type: ignore[call-overload,no-any-return]
    return torch.from_numpy(held)  # type: ignore[arg-type]


def weight_of(total: object) -> Tensor:
    node = total.grad_fn.next_functions[0][0]  # type: ignore[attr-defined]
    weight: Tensor = node.next_functions[1][0].variable
    return weight


def test_memory_is_never_used_again_while_somebody_sees_it(transport: Transport) -> None:
    transport.pool(2).run(keep_received)


def exchange_ones(channel: Channel, shapes: list[tuple[int, ...]]) -> None:
    peer = 1 - channel.rank
    with step(channel):
        for microbatch, shape in enumerate(shapes):
            send_tensor(channel, peer, activation(microbatch), torch.ones(shape))
        received = [receive_tensor(channel, peer, activation(i)) for i in range(len(shapes))]
        assert all(tensor.eq(1).all() for tensor in received)
        del received  # before end_step(), in which messages of the next step may come


def count_memory(rank: int, world_size: int) -> None:
    """After the first steps neither side asks for more; shapes of the past are forgotten."""
    unused_nbytes = arena_usage()["used_nbytes"]
    channel = make_channel()
    shapes = 3 * [(100,), (300, 300), (64, 1024), (3, 1 << 16)]
    for _ in range(3):
        exchange_ones(channel, shapes)
    before, arena_before = channel.counters(), arena_usage()["used_nbytes"]
    dist.barrier()  # no message of the peer's next step is among what is counted
    for _ in range(20):
        exchange_ones(channel, shapes)
    after = channel.counters()
    dist.barrier()
    for name in ("lent_nbytes", "pool_nbytes"):
        assert after[name] == before[name], name
    assert arena_usage()["used_nbytes"] == arena_before == unused_nbytes + before["lent_nbytes"]
    assert before["pool_nbytes"] >= sum(4 * torch.Size(shape).numel() for shape in shapes)
    for turn in range(40):
        exchange_ones(channel, [(1000 + turn, 1000)])
    bound = 12 * 1050 * 1000 * 4
    assert channel.counters()["pool_nbytes"] < bound
    assert channel.counters()["lent_nbytes"] < bound
    del channel
    assert arena_usage()["used_nbytes"] == unused_nbytes


def test_steady_state_allocates_nothing(transport: Transport) -> None:
    transport.pool(2).run(count_memory)


def refuse_tensors(rank: int, world_size: int) -> None:
    """A tensor that cannot be sent is refused before a byte moves, and the step goes on."""
    channel = make_channel()
    with pytest.raises(UsageError, match="outside of a step"):
        send_tensor(channel, 1 - rank, activation(0), torch.ones(1))
    with step(channel):
        for tensor in (
            torch.ones(3).to_sparse(),
            torch.empty(3, device="meta"),
            torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        ):
            with pytest.raises(UsageError, match="dense tensors on the CPU"):
                channel.send(1 - rank, activation(0), [(torch.ones(5), False), (tensor, False)])
        for peer in (rank, world_size, -1):
            with pytest.raises(UsageError, match="not a peer"):
                send_tensor(channel, peer, activation(0), torch.ones(1))
        send_tensor(channel, 1 - rank, activation(0), torch.ones(2) * rank)
        assert receive_tensor(channel, 1 - rank, activation(0)).tolist() == [1 - rank] * 2
    assert channel.counters()["num_messages"] == 1


def test_what_cannot_be_sent_is_refused(transport: Transport) -> None:
    transport.pool(2).run(refuse_tensors)


def receive_in_other_modes(rank: int, world_size: int) -> None:
    """A message that arrives under inference_mode may be the next training step's."""
    channel = make_channel()
    with torch.inference_mode(), step(channel, "evaluate"):
        send_tensor(channel, 1 - rank, activation(0), torch.ones(3))
        received = receive_tensor(channel, 1 - rank, activation(0))
        assert not received.is_inference()
    with step(channel):
        send_tensor(channel, 1 - rank, activation(0), received)
        weight = torch.ones(3, requires_grad=True)
        (receive_tensor(channel, 1 - rank, activation(0)) * weight).sum().backward()
        assert weight.grad is not None


def test_received_tensors_are_normal_ones_in_every_mode(transport: Transport) -> None:
    transport.pool(2).run(receive_in_other_modes)


def look_before_waiting(rank: int, world_size: int) -> None:
    channel = make_channel()
    with step(channel):
        assert not channel.has_arrived(1 - rank, activation(5))
        send_tensor(channel, 1 - rank, activation(rank), torch.ones(1))
        while not channel.has_arrived(1 - rank, activation(1 - rank)):
            pass
        assert not channel.has_arrived(1 - rank, activation(5))
        assert receive_tensor(channel, 1 - rank, activation(1 - rank)).tolist() == [1]
        assert not channel.has_arrived(1 - rank, activation(1 - rank))


def test_has_arrived_tells_without_waiting(transport: Transport) -> None:
    transport.pool(2).run(look_before_waiting)


def step_alone(rank: int, world_size: int) -> None:
    channel = make_channel()
    for _ in range(3):
        with step(channel):
            pass


def test_a_channel_of_one_rank(transport: Transport) -> None:
    transport.pool(1).run(step_alone)


def flush_and_leave(rank: int, world_size: int) -> None:
    """What rank 0 has sent reaches rank 1 although rank 0 is busy elsewhere from then on."""
    channel = make_channel(ring_nbytes=256)
    with step(channel):
        if rank == 0:
            for microbatch in range(20):
                send_tensor(channel, 1, activation(microbatch), torch.full((40,), microbatch))
            dist.barrier()
            channel.flush("before it waits for others")
        else:
            dist.barrier()  # the ring is full by now
            found = [receive_tensor(channel, 0, activation(m)) for m in range(20)]
            assert [int(tensor[0]) for tensor in found] == list(range(20))
        dist.barrier()  # rank 0 looks after its ring no more


def test_a_flush_leaves_nothing_to_hand_over(transport: Transport) -> None:
    """A rank may wait for ranks of another group then: nobody of its own needs its help."""
    transport.pool(2).run(flush_and_leave)
