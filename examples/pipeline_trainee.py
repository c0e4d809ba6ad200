"""Owns the demo's training of a GPT whose layers are split over ranks, with replicas or without."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from gpt_model import mean_cross_entropy
from trainees import Batch, Trainee

SCHEDULE = "1f1b"
NUM_MICROBATCHES = 4


class PipelineTrainee(Trainee):
    """One stage of the model in each rank."""

    def wrap(self) -> Iterable[nn.Parameter]:
        import pydist

        # The whole of the difference to one process: layers, a loss, and which ranks.
        self.pipeline = pydist.PipelineParallel(
            self.gpt.layers,
            num_microbatches=NUM_MICROBATCHES,
            loss_fn=mean_cross_entropy,
            schedule=SCHEDULE,
            device_mesh=self.mesh,
        )
        return self.pipeline.parameters()

    def prepare(self, step: int, share: Batch) -> None:
        self.pipeline.record(self.plan.is_probed(step))

    def conclude(self, step: int, synced_s: float) -> None:
        if self.plan.is_probed(step):
            self.record.recorded.append(self.pipeline.records())

    def backward(self, share: Batch) -> Tensor:
        symbols, targets = share
        loss: Tensor = self.pipeline.step(symbols, target=targets)
        return loss

    def clip(self) -> Tensor:
        return self.pipeline.clip_grad_norm_(1.0)

    def loss_of(self, batch: Batch) -> Tensor:
        symbols, targets = batch
        loss: Tensor = self.pipeline.evaluate(symbols, target=targets)
        return loss

    def parts(self) -> dict[str, nn.Module]:
        return {f"stage {index}": stage for index, stage in self.pipeline.local_stages.items()}
