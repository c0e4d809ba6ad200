"""Accelerate: prepare, accumulate, clip_grad_norm_, unwrap_model, trigger_sync_in_backward."""

import rank_main
import torch
from accelerate import Accelerator
from rank_main import Outcome
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

LENGTH = 32
ACCUMULATE = 2


def language_model() -> nn.Module:
    """Predicts a byte from the one before; BatchNorm gives it buffers."""
    return nn.Sequential(
        nn.Embedding(256, 48),
        nn.Linear(48, 48),
        nn.BatchNorm1d(LENGTH - 1),
        nn.Tanh(),
        nn.Linear(48, 256),
    )


def train(data_parallel: type[nn.Module]) -> Outcome:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    model = language_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(rank_main.windows(LENGTH)), batch_size=4)
    with rank_main.in_torchs_place(data_parallel):
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    outcome = Outcome(type(model).__name__)

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        logits = model(batch[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    for _ in range(2):
        for (batch,) in loader:
            with accelerator.accumulate(model):
                loss = loss_of(batch)
                accelerator.backward(loss)
                outcome.losses.append(loss.item())
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    outcome.grad_norms.append(float(norm))
                optimizer.step()
                optimizer.zero_grad()
    # A forward under no_sync whose backward is to be a round after all.
    with accelerator.no_sync(model):
        loss = loss_of(batch)
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(loss)
    outcome.grad_norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
    optimizer.step()
    unwrapped = accelerator.unwrap_model(model)
    assert type(unwrapped) is nn.Sequential
    outcome.add_model("model", unwrapped)
    accelerator.end_training()
    return outcome


if __name__ == "__main__":
    rank_main.run(train)
