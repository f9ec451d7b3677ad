"""TowerStep: one synchronous data-parallel update, as one TensorFlow graph.

                    global batch
                 shard 0   shard 1  ...          1. split, in order, sizes differ by at most 1
                    |         |
                /gpu:0     /gpu:1                2. tower -> device
                [tower 0]  [tower 1]             3. fresh parameters in; loss, gradients, state out
                     \\        |
                      gradients, state           4. one fixed tree of additions
                            /cpu:0
              [parameters] <- one update         5. optimizer.apply, once
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from towers import devices as devices_lib
from towers import sharding
from towers import state as state_lib
from towers.averaging import add_on_devices, add_tree, as_tree, weighted
from towers.devices import is_gpu
from towers.metrics import BatchMetrics
from towers.nonfinite import NonFiniteError, check_choice, checked, culprit
from towers.scales import SCALES_SPEC, shard_weights, tower_scales
from towers.state import tower_state
from towers.synchronized import TowerGroup, check_synchronized, synchronized_layers
from towers.tower import Tower, TowerOutput, check_compilable
from towers.traced import TracedGraphs
from towers.transfers import move
from towers.update import update


class TowerStep:
    """Trains a Keras model with towers; the parameters stay where they were created.

    ```python
    step = towers.TowerStep(model, "adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    logs = step(x, y)        # one synchronous update; this batch's loss and accuracy
    ```
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: Any,
        loss: Any,
        *,
        loss_weights: Any = None,
        metrics: Any = (),
        devices: Sequence[str] | None = None,
        num_towers: int | None = None,
        batch_norm: str = "average",
        nonfinite: str = "apply",
        jit_compile: bool = False,
        inline_towers: bool = False,
        pack_transfers: bool = False,
    ) -> None:
        """
        Args:
            model: any built Keras 3 model.
            optimizer: a Keras optimizer or its name. It is called once, on the averaged gradients.
            loss: a Keras loss, its name, a function, or a list or dict of these; None where layers
                add all the losses.
            loss_weights: a factor, or a list or dict of factors, for several outputs.
            metrics: Keras metrics, as `compile` takes them.
            devices: device names; None means `tower_devices()`.
            num_towers: None means one tower per device.
            batch_norm: how BatchNormalization's statistics of T towers become one: "average"
                (weighted by examples), "tower0", or "synchronized": one mean and variance over
                the examples of all towers, which equals the large batch's and needs one device
                for each tower. Layers with `synchronized=True` always do that.
            nonfinite: what a NaN or infinite loss or gradient of a tower does: "apply" it, as
                Keras does; "stop": raise `NonFiniteError`; or "skip" the update. Neither of the
                last two changes anything but counts no update in `optimizer.iterations` either.
                With `LossScaleOptimizer` gradients are its own to check.
            jit_compile: compile each tower with XLA, anew for each shard size.
            inline_towers: hand all towers to the graph optimizer as one graph: gradients may then
                leave a device while the backward pass goes on, but the first step takes longer.
            pack_transfers: move parameters and gradients between devices as one tensor a dtype.

        Raises:
            ValueError: an argument makes no sense, a device is absent, the model is not built.
        """
        state_lib.check_model(model)
        state_lib.check_batch_norm(batch_norm)
        check_choice(nonfinite)
        self.devices = list(devices_lib.tower_devices() if devices is None else devices)
        devices_lib.check_devices(self.devices)
        self.num_towers = len(self.devices) if num_towers is None else num_towers
        self.tower_devices = devices_lib.place_towers(self.num_towers, self.devices)
        devices_lib.set_graph_optimizer(self.devices)
        self._on_gpus = any(map(is_gpu, self.devices))
        self.model = model
        self.optimizer = keras.optimizers.get(optimizer)
        self.batch_norm = batch_norm
        self.home = state_lib.variables_device(model)
        with tf.device(self.home):
            self.optimizer.build(model.trainable_variables)
        synchronized = synchronized_layers(model, batch_norm) if self.num_towers > 1 else []
        check_synchronized(synchronized, self.num_towers, len(self.devices), jit_compile)
        if jit_compile and self._on_gpus:
            check_compilable(model)
        self._nonfinite = nonfinite
        self._pack_transfers = pack_transfers
        self._tower = Tower(
            model,
            loss,
            loss_weights,
            group=TowerGroup(self.num_towers, synchronized) if synchronized else None,
            checked=checked(nonfinite, self.optimizer),
            jit_compile=jit_compile,
            inline=inline_towers,
        )
        self._metrics = BatchMetrics(metrics, getattr(model, "output_names", None), self.home)
        self._seeds = state_lib.seed_indices(model)
        self._averaged = (
            state_lib.batch_norm_indices(model, synchronized) if batch_norm == "average" else []
        )
        self._graphs = TracedGraphs()

    def __call__(self, x: Any, y: Any = None, sample_weight: Any = None) -> dict[str, tf.Tensor]:
        """One synchronous update.

        Args:
            x: the global batch's inputs: a tensor or array [N, ...], or a structure of these.
            y: its labels: [N, ...], or one for each output as a list, tuple or dict.
            sample_weight: [N] or [N, ...], or one for each output.

        Returns:
            {"loss": scalar, metric name: scalar} of this batch alone.
        """
        self.reset_metrics()
        return self.train_batch(x, y, sample_weight)

    def train_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, placed: list | None = None
    ) -> dict[str, tf.Tensor]:
        """One synchronous update; returns the running means since `reset_metrics`.

        Args:
            x, y, sample_weight: as for a call.
            placed: their shards as `prefetch.place` returns them; None: the step splits them.

        Raises:
            NonFiniteError: with nonfinite="stop"; nothing has changed.
        """
        logs, finite = self._graphs.run(
            self._train, x, y, sample_weight, placed,
            prepare=lambda *specs: self.build_metrics("train", *specs[:3]),
        )
        if self._nonfinite == "stop" and not finite.numpy().all():
            raise NonFiniteError(
                f"{culprit(finite.numpy(), self.tower_devices, self.model.trainable_variables)} is "
                "NaN or infinite."
            )
        return logs

    def test_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, placed: list | None = None
    ) -> dict[str, tf.Tensor]:
        """Loss and metrics in inference mode; arguments and result as for `train_batch`."""
        return self._graphs.run(
            self._test, x, y, sample_weight, placed,
            prepare=lambda *specs: self.build_metrics("test", *specs[:3]),
        )

    def predict_batch(self, x: Any) -> Any:
        """The model's outputs for one global batch, in the model's structure, rows in order."""
        return self._graphs.run(self.predict_graph, x)

    def gradients(self, x: Any, y: Any = None, sample_weight: Any = None) -> tuple:
        """(loss, [gradient]): averaged, in trainable-variable order, without an update.

        Changes no variable, no state, no seed; the gradients are not multiplied by a loss scale.
        """
        return self._graphs.run(self._gradients, x, y, sample_weight)

    def reset_metrics(self) -> None:
        """Starts the running means of the loss and the metrics anew."""
        self._metrics.reset()

    @property
    def metrics_variables(self) -> list[keras.Variable]:
        """The running sums of the loss and the metrics."""
        return self._metrics.variables

    def update_graph(self) -> tf.compat.v1.GraphDef | None:
        """The graph of one update as it was traced, each node with its device; None before that."""
        return self._graphs.find(self._train)

    def build_metrics(self, name: str, x: Any, y: Any, sample_weight: Any = None) -> None:
        """Makes `metrics_variables`, for which the tower's outputs must be known.

        Args: those of `trace_tower`. The first batch does it too, unless it is done already.
        """
        self._metrics.build(y, self.trace_tower(name, x, y, sample_weight))

    def trace_tower(self, name: str, x: Any, y: Any, sample_weight: Any) -> Any:
        """Traces the tower ahead of `train_graph` or `test_graph`; returns symbolic predictions.

        Args:
            name: "train" or "test".
            x, y, sample_weight: a batch, or the TensorSpecs of one.
        """
        values = ([_spec(v) for v in self.model.trainable_variables],
                  [_spec(v) for v in self.model.non_trainable_variables])
        tower = self._tower.trace(name, *values, x, y, sample_weight, SCALES_SPEC)
        predictions = tower.structured_outputs.predictions
        return tf.nest.pack_sequence_as(self._tower.outputs, predictions)

    # The graphs: `train_graph` is the diagram. They may be called in anybody's tf.function: they
    # return the global batch's loss and the model's outputs for it.

    def train_graph(self, x: Any, y: Any, sample_weight: Any) -> tuple[tf.Tensor, Any]:
        """One synchronous update, finite or not; returns (loss, predictions)."""
        return self._apply(*self._run_and_add(x, y, sample_weight))

    def test_graph(
        self, x: Any, y: Any, sample_weight: Any, placed: list | None = None
    ) -> tuple[tf.Tensor, Any]:
        """Inference mode; returns (loss, predictions)."""
        shards = self._split(x, y, sample_weight, placed)
        outputs = self._run_towers("test", shards)
        (loss,) = self._average(outputs, shards)
        return loss, self._predictions(outputs, shards)

    def predict_graph(self, x: Any) -> Any:
        """Inference mode; returns the predictions."""
        shards = self._split(x, None, None)
        return self._predictions(self._run_towers("predict", shards), shards)

    def _gradients(self, x: Any, y: Any, sample_weight: Any) -> tuple:
        shards = self._split(x, y, sample_weight)
        outputs = self._run_towers("train", shards)
        loss, *gradients = self._average(outputs, shards)
        return loss, gradients[: len(self.model.trainable_variables)]

    def _train(self, x: Any, y: Any, sample_weight: Any, placed: list | None) -> tuple:
        """(logs, None), or (logs, [T, 1 + V] bool): see `nonfinite.are_finite`."""
        outputs, tree, shards = self._run_and_add(x, y, sample_weight, placed)

        def apply() -> dict[str, tf.Tensor]:
            loss, predictions = self._apply(outputs, tree, shards)
            return self._metrics.update(loss, x, y, predictions)

        if self._nonfinite == "apply":
            return apply(), None
        with tf.device(self.home):
            finite = tf.stack([output.finite for output in outputs])
            return tf.cond(tf.reduce_all(finite), apply, self._metrics.result), finite

    def _test(self, x: Any, y: Any, sample_weight: Any, placed: list | None) -> dict:
        loss, predictions = self.test_graph(x, y, sample_weight, placed)
        return self._metrics.update(loss, x, y, predictions)

    def _run_and_add(
        self, x: Any, y: Any, sample_weight: Any, placed: list | None = None
    ) -> tuple:
        """1 to 4 of the diagram: (outputs, the tree of their sums, shards), for `_apply`."""
        shards = self._split(x, y, sample_weight, placed)
        outputs = self._run_towers("train", shards, self._loss_scale())
        return outputs, self._add_on_devices(outputs, shards), shards

    # 1. split

    def _split(
        self, x: Any, y: Any, sample_weight: Any, placed: list | None = None
    ) -> list[sharding.Shard]:
        with tf.name_scope("split"), tf.device(self.home):
            shards = sharding.shard_batch((x, y, sample_weight), self.num_towers)
        if placed is None:
            return shards
        return [s._replace(values=v) for s, v in zip(shards, placed, strict=True)]

    # 2. tower -> device, 3. fresh parameters in; loss, gradients, state out

    def _run_towers(
        self, name: str, shards: list[sharding.Shard], loss_scale: Any = 1.0
    ) -> list[TowerOutput]:
        """Calls the one traced tower on every shard, each on its device."""
        inputs = self._tower_inputs(shards)
        tower = self._tower.trace(name, *inputs[0], SCALES_SPEC)
        with tf.name_scope("weights"), tf.device(self.home):
            weights = shard_weights(
                self._tower, tower.structured_outputs, inputs, shards, self.tower_devices
            )
            scales = tower_scales(self._tower.losses, weights, shards, loss_scale)
        outputs: list[TowerOutput] = []
        for device, arguments, scale in zip(self.tower_devices, inputs, scales, strict=True):
            turn = tf.control_dependencies(_turn(device, outputs))
            with tf.name_scope(f"tower_{len(outputs)}"), tf.device(device), turn:
                outputs.append(tower(*arguments, scale))
        return outputs

    def _tower_inputs(self, shards: list[sharding.Shard]) -> list[tuple]:
        """(parameters, state, x, y, sample_weight) of each tower.

        Every variable is read once, here; TensorFlow sends a value once to each device that needs
        it, however many of the device's towers do.
        """
        model = self.model
        with tf.name_scope("parameters"), tf.device(self.home):
            parameters = [tf.convert_to_tensor(v.value) for v in model.trainable_variables]
            state = [tf.convert_to_tensor(v.value) for v in model.non_trainable_variables]
            on_device = {d: self._move(parameters, self.home, d) for d in self.devices}
            return [
                (on_device[device], tower_state(state, self._seeds, t), *shard.values)
                for t, (device, shard) in enumerate(zip(self.tower_devices, shards, strict=True))
            ]

    def _loss_scale(self) -> Any:
        """What `LossScaleOptimizer` multiplies the loss with before the gradients; else 1."""
        with tf.device(self.home):
            return self.optimizer.scale_loss(tf.ones([]))

    # 4. one fixed tree of additions

    def _average(self, outputs: list[TowerOutput], shards: list[sharding.Shard]) -> list:
        """[loss, gradients ..., BatchNorm statistics ...] of the global batch."""
        tree = self._add_on_devices(outputs, shards)
        with tf.device(self.home):
            return add_tree(tree)

    def _add_on_devices(self, outputs: list[TowerOutput], shards: list[sharding.Shard]) -> Any:
        """The tree of the towers' outputs, added up as far as devices hold whole subtrees."""
        with tf.device(self.home):
            shares = sharding.shard_shares(shards)
        values = []
        with tf.name_scope("sum"):
            for output, share, device in zip(outputs, shares, self.tower_devices, strict=True):
                statistics = [output.state[i] for i in self._averaged] if output.state else []
                with tf.device(device):
                    values.append([output.loss, *output.gradients, *weighted(statistics, share)])
            return self.add_where_it_saves_transfers(values)

    def add_where_it_saves_transfers(self, values: list[list]) -> list | tuple:
        """The tree of T x V values; on GPUs added up as far as devices hold whole subtrees."""
        def leave(sums: list, device: str) -> list:
            return self._move(sums, device, self.home)

        if self._on_gpus:
            return add_on_devices(values, self.tower_devices, leave)
        return as_tree(list(map(leave, values, self.tower_devices)))

    def _move(self, values: list, source: str, target: str) -> list:
        """Packed for another device, if that is asked for; else TensorFlow sends each by itself."""
        if not self._pack_transfers or source == target:
            return values
        return move(values, source, target)

    # 5. one update

    def _apply(self, outputs: list[TowerOutput], tree: Any, shards: list[sharding.Shard]) -> tuple:
        """Parameters, optimizer and state take the towers' results; (loss, predictions)."""
        loss, *statistics = self._update(outputs, tree)
        self._assign_state(outputs[0].state, statistics)
        return loss, self._predictions(outputs, shards)

    def _update(self, outputs: list[TowerOutput], tree: Any) -> list:
        """The one update; [loss, BatchNorm statistics ...] of the global batch."""
        is_dense = not any(isinstance(g, tf.IndexedSlices) for g in outputs[0].gradients)
        variables, in_one = self.model.trainable_variables, not self._on_gpus
        with tf.name_scope("update"), tf.device(self.home):
            return update(tree, self.optimizer, variables, in_one=in_one, jit_compile=is_dense)

    def _assign_state(self, state: list, statistics: list) -> None:
        """Stores tower 0's new state, and the averaged BatchNorm statistics over it."""
        merged = list(state)
        for i, value in zip(self._averaged, statistics, strict=True):
            merged[i] = value
        with tf.name_scope("update"), tf.device(self.home):
            state_lib.assign_state(self.model, merged)

    def _predictions(self, outputs: list[TowerOutput], shards: list[sharding.Shard]) -> Any:
        """The model's outputs for the global batch, in order, with their masks."""
        joined = []
        with tf.device(self.home):
            for i, mask in enumerate(outputs[0].masks):
                y_pred = sharding.concat_shards([o.predictions[i] for o in outputs], shards)
                if mask is not None:
                    masks = [o.masks[i] for o in outputs]
                    y_pred._keras_mask = sharding.concat_shards(masks, shards)
                joined.append(y_pred)
        return tf.nest.pack_sequence_as(self._tower.outputs, joined)


def _spec(variable: keras.Variable) -> tf.TensorSpec:
    return tf.TensorSpec(variable.shape, variable.dtype)


def _turn(device: str, outputs: list[TowerOutput]) -> list:
    """What a tower waits for: on a GPU, for the tower before it, to need the memory of one."""
    return outputs[-1:] and [outputs[-1].loss] if is_gpu(device) else []
