"""Owns the tests of a split model's state: saved with one split, loaded with another."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import SGD, Adam, AdamW, Optimizer

from conftest import Transport
from pydist import PeerError, UsageError
from pydist._optim_state import full_optim_state_dict, load_optim_state_dict, optim_state_dict
from pydist._pipeline_state import full_state_dict, load_state_dict, state_dict
from ranks import RankPool
from reference import expect_error
from split_models import Split, loss_of, model


def adam(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return Adam(parameters, lr=0.01)


def momentum(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=0.1, momentum=0.9)


def plain_sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=0.1)


def two_groups(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Weights decay, the rest does not; with learning rates of their own, one of them a tensor."""
    known = list(parameters)
    weights = [parameter for parameter in known if parameter.dim() > 1]
    rest = [parameter for parameter in known if parameter.dim() <= 1]
    groups = [
        {"params": rest, "weight_decay": 0.0, "lr": torch.tensor(0.02)},
        {"params": weights, "weight_decay": 0.1},
    ]
    return AdamW(groups, lr=0.01, amsgrad=True)


OPTIMIZERS = {make.__name__: make for make in (adam, momentum, plain_sgd, two_groups)}
NUM_STEPS = 3


class Trained:
    """A split model after some steps, or a plain one: `split` None."""

    def __init__(self, optimizer: str, num_stages: int, tied: bool = True) -> None:
        self.split = Split(model(tied), num_stages)
        make = OPTIMIZERS[optimizer]
        self.optimizer = make(self.split.local_parameters)
        others = self.split.other_parameters
        self.optimizers = [self.optimizer, *([make(others)] if others else [])]

    def step(self, step: int) -> float:
        loss = self.split.backward(step)
        for optimizer in self.optimizers:
            optimizer.step()
        return float(loss)


def reference(optimizer: str, num_steps: int) -> tuple[nn.Sequential, Optimizer, float]:
    """One process with the unsplit model; the loss of the last step."""
    module = model()
    steps = OPTIMIZERS[optimizer](module.parameters())
    loss = torch.zeros(())
    for step in range(num_steps):
        module.zero_grad()
        loss = loss_of(module, step)
        loss.backward()
        steps.step()
    return module, steps, float(loss.detach())


def assert_same(found: Any, expected: Any, where: str = "") -> None:
    """Nested values, tensors to 1e-6; keys in the same order."""
    if isinstance(expected, Tensor):
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6), where
    elif isinstance(expected, dict):
        assert list(found) == list(expected), where
        for key, value in expected.items():
            assert_same(found[key], value, f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for index, value in enumerate(expected):
            assert_same(found[index], value, f"{where}[{index}]")
    else:
        assert found == expected, where


def save(rank: int, world_size: int, optimizer: str, num_stages: int) -> tuple[Any, Any]:
    """Trains, and returns the whole of model and optimizer after comparing with one process."""
    trained = Trained(optimizer, num_stages)
    for step in range(NUM_STEPS):
        trained.step(step)
    module, steps, _ = reference(optimizer, NUM_STEPS)
    whole = full_state_dict(trained.split)
    assert_same(dict(whole), dict(module.state_dict()))
    assert whole._metadata["norm"] == {"version": 2}
    state = full_optim_state_dict(trained.split, trained.optimizer)
    expected = get_optimizer_state_dict(module, steps)
    expected["param_groups"] = [
        {**group, "params": sorted(group["params"], key=lambda name: list(whole).index(name))}
        for group in expected["param_groups"]
    ]
    assert_same(state["param_groups"], expected["param_groups"])
    assert set(state["state"]) == set(expected["state"])
    for name, entry in expected["state"].items():
        assert_same(state["state"][name], entry, name)
    assert list(state["state"]) == [name for name in whole if name in state["state"]]
    # A copy: what comes later does not change it.
    trained.step(NUM_STEPS)
    assert_same(dict(whole), dict(module.state_dict()))
    alone = full_state_dict(trained.split, rank0_only=True)
    assert (alone is None) == (rank != 0)
    return (whole, state) if rank == 0 else (None, None)


def load(rank: int, world_size: int, optimizer: str, num_stages: int, saved: Any) -> float:
    """The loss of the step after the one that was saved, and the one after it."""
    whole, state = saved
    trained = Trained(optimizer, num_stages)
    with torch.no_grad():
        for parameter in trained.split.module.parameters():
            parameter.add_(1.0)
    # All layers are here, so that the rest of the model can take part; a pipeline has its own.
    keys = load_state_dict(trained.split, whole)
    assert keys == ([], [])
    load_optim_state_dict(trained.split, trained.optimizer, state)
    if trained.split.other_parameters:
        load_rest(trained, whole, state)
    trained.step(NUM_STEPS)
    return trained.step(NUM_STEPS + 1)


def load_rest(trained: Trained, whole: Any, state: Any) -> None:
    """Into the layers and the optimizer that stand in for the other ranks."""
    split = trained.split
    local = {name for name, _ in split.local_layers}
    inside = Split.__new__(Split)
    inside.module, inside.engine, inside.layer_names = split.module, split.engine, split.layer_names
    inside.tied_names = split.tied_names
    inside.local_layers = [(n, m) for n, m in split.module.named_children() if n not in local]
    load_state_dict(inside, whole)
    load_optim_state_dict(inside, trained.optimizers[1], state)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_saved_with_one_split_and_loaded_with_another(
    pool1: RankPool, pool2: RankPool, pool3: RankPool, optimizer: str
) -> None:
    """C103: p=2 with two stages each -> p=1, p=3 and the plain module: the same next losses. The
    weight of embedding and head is tied, over ranks or on one."""
    saved = pool2.run(save, optimizer, 4)[0]
    expected = reference(optimizer, NUM_STEPS + 2)[2]
    for pool, num_stages in ((pool1, 1), (pool1, 4), (pool3, 3)):
        for loss in pool.run(load, optimizer, num_stages, saved):
            assert loss == pytest.approx(expected, rel=1e-6)
    module = model()
    module.load_state_dict(saved[0])
    steps = OPTIMIZERS[optimizer](module.parameters())
    set_optimizer_state_dict(module, steps, saved[1])
    for step in (NUM_STEPS, NUM_STEPS + 1):
        module.zero_grad()
        loss = loss_of(module, step)
        loss.backward()
        steps.step()
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-6)


def save_and_load_on(rank: int, world_size: int) -> None:
    saved = save(rank, world_size, "two_groups", 2 * world_size)
    everywhere = Trained("two_groups", 2 * world_size)
    whole = full_state_dict(everywhere.split)
    assert list(whole) == list(model().state_dict())
    assert (saved[0] is None) == (rank > 0)


def test_on_both_transports(transport: Transport) -> None:
    transport.pool(2).run(save_and_load_on)


def back_and_forth(rank: int, world_size: int) -> None:
    """From the plain module's state, and a rank's own part."""
    module, _, _ = reference("adam", 2)
    split = Split(model(), 3)
    load_state_dict(split, module.state_dict())
    for name, value in state_dict(split).items():
        assert torch.equal(value, module.state_dict()[name]), name
    assert "scale.table" not in state_dict(split)
    own = {name: value.clone() for name, value in state_dict(split).items()}
    with torch.no_grad():
        for parameter in split.local_parameters:
            parameter.zero_()
    assert load_state_dict(split, own) == ([], [])
    for name, value in state_dict(split).items():
        assert torch.equal(value, own[name]), name
    assert all(value.requires_grad for value in split.local_parameters)


def test_a_local_part_is_loaded_as_well_as_the_whole(pool2: RankPool) -> None:
    pool2.run(back_and_forth)


def mistakes(rank: int, world_size: int) -> None:
    split = Split(model(), 2)
    whole = dict(model().state_dict())
    del whole["first.bias"], whole["third.weight"]
    whole["headd.weight"] = torch.zeros(1)
    text = str(expect_error(RuntimeError, lambda: load_state_dict(split, whole)))
    assert text == (
        "Error(s) in loading state_dict for PipelineParallel:\n\t"
        'Missing key(s) in state_dict: "first.bias", "third.weight". \n\t'
        'Unexpected key(s) in state_dict: "headd.weight". '
    )
    keys = load_state_dict(split, whole, strict=False)
    assert keys.missing_keys == ["first.bias", "third.weight"]
    assert keys.unexpected_keys == ["headd.weight"]
    whole = dict(model().state_dict())
    whole["third.weight"] = torch.zeros(3, 3)
    text = str(expect_error(RuntimeError, lambda: load_state_dict(split, whole, strict=False)))
    assert text.startswith("Error(s) in loading state_dict for PipelineParallel:\n\tsize mismatch")
    assert "third.weight: copying a param with shape torch.Size([3, 3]) from checkpoint" in text
    # Here alone: the others must not go on.
    bad: Any = {1: torch.zeros(1)} if rank == 0 else whole
    error = expect_error(Exception, lambda: load_state_dict(split, bad))
    assert isinstance(error, AttributeError if rank == 0 else PeerError)
    assert rank == 0 or "rank 0 raised in load_state_dict: AttributeError" in str(error)


def test_what_does_not_fit_is_named_on_every_rank(pool2: RankPool) -> None:
    """In torch's words, with the names of the unsplit model, the other stage's too."""
    pool2.run(mistakes)


def from_the_last_name(rank: int, world_size: int) -> float:
    split = Split(model(), 2)
    whole = dict(model().state_dict())
    whole["embedding.weight"] = torch.full_like(whole["head.weight"], 2.0)
    whole["head.weight"] = torch.full_like(whole["head.weight"], 3.0)
    load_state_dict(split, whole)
    [(_, value)] = [item for item in state_dict(split).items() if item[0] in split.tied_names[0]]
    return float(value.mean())


def test_copies_of_a_tied_weight_stay_equal_when_loaded(pool2: RankPool) -> None:
    """From a model that did not tie them: torch leaves the last one's value in both."""
    assert pool2.run(from_the_last_name) == [3.0, 3.0]


def optimizer_mistakes(rank: int, world_size: int) -> None:
    trained = Trained("two_groups", 2)
    split, optimizer = trained.split, trained.optimizer
    trained.step(0)
    state = full_optim_state_dict(split, optimizer)
    state["param_groups"][1]["params"].remove("third.weight")
    error = expect_error(RuntimeError, lambda: load_optim_state_dict(split, optimizer, state))
    assert 'Missing parameter(s) in param_groups: "third.weight"' in str(error)
    own = optimizer.state_dict()
    error = expect_error(UsageError, lambda: load_optim_state_dict(split, optimizer, own))
    assert "counts parameters instead of naming them" in str(error)
    state = full_optim_state_dict(split, optimizer)
    one_group = AdamW(split.local_parameters, amsgrad=True)
    error = expect_error(UsageError, lambda: load_optim_state_dict(split, one_group, state))
    assert "saved in groups with different options (weight_decay, lr)" in str(error)
    # Of another model, on rank 0 alone.
    strange = adam([nn.Parameter(torch.zeros(2, 3))]) if rank == 0 else optimizer
    kind = UsageError if rank == 0 else PeerError
    error = expect_error(kind, lambda: full_optim_state_dict(split, strange))
    assert "parameter of shape (2, 3) that is not in this rank's stages" in str(error)


def test_optimizer_states_that_do_not_fit(pool2: RankPool) -> None:
    pool2.run(optimizer_mistakes)


def without_parameters(rank: int, world_size: int) -> dict[str, Any]:
    """Four stages of which rank 1's have no parameters, so it has no optimizer."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2), nn.Tanh())
    split = Split(module, 4)
    optimizer = SGD(split.local_parameters, lr=0.1, momentum=0.9) if rank == 0 else None
    module(torch.ones(3, 2)).sum().backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.05
    state = full_optim_state_dict(split, optimizer)
    load_optim_state_dict(split, optimizer, state)
    return state


def test_a_rank_without_parameters_has_no_optimizer(pool2: RankPool) -> None:
    for state in pool2.run(without_parameters):
        assert list(state["state"]) == ["0.weight", "0.bias", "2.weight", "2.bias"]
        [group] = state["param_groups"]
        assert group["lr"] == 0.05
        assert group["params"] == list(state["state"])


def rates_that_part(rank: int, world_size: int) -> list[dict[str, Any]]:
    trained = Trained("two_groups", 2, tied=False)
    for group in trained.optimizer.param_groups:
        group["lr"] = torch.tensor(0.5) if rank == 0 else 0.5
    trained.optimizer.param_groups[1]["weight_decay"] = 0.1 * (rank + 1)
    state = full_optim_state_dict(trained.split, trained.optimizer)
    load_optim_state_dict(trained.split, trained.optimizer, state)
    assert trained.optimizer.param_groups[1]["weight_decay"] == 0.1 * (rank + 1)
    return state["param_groups"]


def test_options_that_differ_between_ranks_are_kept(pool2: RankPool) -> None:
    """A number and a tensor, or two numbers, are not one group of the whole."""
    for groups in pool2.run(rates_that_part):
        assert [group["weight_decay"] for group in groups] == [0.0, 0.0, 0.1, 0.2]
        assert groups[2]["params"] == ["embedding.weight", "first.weight"]
        assert groups[3]["params"] == ["second.weight", "third.weight", "head.weight"]


def loaded_state_is_a_copy(rank: int, world_size: int) -> None:
    trained = Trained("adam", 2)
    trained.step(0)
    state = full_optim_state_dict(trained.split, trained.optimizer)
    before = {n: e["exp_avg"].clone() for n, e in state["state"].items()}
    load_optim_state_dict(trained.split, trained.optimizer, state)
    trained.step(1)
    assert all(torch.equal(state["state"][name]["exp_avg"], before[name]) for name in before)


def test_steps_do_not_write_to_what_was_loaded(pool2: RankPool) -> None:
    """Adam's averages live in the optimizer, not in the dictionary that they came from."""
    pool2.run(loaded_state_is_a_copy)


# -- torch.distributed.checkpoint ------------------------------------------------------------------


def checkpoint(rank: int, world_size: int, folder: str, optimizer: str, num_stages: int) -> None:
    trained = Trained(optimizer, num_stages)
    for step in range(NUM_STEPS):
        trained.step(step)
    optim = optim_state_dict(trained.split, trained.optimizer)
    dcp.save({"model": state_dict(trained.split), "optim": optim}, checkpoint_id=folder)


def resume(rank: int, world_size: int, folder: str, optimizer: str, num_stages: int) -> float:
    trained = Trained(optimizer, num_stages)
    split = trained.split
    with torch.no_grad():
        for parameter in split.module.parameters():
            parameter.add_(1.0)
    before = [parameter.clone() for parameter in split.local_parameters]
    rates = [group["lr"] for group in trained.optimizer.param_groups]
    optim = optim_state_dict(split, trained.optimizer, initialize=True)
    assert [group["lr"] for group in trained.optimizer.param_groups] == rates
    assert all(map(torch.equal, split.local_parameters, before))
    whole = {"model": state_dict(split), "optim": optim}
    dcp.load(whole, checkpoint_id=folder)
    load_state_dict(split, whole["model"])
    load_optim_state_dict(split, trained.optimizer, whole["optim"])
    # What stands in for the other ranks.
    weights = full_state_dict(split)
    state = full_optim_state_dict(split, trained.optimizer)
    if split.other_parameters:
        load_rest(trained, weights, state)
    trained.step(NUM_STEPS)
    return trained.step(NUM_STEPS + 1)


@pytest.mark.parametrize("optimizer", ["momentum", "two_groups"])
def test_torch_checkpoints_reshard(
    pool1: RankPool, pool2: RankPool, pool3: RankPool, optimizer: str, tmp_path: Path
) -> None:
    """Local parts go to torch.distributed.checkpoint as they are; optimizers that have not stepped
    yet get tensors to load into. The tied weight is there under both names."""
    pool2.run(checkpoint, str(tmp_path), optimizer, 4)
    expected = reference(optimizer, NUM_STEPS + 2)[2]
    for pool, num_stages in ((pool1, 1), (pool3, 3), (pool2, 2)):
        for loss in pool.run(resume, str(tmp_path), optimizer, num_stages):
            assert loss == pytest.approx(expected, rel=1e-6)
