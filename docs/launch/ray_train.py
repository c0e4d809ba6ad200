"""Four ranks under Ray Train; when one dies Ray starts all of them again, and training resumes.

Not run by this project, whose tests do without Ray. Checked by tests/test_launch_recipes.py: it
compiles, every name of Ray's and every keyword in it is one that Ray 2.60.0 has, and the arguments
in ARGUMENTS go through the example's own parser.

From the project's folder, with `pip install "ray[train]"` and pydist on every host:

    python docs/launch/ray_train.py
"""

from __future__ import annotations

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

STORAGE = "/shared/pydist-train"  # change to a folder that all hosts see
ARGUMENTS = ["--folder", f"{STORAGE}/checkpoints", "--batch", "16", "--steps", "2000"]
ARGUMENTS += ["--save-every", "100"]


def train_on_rank(config: dict[str, list[str]]) -> None:
    """What each worker of Ray runs, inside the process group that Ray has made."""
    import train_resumable  # on the worker, from the working_dir below

    options = train_resumable.parse_options(config["arguments"])
    training = train_resumable.prepare(options)
    train_resumable.train(training, options)
    # With metrics alone: the checkpoints are the example's own.
    ray.train.report({"step": training.step})


def main() -> None:
    """Waits for the end of training; raises if it failed more often than max_failures."""
    ray.init(runtime_env={"working_dir": "examples"})
    TorchTrainer(
        train_on_rank,
        train_loop_config={"arguments": ARGUMENTS},
        # Or backend="pydist", which an installed pydist registers with torch. Ray gives each start
        # of the workers a store of its own, so that torchrun's variable for it is not needed.
        torch_config=TorchConfig(backend="gloo", timeout_s=300),
        # One core for each rank. PACK: neighbours share a host, where they share memory.
        scaling_config=ScalingConfig(
            num_workers=4,
            use_gpu=False,
            resources_per_worker={"CPU": 1},
            placement_strategy="PACK",
        ),
        run_config=RunConfig(
            name="pydist-train",
            storage_path=STORAGE,
            failure_config=FailureConfig(max_failures=3),
        ),
    ).fit()


if __name__ == "__main__":
    main()
