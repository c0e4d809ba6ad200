"""Owns parameters that stages share: sums of gradients, copies equal in every bit, any placement.

The pipeline here is a loop over stages that sends values between ranks; see Stages.
"""

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pydist
import ranks
from channels import activation, gradient, make_channel, receive_tensor, send_tensor, step
from conftest import Transport
from pydist._engine import group_engine
from pydist._partition import (
    TiedGroup,
    modules_of_sequential,
    partition_sequential,
    tied_parameters,
)
from pydist._tied_weights import TiedWeights, separate_stages
from reference import draw

NUM_TOKENS, WIDTH, NUM_MICROBATCHES = 11, 8, 3
BALANCE = (2, 1, 1, 1)  # four stages, of which three have the embedding's weight


class Lookup(nn.Module):
    """Uses the embedding's weight twice."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(x, self.weight).softmax(-1) @ self.weight


def model(sparse: bool = False) -> nn.Sequential:
    torch.manual_seed(5)
    embedding = nn.Embedding(NUM_TOKENS, WIDTH, sparse=sparse)
    head = nn.Linear(WIDTH, NUM_TOKENS, bias=False)
    head.weight = embedding.weight
    return nn.Sequential(
        OrderedDict(
            embedding=embedding,
            act=nn.Tanh(),
            middle=nn.Linear(WIDTH, WIDTH),
            lookup=Lookup(embedding.weight),
            head=head,
        )
    )


def tokens_of(step_number: int, microbatch: int) -> Tensor:
    return (draw(microbatch, step_number, 6).abs() * 4).long() % NUM_TOKENS


def loss_of(output: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(output, (tokens + 1) % NUM_TOKENS) / NUM_MICROBATCHES


class Stages:
    """A rank's stages of a model, run one after another for each microbatch."""

    def __init__(self, module: nn.Sequential, placement: tuple[int, ...], **options: Any) -> None:
        self.engine = group_engine()
        self.rank = self.engine.rank
        self.placement = placement
        self.channel = make_channel() if self.engine.size > 1 else None
        partition = partition_sequential(module, BALANCE)
        modules = modules_of_sequential(module)
        self.groups = tied_parameters(partition, modules)
        self.layers = {
            stage: {partition.layer_names[i]: modules[i] for i in partition.layers_of(stage)}
            for stage, rank in enumerate(placement)
            if rank == self.rank
        }
        separate_stages(self.groups, self.layers)
        self.tied = TiedWeights(
            self.engine, self.channel, self.groups, self.layers, placement, **options
        )
        all_layers = [layer for layers in self.layers.values() for layer in layers.values()]
        aliases = {id(alias) for alias in self.tied.aliases}
        found = dict.fromkeys(p for layer in all_layers for p in layer.parameters())
        self.parameters = [p for p in found if id(p) not in aliases]

    def copy(self) -> nn.Parameter | None:
        """This rank's copy of the shared parameter."""
        for stage, name in self.groups[0]:
            if stage in self.layers:
                layer, _, rest = name.partition(".")
                return self.layers[stage][layer].get_parameter(rest)
        return None

    def step(self, number: int, fails: str = "") -> None:
        self.tied.link()
        self.tied.before_step()
        try:
            if self.channel is None:
                self._run(number)
            else:
                with step(self.channel):
                    self._run(number)
                    if fails == "early" and self.rank == 1:
                        raise ValueError("a stage failed")
                    self.tied.after_step()
                    if fails == "late" and self.rank == 1:
                        raise ValueError("a stage failed")
        except BaseException:
            self.tied.failed_step()
            raise
        if self.channel is None:
            self.tied.after_step()

    def _run(self, number: int) -> None:
        for microbatch in range(NUM_MICROBATCHES):
            tokens = tokens_of(number, microbatch)
            kept: dict[int, tuple[Tensor, Tensor]] = {}
            value = tokens
            for stage in range(len(self.placement)):
                value = self._pass(value, stage - 1, stage, activation(microbatch, stage))
                if stage in self.layers:
                    start = value.detach().requires_grad_(value.is_floating_point())
                    value = start
                    for layer in self.layers[stage].values():
                        value = layer(value)
                    if stage == len(self.placement) - 1:
                        value = loss_of(value, tokens)
                    kept[stage] = (start, value)
            grad = torch.ones(())
            for stage in reversed(range(len(self.placement))):
                grad = self._pass(grad, stage + 1, stage, gradient(microbatch, stage))
                if stage in self.layers:
                    start, value = kept[stage]
                    if value.requires_grad:
                        value.backward(grad)
                    grad = start.grad if start.grad is not None else torch.ones(())

    def _pass(self, value: Tensor, source: int, target: int, key: Any) -> Tensor:
        if source not in range(len(self.placement)):
            return value
        from_rank, to_rank = self.placement[source], self.placement[target]
        if from_rank == to_rank or self.channel is None:
            return value
        if from_rank == self.rank:
            send_tensor(self.channel, to_rank, key, value.detach())
        if to_rank == self.rank:
            return receive_tensor(self.channel, from_rank, key)
        return value


def train(rank: int, world_size: int, placement: tuple[int, ...]) -> list[Tensor | None]:
    """The rank's copy after each of three steps of Adam."""
    module = model()
    with torch.no_grad():
        # Initialised differently: the first stage's value is everybody's.
        module.embedding.weight.add_(float(rank != placement[0]))
    stages = Stages(module, placement)
    optimizer = torch.optim.Adam(stages.parameters, lr=0.05)
    copies = []
    for number in range(3):
        optimizer.zero_grad()
        stages.step(number)
        optimizer.step()
        mine = stages.copy()
        copies.append(None if mine is None else mine.detach().clone())
        assert all(alias.grad is None for alias in stages.tied.aliases)
        assert all(torch.equal(alias, mine) for alias in stages.tied.aliases)
    return copies


def train_unsplit() -> list[Tensor]:
    module = model()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.05)
    copies = []
    for number in range(3):
        optimizer.zero_grad()
        for microbatch in range(NUM_MICROBATCHES):
            tokens = tokens_of(number, microbatch)
            loss_of(module(tokens), tokens).backward()
        optimizer.step()
        copies.append(module.embedding.weight.detach().clone())
    return copies


def test_a_tied_embedding_trains_as_in_one_process(transport: Transport) -> None:
    """C99: the first and the last stage shared a weight, each summed its own gradients only, and
    after one step the copies differed. Here all copies have the same bits after every step, on any
    placement (two uses on one rank are not counted twice), and are the unsplit model's."""
    expected = train_unsplit()
    alone = transport.pool(1).run(train, (0, 0, 0, 0))[0]
    results = [[alone]]
    for placement in ((0, 1, 0, 1), (0, 1, 1, 0), (1, 0, 0, 0), (0, 0, 1, 1)):
        results.append(transport.pool(2).run(train, placement))
    results.append(transport.pool(3).run(train, (0, 1, 2, 0)))  # rank 1 has no copy
    assert results[-1][1] == [None] * 3
    results[-1].pop(1)
    for copies_by_rank in results:
        for copies in copies_by_rank:
            assert all(map(torch.equal, copies, alone))
            for found, wanted in zip(copies, expected, strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def gradients(stages: Stages) -> Tensor | None:
    mine = stages.copy()
    assert mine is not None
    return None if mine.grad is None else mine.grad.detach().clone()


def accumulate(rank: int, world_size: int) -> None:
    placement = (0, 1, 1, 0)
    single = []
    for number in (0, 1):
        stages = Stages(model(), placement)
        stages.step(number)
        single.append(gradients(stages))
    stages = Stages(model(), placement)
    for set_to_none in (True, False):
        stages.step(0)
        held = stages.copy().grad
        stages.step(1)
        assert stages.copy().grad is held  # as autograd accumulates: whoever holds it sees it
        assert torch.equal(gradients(stages), single[0] + single[1])
        for parameter in stages.parameters:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()
    assert torch.equal(gradients(stages), torch.zeros(NUM_TOKENS, WIDTH))
    stages.step(1)
    assert torch.equal(gradients(stages), single[1])
    with pytest.raises((ValueError, pydist.PeerError), match="a stage failed"):
        stages.step(0, fails="early")
    assert torch.equal(gradients(stages), single[1])  # nothing of the step that failed
    with pytest.raises((ValueError, pydist.PeerError), match="a stage failed"):
        stages.step(0, fails="late")
    assert torch.equal(gradients(stages), single[1] + single[0])  # on all ranks
    stages.step(0)
    assert torch.equal(gradients(stages), single[1] + single[0] + single[0])


def test_gradients_add_up_over_steps(pool2: ranks.RankPool) -> None:
    """Accumulation over two step() calls summed the first one's gradients once more."""
    pool2.run(accumulate)


def unused(rank: int, world_size: int) -> None:
    stages = Stages(model(), (0, 1, 1, 0))
    stages.tied.before_step()
    with step(stages.channel):
        stages.tied.after_step()
    assert gradients(stages) is None
    if rank == 1:
        [weight] = [p for p in stages.parameters if p is stages.copy()]
    stages.tied.before_step()
    with step(stages.channel):
        if rank == 1:
            weight.grad = draw(0, 0, NUM_TOKENS, WIDTH)
        stages.tied.after_step()
    assert torch.equal(gradients(stages), draw(0, 0, NUM_TOKENS, WIDTH))


def test_a_stage_that_did_not_use_it_adds_nothing(pool2: ranks.RankPool) -> None:
    """None where nobody used it, as in one process; else the sum of who did."""
    pool2.run(unused)


def variants(rank: int, world_size: int) -> None:
    placement = (0, 1, 1, 0)
    plain = Stages(model(), placement)
    plain.step(0)
    sparse = Stages(model(sparse=True), placement)
    sparse.step(0)
    torch.testing.assert_close(gradients(sparse), gradients(plain))
    frozen = model()
    frozen.embedding.weight.requires_grad_(False)
    stages = Stages(frozen, placement)
    stages.step(0)
    assert gradients(stages) is None
    # Thawed later, by the parameter that the optimizer knows.
    stages.copy().requires_grad_()
    stages.step(0)
    assert torch.equal(gradients(stages), gradients(plain))
    # Converted after the pipeline was made: each leaf by itself.
    for layers in stages.layers.values():
        for layer in layers.values():
            layer.double()
    stages.copy().grad = None
    with torch.no_grad():
        stages.copy().mul_(2)
    stages.step(0)
    assert all(torch.equal(alias, stages.copy()) for alias in stages.tied.aliases)
    assert gradients(stages).dtype == torch.float64


def test_sparse_frozen_and_converted_parameters(pool2: ranks.RankPool) -> None:
    pool2.run(variants)


def views(rank: int, world_size: int) -> None:
    """What the next round writes to the same memory must not be what was set aside."""
    single = []
    for number in (0, 1):
        stages = Stages(model(), (0, 1, 1, 0))
        stages.step(number)
        single.append(gradients(stages))
    stages = Stages(model(), (0, 1, 1, 0), gradients_are_views=True)
    bucket = torch.empty(NUM_TOKENS, WIDTH)

    def into_bucket(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if parameter.grad.data_ptr() != bucket.data_ptr():
            bucket.copy_(parameter.grad)
            parameter.grad = bucket

    stages.copy().register_post_accumulate_grad_hook(into_bucket)
    for number in (0, 1):
        stages.step(number)
        assert stages.copy().grad is bucket
    torch.testing.assert_close(gradients(stages), single[0] + single[1])


def test_gradients_that_are_views_of_a_bucket(pool2: ranks.RankPool) -> None:
    pool2.run(views)


def differing(rank: int, world_size: int) -> None:
    module = model()
    if rank == 1:
        wider = nn.Parameter(torch.zeros(NUM_TOKENS + 1, WIDTH))
        module.lookup.weight = module.head.weight = module.embedding.weight = wider
    with pytest.raises(pydist.MismatchError) as raised:
        Stages(module, (0, 0, 1, 1))
    assert str(raised.value) == (
        "tied parameters differ: lookup.weight is (12, 8) torch.float32, and embedding.weight is "
        "(11, 8) torch.float32; build the same model on every rank"
    )


def test_copies_that_differ_are_named_on_every_rank(pool2: ranks.RankPool) -> None:
    pool2.run(differing)


def missing(rank: int, world_size: int) -> None:
    layers = {rank: {str(rank): nn.Linear(2, 2, bias=rank == 0)}}
    group: TiedGroup = ((0, "0.bias"), (1, "1.bias"))
    expected = (pydist.PeerError, "rank 1 raised in tying parameters: UsageError: there is no")
    if rank == 1:
        expected = (pydist.UsageError, r"there is no parameter 1\.bias, which is to be tied")
    with pytest.raises(expected[0], match=expected[1]):
        TiedWeights(group_engine(), make_channel(), [group], layers, (0, 1))


def test_a_name_that_a_factory_did_not_make_is_an_error(pool2: ranks.RankPool) -> None:
    """Ties between modules that callables make are given by name."""
    pool2.run(missing)


def test_modules_that_factories_made_share_memory_on_one_rank() -> None:
    layers: dict[int, dict[str, nn.Module]] = {
        0: {"0": nn.Linear(2, 3)},
        1: {"1": nn.Linear(2, 3)},
        2: {"2": nn.Linear(2, 2)},
    }
    separate_stages([((0, "0.weight"), (1, "1.weight"))], layers)
    one, two = (layers[stage][str(stage)].get_parameter("weight") for stage in (0, 1))
    assert one.data_ptr() == two.data_ptr()
    with pytest.raises(pydist.MismatchError, match=r"2\.weight is \(2, 2\).* and 0\.weight is"):
        separate_stages([((0, "0.weight"), (2, "2.weight"))], layers)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.lstm = nn.LSTM(4, 4)
        self.calls = [0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        return x + self.lstm(self.norm(x))[0]


def test_a_module_in_two_stages_of_a_rank() -> None:
    """A block that is applied four times, in three stages of one rank: each has its own leaves,
    and all else in common; nothing that had a reference to the block notices."""
    torch.manual_seed(0)
    block, plain = Block(), nn.Tanh()
    inner = nn.Sequential(block, plain)
    module = nn.Sequential(block, inner, plain, block)
    reference = copy.deepcopy(module)
    partition = partition_sequential(module, (1, 2, 1))
    groups = tied_parameters(partition, modules_of_sequential(module))
    assert len(groups) == 6
    assert groups[0] == ((0, "0.norm.weight"), (1, "1.0.norm.weight"), (2, "3.norm.weight"))
    layers: dict[int, dict[str, nn.Module]] = {
        0: {"0": block},
        1: {"1": inner, "2": plain},
        2: {"3": block},
    }
    separate_stages(groups, layers)
    assert layers[0]["0"] is block
    assert layers[1]["1"] is inner
    assert inner[0] is not block
    assert layers[1]["2"] is inner[1] is plain  # has nothing to tie
    assert layers[2]["3"] is not block
    leaves = [dict(layers[s][n].named_parameters()) for s, n in ((0, "0"), (1, "1"), (2, "3"))]
    assert len({id(p) for found in leaves for p in found.values()}) == 18
    assert len({p.data_ptr() for found in leaves for p in found.values()}) == 6
    x = torch.randn(2, 3, 4)
    output = layers[2]["3"](plain(inner(block(x))))
    assert torch.equal(output, reference(x))
    assert block.calls == [3]
    output.sum().backward()
    reference(x).sum().backward()
    for (name, p), q, r in zip(
        leaves[0].items(), leaves[1].values(), leaves[2].values(), strict=True
    ):
        assert p.grad is not None
        assert q.grad is not None
        assert r.grad is not None
        expected = reference[0].get_parameter(name).grad
        torch.testing.assert_close(p.grad + q.grad + r.grad, expected)
