"""A configuration made real: its devices, its batch, its model, and what it records of them."""

import keras
import numpy as np

from towers.app.config import TrainConfig
from towers.app.datasets.batches import ordered_batches
from towers.machine import devices as devices_lib
from towers.app.training.build import build, find_devices


def config(**values):
    """The model and the data of run_test: 50 examples to train on, 20 to test."""
    small = {"model": "tests.app.run_test:small_model",
             "dataset": "tests.app.run_test:small_data",
             "num_gpus": 2, "batch_size": 16, "device": "cpu"}
    return TrainConfig(**{**small, **values})


def test_a_run_has_its_towers_on_its_devices_and_its_parameters_on_the_cpu():
    run = build(config(num_towers=5))
    assert run.step.devices == ["/cpu:0", "/cpu:1"]
    assert (run.step.num_towers, run.step.parameter_device) == (5, "/cpu:0")
    assert (run.train.num_examples, run.test.num_examples) == (50, 20)
    assert (run.batch_size, run.steps_an_epoch) == (16, 4)  # the last holds 2


def test_the_configuration_is_completed_with_what_defines_the_run():
    run = build(config(batch_size=None, batch_size_per_gpu=7))
    assert run.config.batch_size == run.batch_size == 14
    assert run.config.batch_size_per_gpu is None
    assert run.config.num_towers == 2
    assert run.config.cpu_threads == devices_lib.intra_op_threads()
    assert run.config.epochs == config().epochs


def test_the_seed_alone_decides_the_initial_values():
    kernels = [build(config(seed=seed)).step.model.layers[0].kernel.numpy() for seed in (1, 1, 2)]
    np.testing.assert_array_equal(kernels[0], kernels[1])
    assert not np.array_equal(kernels[0], kernels[2])


def test_the_model_is_compiled_with_the_steps_optimizer():
    run = build(config(optimizer="sgd", learning_rate=0.25))
    assert run.step.model.optimizer is run.step.optimizer
    assert float(run.step.optimizer.learning_rate) == 0.25


def test_without_a_name_the_optimizer_is_the_models_own():
    run = build(config(model="notebook_cnn", dataset="synthetic"))
    assert isinstance(run.step.optimizer, keras.optimizers.RMSprop)


def test_synthetic_examples_have_the_models_shape_and_dropout_is_set():
    run = build(config(model="cnn", dataset="synthetic", dropout=0.125))
    assert run.train.num_examples == 8192
    x, _ = next(iter(ordered_batches(run.train, 4)))
    assert x.shape == (4, 28, 28, 1)
    rates = [layer.rate for layer in run.step.model.layers
             if isinstance(layer, keras.layers.Dropout)]
    assert rates == [0.125, 0.125]


def test_devices_without_a_tower_are_left_out():
    assert find_devices(config(num_gpus=None, num_towers=3)) == ["/cpu:0", "/cpu:1", "/cpu:2"]


def test_accumulated_towers_take_turns_on_their_devices():
    run = build(config(accumulate=3))
    assert (run.step.num_towers, run.config.num_towers, run.config.accumulate) == (6, 6, 3)
    assert run.step.policy.take_turns
    assert not build(config(num_towers=6)).step.policy.take_turns


def test_of_a_run_that_goes_on_both_numbers_are_known():
    run = build(config(accumulate=3, num_towers=6, num_gpus=3, resume="run"))
    assert (run.step.num_towers, len(run.step.devices)) == (6, 3)


def test_a_step_is_made_again():
    run = build(config(num_towers=2))
    step = run.make_step(strategy="parameter_server")
    assert step.model is run.step.model and step.optimizer is run.step.optimizer


def test_what_was_done_to_the_model_is_noted():
    run = build(config(freeze="body", schedule="cosine"))
    assert run.notes == [
        "2 of 4 trainable variables frozen, 32 parameters",
        "learning rate: cosine to 0 at update 48",
    ]
