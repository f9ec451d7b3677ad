"""The workers of one run as Ray Train's workers."""

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.tensorflow import TensorflowTrainer


def train(flags):
    import towers  # on the worker

    towers.train(towers.TrainConfig(**flags, resume="auto"))


TensorflowTrainer(
    train,
    train_loop_config={
        "run_dir": "/shared/runs/mnist",
        "num_towers": 8,
        "batch_size": 1024,
    },
    scaling_config=ScalingConfig(num_workers=4, use_gpu=True),
    run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
).fit()
