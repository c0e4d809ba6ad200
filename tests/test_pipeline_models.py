"""Holds PipelineParallel to whole models: a small transformer with dropout, tied embeddings, skips,
BatchNorm, checkpoints, and what is saved of them.
"""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pydist
from pipeline_reference import assert_same_gradients, reference_step, sgd
from pydist import PipelineParallel
from ranks import get_pool

WIDTH, LENGTH, VOCABULARY = 16, 5, 11
mse = nn.functional.mse_loss


class Block(nn.Module):
    """Attention and a feed-forward part, with dropout."""

    def __init__(self, dropout: float, checkpointed: bool = False) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            WIDTH, 2, 2 * WIDTH, dropout, batch_first=True, norm_first=True
        )
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed and self.training:
            output: Tensor = checkpoint(self.layer, x, use_reentrant=False)
            return output
        result: Tensor = self.layer(x)
        return result


def make_transformer(dropout: float = 0.0, checkpointed: bool = False) -> nn.Sequential:
    torch.manual_seed(1)
    blocks = [Block(dropout, checkpointed) for _ in range(4)]
    head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.LayerNorm(WIDTH), head)


def draw_tokens(step: int, rows: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (rows, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def transformer_is_exact(rank: int, world_size: int) -> None:
    for checkpointed in (False, True):
        model = make_transformer(checkpointed=checkpointed)
        for kind in ("1f1b", "looped-bfs", "zb-h1"):
            pipeline = PipelineParallel(
                copy.deepcopy(model), 3, token_loss, kind, balance="uniform"
            )
            single = copy.deepcopy(model)
            own, theirs = dict(pipeline.named_parameters()), dict(single.named_parameters())
            optimizers = [sgd(single.parameters()), sgd(own.values())]
            for step in range(3):
                x, target = draw_tokens(step)
                for optimizer in optimizers:
                    optimizer.zero_grad()
                expected = reference_step(single, token_loss, x, target, 3)
                assert torch.equal(pipeline.step(x, target=target), expected)
                assert_same_gradients(own, theirs)
                for optimizer in optimizers:
                    optimizer.step()


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_transformer_has_the_bits_of_one_process(num_ranks: int) -> None:
    get_pool(num_ranks).run(transformer_is_exact)


def dropout_on_a_rank_of_its_own(rank: int, world_size: int) -> None:
    groups = [dist.new_group([each]) for each in range(world_size)]
    model = make_transformer(0.2)
    torch.manual_seed(5)
    alone = PipelineParallel(copy.deepcopy(model), 3, token_loss, process_group=groups[rank])
    x, target = draw_tokens(0)
    losses = [alone.step(x, target=target) for _ in range(2)]
    theirs = dict(alone.named_parameters())
    assert not torch.equal(losses[0], losses[1])  # the masks are others in each step
    state = torch.get_rng_state()
    for kind in ("gpipe", "1f1b", "interleaved-zb", "zb-v"):
        torch.manual_seed(5)
        pipeline = PipelineParallel(copy.deepcopy(model), 3, token_loss, kind)
        assert [pipeline.step(x, target=target).item() for _ in range(2)] == [
            loss.item() for loss in losses
        ]
        assert_same_gradients(dict(pipeline.named_parameters()), theirs)
    torch.set_rng_state(state)


def test_dropout_depends_neither_on_ranks_nor_on_the_schedule() -> None:
    """Masks are seeded per step, layer and microbatch."""
    get_pool(2).run(dropout_on_a_rank_of_its_own)


def tied(rank: int, world_size: int) -> list[Tensor]:
    """Two copies of the embedding, after each of three Adam steps."""
    model = make_transformer()
    model[-1].weight = model[0].weight
    found = []
    for kind in ("1f1b", "zb-v"):
        single = copy.deepcopy(model)
        pipeline = PipelineParallel(copy.deepcopy(model), 3, token_loss, kind)
        names = [name for name, _ in pipeline.named_parameters()]
        assert len(set(names)) == len(names)
        optimizer = torch.optim.Adam(pipeline.parameters(), lr=0.01)
        reference = torch.optim.Adam(single.parameters(), lr=0.01)
        for step in range(3):
            x, target = draw_tokens(step)
            pipeline.zero_grad()
            single.zero_grad()
            pipeline.step(x, target=target)
            reference_step(single, token_loss, x, target, 3)
            norm = pipeline.clip_grad_norm_(1.0)
            expected = nn.utils.clip_grad_norm_(single.parameters(), 1.0)
            torch.testing.assert_close(norm, expected, rtol=1e-5, atol=1e-6)
            optimizer.step()
            reference.step()
            for stage in pipeline.local_stages.values():
                for name, parameter in stage.named_parameters():
                    if name in ("0.weight", "6.weight"):
                        found.append(parameter.detach().clone())
                        torch.testing.assert_close(
                            parameter, single[0].weight, rtol=1e-4, atol=1e-5
                        )
    return found


def test_tied_embeddings_stay_equal() -> None:
    """C99 (Megatron-LM#299): an embedding that is the head's weight too, on two ranks or one."""
    first, second = get_pool(2).run(tied)
    # 1f1b: one copy on each rank. zb-v: both ends are on rank 0.
    assert len(first) == 3 + 6
    for one, two in zip(first[:3], second[:3], strict=True):
        assert torch.equal(one, two)
    for one, two in zip(first[3::2], first[4::2], strict=True):
        assert torch.equal(one, two)


@pydist.skippable(stash=("early",))
class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.layer(x)
        pydist.skip.stash("early", hidden)
        return hidden.tanh()


@pydist.skippable(pop=("early",))
class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        early = pydist.skip.pop("early")
        assert early is not None
        output: Tensor = self.layer(torch.cat([x, early], 1))
        return output


def skips(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Encoder(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), Decoder())
    x, target = torch.randn(7, 6), torch.randn(7, 6)
    for kind in ("1f1b", "interleaved-1f1b", "zb-v", "zb-h1"):
        if kind in ("1f1b", "zb-h1") or world_size == 2:
            pipeline = PipelineParallel(copy.deepcopy(model), 3, mse, kind, balance="uniform")
            single = copy.deepcopy(model)
            for _ in range(2):
                single.zero_grad()
                pipeline.zero_grad()
                expected = reference_step(single, mse, x, target, 3)
                assert torch.equal(pipeline.step(x, target=target), expected)
                # Two uses of one output may be added in another order than in one process.
                for name, parameter in pipeline.named_parameters():
                    other = dict(single.named_parameters())[name].grad
                    torch.testing.assert_close(parameter.grad, other, rtol=1e-6, atol=1e-7)
            assert torch.equal(pipeline.evaluate(x, target=target), expected)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_skips_go_past_stages(num_ranks: int) -> None:
    get_pool(num_ranks).run(skips)


class Recomputing(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(self.body, x, use_reentrant=self.reentrant)
        return output


def batch_norm(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    for reentrant in (False, True):
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), Recomputing(reentrant))
        plain = nn.Sequential(model[0], model[1], model[2].body)
        x, target = torch.randn(8, 6), torch.randn(8, 6)
        for kind in ("1f1b", "zb-h1"):
            single = copy.deepcopy(plain)
            pipeline = PipelineParallel(copy.deepcopy(model), 2, mse, kind)
            expected = reference_step(single, mse, x, target, 2)
            assert torch.equal(pipeline.step(x, target=target), expected)
            buffers = {n.replace("2.body", "2"): b for n, b in pipeline.named_buffers()}
            for name, buffer in buffers.items():
                assert torch.equal(buffer, dict(single.named_buffers())[name]), name
            deferred = PipelineParallel(
                copy.deepcopy(model), 2, mse, kind, deferred_batch_norm=True
            )
            deferred.step(x, target=target)
            assert all(
                int(buffer) == 1
                for name, buffer in deferred.named_buffers()
                if name.endswith("num_batches_tracked")
            )


def test_batch_norm_counts_each_microbatch_once() -> None:
    """A checkpoint runs the layer twice; split backward must not change that."""
    get_pool(2).run(batch_norm)


def saved_and_loaded(rank: int, world_size: int) -> None:
    model = make_transformer()
    x, target = draw_tokens(0)
    first = PipelineParallel(copy.deepcopy(model), 3, token_loss, "interleaved-1f1b")
    optimizer = torch.optim.Adam(first.parameters(), lr=0.01)
    for _ in range(2):
        first.zero_grad()
        first.step(x, target=target)
        optimizer.step()
    whole = first.full_state_dict()
    moments = first.full_optim_state_dict(optimizer)
    assert whole is not None
    assert moments is not None
    assert list(whole) == list(model.state_dict())
    assert set(first.state_dict()) < set(whole)

    single = make_transformer()
    single.load_state_dict(whole)
    second = PipelineParallel(make_transformer(), 3, token_loss, "1f1b", balance="uniform")
    second.load_state_dict(whole)
    others = torch.optim.Adam(second.parameters(), lr=0.01)
    second.load_optim_state_dict(others, moments)
    for pipeline, each in ((first, optimizer), (second, others)):
        pipeline.zero_grad()
        loss = pipeline.step(x, target=target)
        single.zero_grad()
        assert torch.equal(loss, reference_step(single, token_loss, x, target, 3))
        each.step()
    one, two = first.full_state_dict(), second.full_state_dict()
    assert one is not None
    assert two is not None
    for name, value in one.items():
        assert torch.equal(value, two[name]), name


def test_saved_with_one_split_and_loaded_with_another() -> None:
    """C103 (torchtitan#474): checkpoints that kept half of the layers."""
    get_pool(2).run(saved_and_loaded)


def by_time(rank: int, world_size: int) -> list[int]:
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(6)], nn.Linear(6, 6))
    example = torch.randn(2, 6)
    pipeline: Any = PipelineParallel(model, 2, mse, balance="time", example_input=example)
    balance = [len(stage) for stage in pipeline.local_stages.values()]
    with pytest.raises((pydist.UsageError, pydist.PeerError), match="example_input"):
        PipelineParallel(model, 2, mse, balance="time")
    return balance


def test_balance_by_time() -> None:
    assert sum(sum(balance) for balance in get_pool(2).run(by_time)) == 7
