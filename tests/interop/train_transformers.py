"""transformers: its Trainer on a tiny GPT-2 with random weights, checkpointing of layers too."""

import tempfile

import rank_main
from rank_main import Outcome
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

LENGTH = 32


def train(data_parallel: type[nn.Module]) -> Outcome:
    config = GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    data = [{"input_ids": piece, "labels": piece} for piece in rank_main.windows(LENGTH)]
    with tempfile.TemporaryDirectory() as folder, rank_main.in_torchs_place(data_parallel):
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            gradient_checkpointing=True,
            learning_rate=1e-2,
            max_steps=6,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            seed=0,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=data)
        trainer.train()
        history = [entry for entry in trainer.state.log_history if "loss" in entry]
    outcome = Outcome(type(trainer.model_wrapped).__name__)
    outcome.losses = [float(entry["loss"]) for entry in history]
    outcome.grad_norms = [float(entry["grad_norm"]) for entry in history]
    outcome.add_model("model", model)
    return outcome


if __name__ == "__main__":
    rank_main.run(train)
