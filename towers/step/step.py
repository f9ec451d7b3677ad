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

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.machine import devices as devices_lib
from towers.workers import workers
from towers.workers.cluster import Cluster
from towers.machine.logical import undivided_cpu
from towers.machine.policy import Policy, policy_of
from towers.step import checks, scopes, sharding
from towers.step import state as state_lib
from towers.step.agreement import check_agreement
from towers.step.assigned import leave
from towers.step.averaging import Tree, Values, add_tree
from towers.step.compiled import COMPILED, recipe_of
from towers.step.exchange import make_exchange
from towers.step.first_error import run_in_turn
from towers.step.joined_outputs import join_outputs
from towers.step.lookups import whole
from towers.step.losses import Shares, tower_shares
from towers.step.nonfinite import checked, nonfinite_error
from towers.step.row_counts import check_placed, check_rows, checked_rows
from towers.step.sharding import BatchValues, Placed, Shard
from towers.step.staged import TowerInStages
from towers.step.stages import make_stages
from towers.step.strategies import make_strategy
from towers.step.structures import Structure
from towers.step.synchronized import synchronized_layers
from towers.step.tower import Tower, TowerInput, TowerOutput
from towers.step.traced import TracedGraphs
from towers.step.traced_tower import TracedTower
from towers.step.transfers import move
from towers.step.xla import compiles


class _Sums(NamedTuple):
    """The sums of the towers' outputs.

    tree: of [loss, gradients ..., what the towers assign and is added up ...].
    added: the indices of the variables that these last are assigned to.
    same: values of `Assigned.same` in tower 0, by the variable's index.
    """

    tree: Tree
    added: list[int]
    same: dict[int, tf.Tensor]


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
        optimizer: Any = COMPILED,
        loss: Any = COMPILED,
        *,
        loss_weights: Any = None,
        metrics: Any = None,
        devices: Sequence[str] | None = None,
        num_towers: int | None = None,
        batch_norm: str | None = None,
        nonfinite: str = "apply",
        jit_compile: bool | str = "auto",
        strategy: str = "parameter_server",
        gpus_per_tower: int = 1,
        stages: Sequence[str] | None = None,
        policy: Policy | None = None,
        cluster: Cluster | None = None,
    ) -> None:
        """
        Args:
            model: any built Keras 3 model.
            optimizer: a Keras optimizer or its name, called once, on the averaged gradients.
            loss: a Keras loss, its name, a function, a list or dict of these; None: layers add all.
                A compiled model's optimizer and loss (with weights and metrics) are the defaults.
            loss_weights: a factor, or a list or dict of factors, for several outputs.
            metrics: Keras metrics, as `compile` takes them; or a BatchMetrics.
            devices: this worker's device names; None means `tower_devices()`.
            num_towers: of all workers together; None means one tower per device.
            batch_norm: how BatchNormalization's statistics of T towers become one: "average"
                (weighted by examples), "tower0", or "synchronized": one mean and variance over
                the examples of all towers, which equals the large batch's. Layers with
                `synchronized=True` always do that. None means "average", with a warning.
            nonfinite: what a NaN or infinite loss or gradient of a tower does: "apply" it, as
                Keras does; "stop": raise `NonFiniteError`; or "skip" the update. Neither of the
                last two changes anything but counts no update in `optimizer.iterations` either.
                With `LossScaleOptimizer` gradients are its own to check.
            jit_compile: compile each tower with XLA; "auto": see `towers.step.xla.compiles`.
            strategy: the parameters are on their device alone, "parameter_server", or on every
                one, "mirrored", see `strategies`: same bits.
            gpus_per_tower: S: the layers are in stages on S devices, see `stages`: same bits.
            stages: the layers that begin the stages 1 ... S - 1; None: balanced by bytes.
            policy: how the devices are used; None means as suits their kind, see `policy_of`.
            cluster: the workers that share the towers, each with the same step and the same global
                batches; None means all that the environment names, see `towers.machine.cluster`.

        Raises:
            ValueError: an argument makes no sense, a device is absent, the model is not built.
        """
        checks.check_step(model, batch_norm, nonfinite)
        self.devices = list(devices_lib.tower_devices() if devices is None else devices)
        devices_lib.check_devices(self.devices)
        self.stages = make_stages(
            model, self.devices, gpus_per_tower, stages, strategy=strategy, batch_norm=batch_norm,
            jit_compile=jit_compile,
        )
        firsts = list(self.stages.groups) if self.stages else self.devices
        self.cluster = workers.join_workers() if cluster is None else cluster
        is_chosen = num_towers is not None
        if num_towers is None:
            num_towers = self.cluster.num_workers * len(firsts)
        checks.check_shared(model, num_towers)
        self.num_towers = num_towers
        self._exchange = make_exchange(self.cluster, num_towers)
        self.mine = self._exchange.mine
        self.tower_devices = devices_lib.place_towers(len(self.mine), firsts)
        if devices is None and (shared := undivided_cpu(len(self.mine), is_chosen)):
            warnings.warn(shared, stacklevel=2)
        self.policy = policy_of(self.devices) if policy is None else policy
        devices_lib.set_graph_optimizer(self.policy.optimize_graphs)
        self.model = model
        self.batch_norm = batch_norm or "average"
        self.home = state_lib.variables_device(model)
        self.optimizer, loss, loss_weights, self._metrics = recipe_of(
            model, optimizer, loss, loss_weights, metrics, self.home
        )
        synchronized = synchronized_layers(model, batch_norm) if self.num_towers > 1 else []
        self.compiles = not self.stages and compiles(
            model, self.devices, jit_compile, num_towers, loss, batch_norm
        )
        self._nonfinite = nonfinite
        self._move = partial(move, packed=self.policy.pack_transfers and not self.stages)
        self.strategy = make_strategy(
            strategy, self.optimizer, model.trainable_variables, self.home, self.tower_devices,
            self.policy, self.stages, is_alone=self.cluster.num_workers == 1,
        )
        make_tower = partial(TowerInStages, self.stages) if self.stages else Tower
        self.tower = make_tower(
            model, loss, loss_weights, synchronized_layers=synchronized, batch_norm=batch_norm,
            is_alone=num_towers == 1, checked=checked(nonfinite, self.optimizer),
            jit_compile=self.compiles,
        )
        self._graphs = TracedGraphs(self.cluster, self.check_agreement, partial(run_in_turn, self))
        self.traces = self._graphs.traces  # concrete functions, for batches of any number of rows

    # The diagram.

    def _one_update(
        self,
        batch: BatchValues,
        placed: Placed,
        track: Callable[[Structure], None],
        finish: Callable[[tf.Tensor, Structure], Any],
        otherwise: Callable[[], Any] | None = None,
        *,
        with_predictions: bool,
    ) -> tuple[Any, tf.Tensor | None]:
        """One synchronous update.

        Args:
            batch: x, y and sample_weight of the global batch.
            placed: its shards, where they lie on their devices already.
            track: called with the predictions before the update.
            finish: (loss, predictions) -> what is returned of an update.
            otherwise: what is returned in place of an update that is not finite; None: update.
            with_predictions: else they are None.

        Returns:
            (what `finish` or `otherwise` has returned, [T, 1 + V] bool, see
            `nonfinite.are_finite`, or None where nobody asks).
        """
        shards = self.split(batch, placed)                                  # 1
        outputs = self.run_towers("train", shards, self._loss_scale())      # 2 and 3
        sums = self._add_up(outputs)                                        # 4
        predictions = self._predictions(outputs, shards) if with_predictions else None

        def update_all() -> Any:
            track(predictions)
            return finish(self._update(sums), predictions)                  # 5

        if otherwise is None:
            return update_all(), None
        with tf.device(self.home):
            finite = tf.stack(self._exchange.one_a_tower([o.finite for o in outputs]))
            return tf.cond(tf.reduce_all(finite), update_all, otherwise), finite

    def split(self, batch: BatchValues, placed: Placed = None) -> list[Shard]:
        """1. The shards of the global batch."""
        with tf.name_scope(scopes.SPLIT), tf.device(devices_lib.HOST):
            self._exchange.check_same_batch(batch)
            shards = sharding.shard_batch(batch, self.num_towers)
        for tower, values in zip(self.mine, placed or []):
            shards[tower] = shards[tower]._replace(values=values)
        return shards

    def run_towers(self, name: str, shards: list[Shard], *options: Any) -> list[TowerOutput]:
        """2 and 3. Calls the one traced tower on each of this worker's shards, on its device."""
        tower, weigh = self.tower.trace(name, shards[self.mine.start].values)
        inputs = self._inputs(shards)
        if name == "predict":
            shares = [Shares(tf.zeros([0], tf.float64), shard.share) for shard in shards]
        else:
            shares = self._shares(weigh, inputs, shards)
        return self._on_devices(tower, inputs, [(shares[t], *options) for t in self.mine])

    def _inputs(self, shards: list[Shard]) -> list[TowerInput]:
        """3. The inputs of each tower of this worker.

        TensorFlow sends a value once to each device, however many of its towers need it.
        """
        with tf.name_scope(scopes.PARAMETERS), tf.device(self.home):
            arrived = self.strategy.spread(self.tower.state, [self.home, *self.tower_devices])
            first = len(self.trainable_variables)
            seeds = {i: arrived[self.home][first + i] for i in self.tower.seeds}
            inputs = []
            for tower, device in zip(self.mine, self.tower_devices, strict=True):
                of_model, own = arrived[device][:first], arrived[device][first:]
                folded = state_lib.tower_seeds(list(seeds.values()), tower)
                for i, seed in zip(seeds, self._move(folded, self.home, device), strict=True):
                    own[i] = seed
                inputs.append(TowerInput(of_model, own, *shards[tower].values))
            return inputs

    def _shares(
        self, weigh: TracedTower | None, inputs: list[TowerInput], shards: list[Shard]
    ) -> list[Shares]:
        """3. The shares of the T towers' losses; `weigh`: traced `Tower.weigh_masked`, or None."""
        losses = self.tower.losses
        with tf.name_scope(scopes.WEIGHTS), tf.device(self.home):
            if weigh is not None:
                own = self._on_devices(weigh, inputs, [(shards[t].size,) for t in self.mine])
                weights = self._exchange.one_a_tower(own)
            else:
                weights = [losses.weigh(*shard.values[1:], shard.size) for shard in shards]
            return tower_shares(losses.terms(*shards[0].values[1:]), weights, shards)

    def _on_devices(
        self, tower: TracedTower, inputs: list[TowerInput], options: Sequence[Sequence[Any]]
    ) -> list[Any]:
        arguments = [(fed, *others) for fed, others in zip(inputs, options, strict=True)]
        return tower.run(
            arguments, self.tower_devices, self._sum_towers,
            take_turns=self.policy.take_turns, first=self.mine.start,
        )

    def reduce(self, values: list[Values], devices: Sequence[str] | None = None) -> Tree:
        """4. The tree of additions over all towers that are left; `values`: this worker's x V."""
        with tf.device(self.home):
            return self._exchange.reduce(
                values, devices or self.tower_devices, add_on_devices=self.policy.add_on_devices,
                home=self.home, move=self._move,
            )

    def _add_up(self, outputs: list[TowerOutput]) -> _Sums:
        """4. The sums of loss, gradients and state."""
        assigned = outputs[0].assigned
        with tf.name_scope(scopes.SUM), tf.device(self.home):
            kept = self._move(list(assigned.same.values()), self.tower_devices[0], self.home)
            same = self._exchange.of_tower_0(kept)
            values = [[o.loss, *o.gradients, *o.assigned.parts.values()] for o in outputs]
            tree = self.strategy.add_up(values, self.tower_devices, self.reduce)
        return _Sums(tree, list(assigned.parts), dict(zip(assigned.same, same, strict=True)))

    def _update(self, sums: _Sums) -> tf.Tensor:
        """5. Updates parameters, optimizer and state with the towers' results; returns the loss."""
        variables = self.trainable_variables
        with tf.name_scope(scopes.UPDATE), tf.device(self.home):
            parameters = {i: v for i, v in sums.same.items() if i < len(variables)}
            leave(variables, parameters, {})  # the update is of what was assigned
            if parameters:
                self.strategy.refresh()
            loss, added = self.strategy.update(sums.tree)
            self._leave(sums, added)
        return loss

    # What the arrows need.

    def _loss_scale(self) -> tf.Tensor:
        """The factor by which a LossScaleOptimizer scales the loss; 1 for any other optimizer."""
        with tf.device(self.home):
            return tf.cast(self.optimizer.scale_loss(tf.ones([])), tf.float32)

    def _added(self, tree: Tree) -> Values:
        """The sums of a tree, where no update follows."""
        with tf.device(self.home):
            return add_tree(tree)

    def _sum_towers(self, values: list[Values]) -> Values:
        """Sums values over all towers, in the midst of their run."""
        with tf.name_scope(scopes.SUM):
            return self._added(self.reduce(values))

    def _leave(self, sums: _Sums, added: Values) -> None:
        """Assigns to state what towers give it; `added`: sums for `sums.added`."""
        variables = [*self.trainable_variables, *self.tower.state]
        first = len(self.trainable_variables)
        same = {i: value for i, value in sums.same.items() if i >= first}
        with tf.device(self.home):
            leave(variables, same, dict(zip(sums.added, added, strict=True)))

    def _predictions(self, outputs: list[TowerOutput], shards: list[Shard]) -> Structure:
        """The model's outputs for the global batch, in order, with their masks and logits."""
        first = self.tower_devices[0]
        with tf.device(self.home):
            flat = join_outputs(
                outputs, lambda values: self._exchange.rows(values, shards),
                lambda values: self._exchange.of_tower_0(self._move(values, first, self.home)),
                lambda values: self._added(self.reduce(values)),
            )
        return tf.nest.pack_sequence_as(self.tower.losses.outputs, flat)

    def _infer(
        self, name: str, batch: BatchValues, placed: Placed = None
    ) -> tuple[tf.Tensor, Structure]:
        """(loss, predictions) of a global batch; what the model assigns is kept, as in Keras."""
        outputs = self.run_towers(name, shards := self.split(batch, placed))
        sums = self._add_up(outputs)
        loss, *added = self._added(sums.tree)
        self._leave(sums, added)
        return loss, self._predictions(outputs, shards)

    # The graphs, to be called in anybody's tf.function.

    def train_graph(
        self, x: Structure, y: Structure, sample_weight: Structure, placed: Placed = None,
        track: Callable[[Structure], None] = lambda predictions: None,
    ) -> tuple[tf.Tensor, Structure]:
        """One synchronous update, finite or not; returns (loss, predictions).

        Args:
            x, y, sample_weight, placed: as for `train_batch`.
            track: called with the predictions before the update.
        """
        with checked_rows(x, y, sample_weight):
            result, _ = self._one_update(
                (x, y, sample_weight), placed, track, lambda *result: result, with_predictions=True
            )
            return result

    def test_graph(
        self, x: Structure, y: Structure, sample_weight: Structure, placed: Placed = None
    ) -> tuple[tf.Tensor, Structure]:
        """Runs one global batch in inference mode; returns (loss, predictions)."""
        with checked_rows(x, y, sample_weight):
            return self._infer("test", (x, y, sample_weight), placed)

    def predict_graph(self, x: Structure) -> Structure:
        """Runs one global batch in inference mode; returns the predictions."""
        with checked_rows(x):
            return self._infer("predict", (x, None, None))[1]

    # What a user calls.

    def __call__(self, x: Any, y: Any = None, sample_weight: Any = None) -> dict[str, tf.Tensor]:
        """One synchronous update.

        Args:
            x: the global batch's inputs: a tensor or array [N, ...], or a structure of these.
            y: its labels: [N, ...], or one for each output as a list, tuple or dict.
            sample_weight: [N] or [N, ...], or one for each output.

        Returns:
            {"loss": scalar, metric name: scalar} of this batch alone.
        """
        check_rows(x, y, sample_weight)
        self.reset_metrics()
        return self.train_batch(x, y, sample_weight)

    def train_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, placed: Placed = None
    ) -> dict[str, tf.Tensor]:
        """One synchronous update; returns the running means since `reset_metrics`.

        Args:
            x, y, sample_weight: as for a call.
            placed: their shards as `prefetch.place` returns them; None: the step splits them.

        Raises:
            NonFiniteError: with nonfinite="stop"; nothing has changed.
            ValueError: x, y and sample_weight differ in their number of rows; nothing has changed.
        """
        check_placed(placed, x, self.num_towers, self.mine)
        batch, build = (x, y, sample_weight), partial(self.build_metrics, "train")
        logs, finite = self._graphs.call(self._train, *batch, behind=[placed], prepare=build)
        if self._nonfinite == "stop" and not finite.numpy().all():
            places = self._exchange.places(self.tower_devices)
            raise nonfinite_error(finite.numpy(), places, self.trainable_variables)
        return logs

    def test_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, placed: Placed = None
    ) -> dict[str, tf.Tensor]:
        """Loss and metrics in inference mode; arguments and result as for `train_batch`."""
        check_placed(placed, x, self.num_towers, self.mine)
        batch, build = (x, y, sample_weight), partial(self.build_metrics, "test")
        return self._graphs.call(self._test, *batch, behind=[placed], prepare=build)

    def predict_batch(self, x: Any) -> Any:
        """The model's outputs for one global batch, in the model's structure, rows in order."""
        return self._graphs.call(self.predict_graph, x)

    def gradients(
        self, x: Any, y: Any = None, sample_weight: Any = None
    ) -> tuple[tf.Tensor, Values]:
        """(loss, [gradient]): averaged, in trainable-variable order, without an update.

        Changes no variable, no state, no seed; the gradients are not multiplied by a loss scale.
        """
        return self._graphs.call(self._gradients, x, y, sample_weight)

    def reset_metrics(self) -> None:
        """Starts the running means of the loss and the metrics anew."""
        self._metrics.reset()

    @property
    def trainable_variables(self) -> list[keras.Variable]:
        """The V variables that it trains: those that were trainable when it was made."""
        return self.tower.trainable

    @property
    def has_unsaved_noise(self) -> bool:
        """Whether the model, as far as it was traced, draws noise by tf.random."""
        return self.tower.has_unsaved_noise

    @property
    def metrics_variables(self) -> list[keras.Variable]:
        """The running sums of the loss and the metrics, and the `met_variables`."""
        return list({id(v): v for v in [*self._metrics.variables, *self.tower.met]}.values())

    @property
    def met_variables(self) -> list[Any]:
        """Variables that the model uses and Keras does not list; known once a step was traced."""
        return self.tower.met

    def update_graph(self) -> tf.compat.v1.GraphDef | None:
        """The graph of one update as it was traced; None before that."""
        return self._graphs.find(self._train)

    def check_agreement(self) -> None:
        """Raises ValueError where workers differ in what they train; so does the first batch."""
        check_agreement(
            self.cluster, self.model, self.optimizer,
            num_towers=self.num_towers, batch_norm=self.batch_norm, nonfinite=self._nonfinite,
            stages=self.stages.names if self.stages else None,
        )

    def build_metrics(self, name: str, x: Any, y: Any, sample_weight: Any = None) -> None:
        """Makes `metrics_variables`, for which the tower's outputs must be known.

        Args: as for `trace_tower`. The first batch does it, unless it is done already.
        """
        self._metrics.build(y, self.trace_tower(name, x, y, sample_weight), x, sample_weight)

    def trace_tower(self, name: str, x: Any, y: Any, sample_weight: Any) -> Any:
        """Traces the tower ahead of `train_graph` or `test_graph`; returns symbolic predictions.

        Args:
            name: "train" or "test".
            x, y, sample_weight: a batch, or the TensorSpecs of one.
        """
        output = self.tower.trace(name, (x, y, sample_weight))[0].structured_outputs
        return tf.nest.pack_sequence_as(self.tower.losses.outputs, output.predictions)

    # What of it is traced.

    def _train(
        self, x: Structure, y: Structure, sample_weight: Structure, placed: Placed
    ) -> tuple[dict[str, tf.Tensor], tf.Tensor | None]:
        """One update with metrics: (logs, [T, 1 + V] bool or None), see `_one_update`."""
        metrics = self._metrics
        return self._one_update(
            (x, y, sample_weight), placed,
            lambda y_pred: metrics.track_losses(x, y, y_pred, sample_weight, training=True),
            lambda loss, y_pred: metrics.update(loss, x, y, y_pred, sample_weight),
            None if self._nonfinite == "apply" else metrics.result,
            with_predictions=metrics.need_predictions,
        )

    def _test(
        self, x: Structure, y: Structure, sample_weight: Structure, placed: Placed
    ) -> dict[str, tf.Tensor]:
        loss, predictions = self.test_graph(x, y, sample_weight, placed)
        self._metrics.track_losses(x, y, predictions, sample_weight)
        return self._metrics.update(loss, x, y, predictions, sample_weight)

    def _gradients(
        self, x: Structure, y: Structure, sample_weight: Structure
    ) -> tuple[tf.Tensor, Values]:
        shards = self.split((x, y, sample_weight))
        sums = self._add_up(self.run_towers("train", shards, tf.ones([])))
        loss, *added = self._added(sums.tree)
        return loss, [whole(g, v.shape) for g, v in zip(added, self.trainable_variables)]
