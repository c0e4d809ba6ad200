"""Lightning: a strategy that wraps with ours, with automatic and with manual optimization."""

import logging
import warnings
from typing import Any

import lightning
import rank_main
import torch
from lightning.pytorch.strategies import DDPStrategy
from rank_main import Outcome
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

LENGTH = 32


class DataParallelStrategy(DDPStrategy):
    """DDPStrategy with another class of torch's signature, pydist.DataParallel for example."""

    def __init__(self, data_parallel: type[nn.Module], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._data_parallel = data_parallel

    def _setup_model(self, model: nn.Module) -> nn.Module:
        device_ids = self.determine_ddp_device_ids()
        return self._data_parallel(model, device_ids=device_ids, **self._ddp_kwargs)


class LanguageModel(lightning.LightningModule):
    def __init__(self, automatic: bool) -> None:
        super().__init__()
        self.automatic_optimization = automatic
        self.layers = nn.Sequential(
            nn.Embedding(256, 48), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 256)
        )
        self.losses: list[float] = []
        self.wrapper = ""

    def training_step(self, batch: list[torch.Tensor], batch_index: int) -> torch.Tensor:
        (pieces,) = batch
        logits = self.layers(pieces[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), pieces[:, 1:].flatten())
        self.losses.append(loss.item())
        self.wrapper = type(self.trainer.strategy.model).__name__
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


def train(data_parallel: type[nn.Module]) -> Outcome:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    outcome = Outcome("")
    for automatic in (True, False):
        lightning.seed_everything(0)
        model = LanguageModel(automatic)
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=DataParallelStrategy(data_parallel, find_unused_parameters=not automatic),
            max_epochs=2,
            accumulate_grad_batches=2 if automatic else 1,
            gradient_clip_val=1.0 if automatic else None,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        data = TensorDataset(rank_main.windows(LENGTH))
        trainer.fit(model, DataLoader(data, batch_size=4))  # Lightning adds the sampler
        outcome.wrapper = model.wrapper
        outcome.losses += model.losses
        outcome.add_model("automatic" if automatic else "manual", model)
    return outcome


if __name__ == "__main__":
    rank_main.run(train)
