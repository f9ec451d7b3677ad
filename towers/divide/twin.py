"""Makes a twin of a model, with the same layers and variables, and another optimizer and loss.

Keras' own train_step, test_step and predict_step of the twin are traced, or its class's.
"""

import keras
import tensorflow as tf

from towers.machine.loss_internals import compile_arguments, forget_recipe
from towers.step.checks import check_loss_scale
from towers.step.compiled import missing_of
from towers.step.state import variables_device


def twin_of(
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer | str,
    loss: object,
    loss_weights: object,
    metrics: object,
) -> keras.Model:
    """Returns a compiled twin of a model, with a built optimizer; takes `TowerStep`'s arguments.

    `COMPILED` stands for the optimizer or the loss that the model was compiled with. The compiled
    loss brings its weights and the metrics, unless they are given.
    """
    missing = missing_of(model, optimizer, loss)
    optimizer = keras.optimizers.get(model.optimizer if "optimizer" in missing else optimizer)
    check_loss_scale(optimizer)
    twin = object.__new__(model.__class__)  # its constructor would make layers
    vars(twin).update(vars(model))  # setattr would make Keras track them again
    vars(twin)["optimizer"] = optimizer
    weighted_metrics = None
    is_own = "loss" in missing and loss_weights is None and metrics is None
    if "loss" in missing:
        loss, weights, own_metrics, own_weighted = compile_arguments(model)
        loss_weights = weights if loss_weights is None else loss_weights
        if metrics is None:
            metrics, weighted_metrics = own_metrics, own_weighted
    with tf.device(variables_device(model)):
        if not optimizer.built:  # LossScaleOptimizer would make its own variables twice
            optimizer.build(model.trainable_variables)
        if not is_own:  # else the twin keeps the metrics that the model's callbacks know
            forget_recipe(twin)
            keras.Model.compile(  # a custom `compile` may take other arguments
                twin, optimizer, loss, loss_weights, metrics, weighted_metrics, jit_compile=False,
                auto_scale_loss=False,
            )  # fmt: skip
    return twin
