"""Makes one synchronous data-parallel update as one TensorFlow graph.

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

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.machine import choices, devices as devices_lib
from towers.machine.argument_names import names_checked
from towers.machine.devices import HOST, Policy, policy_of
from towers.machine.logical import undivided_cpu
from towers.machine.loss_internals import marked
from towers.machine.user_lines import warn_user
from towers.step import checks, sharding, state as state_lib, structures
from towers.step.assigned import assign_merged
from towers.step.averaging import Tree, Values, add_tree
from towers.step.calls import TracedTower
from towers.step.compiled import COMPILED, recipe_of
from towers.step.errors import checked
from towers.step.exchange import make_exchange
from towers.step.gathering import synchronized_layers
from towers.step.lookups import join_lookups
from towers.step.losses import Shares, tower_shares
from towers.step.metrics import reads_inputs
from towers.step.noise_scale import NoiseMetric, squared_norm
from towers.step.sharding import BatchValues, Placed, Shard
from towers.step.stages import check_compiled, check_stages, make_stages
from towers.step.strategies import make_strategy
from towers.step.structures import Structure
from towers.step.tower import Tower, TowerInput, TowerOutput
from towers.step.transfers import transfer
from towers.step.xla import FullBatch, uses_xla
from towers.workers.workers import Workers, join_workers


class Computed(NamedTuple):
    """Holds the towers' results for a global batch, before the update."""

    tree: Tree  # the remaining additions over the towers of [loss, V gradients, parts]
    added: list[int]  # the variable index of each part
    same: dict[int, tf.Tensor]  # tower 0's `Assigned.same`
    predictions: Structure  # the model's outputs for all rows; None if not requested
    finite: tf.Tensor | None  # [T, 1 + V] bool, from `TowerOutput.finite`; None if unchecked


class Step:
    """Updates the V parameters that were trainable at first, within a tf.function of the caller."""

    @names_checked
    def __init__(
        self, model: keras.Model, optimizer: Any = COMPILED, loss: Any = COMPILED, *,
        loss_weights: Any = None, metrics: Any = None, devices: Sequence[str] | None = None,
        num_towers: int | None = None, batch_norm: str | None = None, nonfinite: str = "apply",
        jit_compile: bool | str = COMPILED, strategy: str = "parameter_server",
        gpus_per_tower: int = 1, stages: Sequence[str] | None = None,
        policy: Policy | None = None, cluster: Workers | None = None, noise_scale: bool = False,
        own_rows: bool = False, batch_size: int | None = None,
    ) -> None:
        """
        Args:
            model: a built Keras 3 model.
            optimizer: a Keras optimizer or its name. It is called once for each update, with the
                averaged gradients.
            loss: a Keras loss, its name, a function, or a list or dict of these; None if layers add
                every loss. A compiled model brings its optimizer, loss, loss weights and metrics.
            loss_weights: a factor, or a list or dict with a factor for each output.
            metrics: Keras metrics in any form that `compile` takes.
            devices: the names of this worker's devices. Default: `tower_devices()`.
            num_towers: the number of towers of all workers together. Default: one for each device.
            batch_norm: how the towers' BatchNormalization statistics become one. "average" averages
                them, weighted by examples, and "tower0" takes tower 0's. "synchronized" uses one
                mean and variance over the examples of all towers, as one device does; layers with
                `synchronized=True` always do. Default: "average", with a warning.
            nonfinite: the reaction to a NaN or infinite loss or gradient. "apply" updates, as Keras
                does. "stop" raises `NonFiniteError` before the update. "skip" leaves the update out
                and does not count it in `optimizer.iterations`. A `LossScaleOptimizer` checks its
                gradients itself.
            jit_compile: whether XLA compiles each tower. "auto" follows `model.jit_compile`, and
                compiles small recurrent layers on machines without GPUs. "compiled" only follows
                `model.jit_compile`. It equals "auto" for a model that is not compiled, or whose
                value is the one that Keras chooses for "auto".
            strategy: "parameter_server" keeps the parameters on one device, and "mirrored" keeps a
                copy on every tower device. "sharded" divides the update and the optimizer's slots
                among the copies, for optimizers that update each element separately. All give the
                same bits.
            gpus_per_tower: the number of devices that share the layers of one tower, in as many
                stages. Any number gives the same bits.
            stages: the names of the layers that begin the second and later stages. Default: stages
                are balanced by the bytes of parameters and outputs.
            policy: how devices are used. Default: the policy for their kind, CPU or GPU.
            cluster: the workers that share the towers. Each makes the same step and passes the same
                global batches. Default: the workers that the environment names.
            noise_scale: whether `train_batch` also returns "noise_scale", the batch size beyond
                which most examples are wasted, estimated since `reset_metrics`. It needs two
                towers. The weights keep their bits. The first 10 steps are measured, and then
                every 20th step, which has its own trace.
            own_rows: whether each of several workers passes only its own rows of x, y and
                sample_weight. For N examples, `step.own_rows(N)` returns bool [N], true for the
                examples of the worker's towers and for the first example. The other rows may hold
                anything, such as zeros. Workers compare N and the first example.
            batch_size: the number of examples in a full batch. XLA, if it compiles the towers,
                then compiles only the shards of full batches. Default: shards of every size.

        Raises:
            ValueError: an argument is wrong, a device does not exist, or the model is not built.
        """
        checks.check_model(model)
        checks.check_choice("batch_norm", batch_norm or "average", choices.BATCH_NORM)
        checks.check_choice("nonfinite", nonfinite, choices.NONFINITE)
        self.devices = devices_lib.device_list(devices)
        devices_lib.check_devices(self.devices)
        self.stages = make_stages(
            model, self.devices, gpus_per_tower, stages, strategy=strategy, batch_norm=batch_norm,
            jit_compile=jit_compile,
        )
        firsts = list(self.stages.groups) if self.stages else self.devices
        self.cluster = join_workers() if cluster is None else cluster
        is_chosen = num_towers is not None
        if num_towers is None:
            num_towers = self.cluster.num_workers * len(firsts)
        checks.check_shared(model, num_towers)
        checks.check_counts(num_towers, batch_size, noise_scale)
        self.num_towers, self.nonfinite, self.model = num_towers, nonfinite, model
        self.batch_norm = batch_norm or "average"
        self.exchange = make_exchange(self.cluster, num_towers, own_rows)
        self.local_towers = self.exchange.local_towers
        find_rows = functools.partial(sharding.rows_of_towers, num_towers, self.local_towers)
        self.own_rows = find_rows if own_rows else None  # N -> bool [N]
        self.tower_devices = devices_lib.place_towers(len(self.local_towers), firsts)
        if devices is None and (shared := undivided_cpu(len(self.local_towers), is_chosen)):
            warn_user(shared)
        self.policy = policy_of(self.devices) if policy is None else policy
        devices_lib.set_graph_optimizer(self.policy.optimize_graphs)
        self.parameter_device = state_lib.variables_device(model)
        self._optimizer, loss, loss_weights, self.metrics = recipe_of(
            model, optimizer, loss, loss_weights, metrics, self.parameter_device
        )
        if own_rows and reads_inputs(self.metrics.model):
            raise ValueError(
                "own_rows: a custom compute_loss or compute_metrics gets x of the global batch. "
                "Use own_rows=False, and pass every worker all rows."
            )
        synchronized = synchronized_layers(model, batch_norm) if num_towers > 1 else []
        check_stages(gpus_per_tower, stages, batch_norm="synchronized" if synchronized else None)
        self.uses_xla = check_compiled(self.stages, uses_xla(
            model, self.devices, jit_compile, num_towers, loss, batch_norm
        ))
        self.full_batch = FullBatch(batch_size)
        self.strategy = make_strategy(
            strategy, self.optimizer, model.trainable_variables, self.parameter_device,
            self.tower_devices, self.policy, self.exchange, self.stages,
        )
        self.tower = Tower(
            model, loss, loss_weights, synchronized, batch_norm, is_alone=num_towers == 1,
            checked=checked(nonfinite, self.optimizer), jit_compile=self.uses_xla,
            stages=self.stages,
        )
        self.trainable_variables = self.tower.trainable
        with tf.device(self.parameter_device):
            self.noise = NoiseMetric() if noise_scale else None

    # The diagram.

    def compute(
        self, batch: BatchValues, placed: Placed = None, *, with_predictions: bool = True,
        is_measured: bool = False,
    ) -> Computed:
        """Computes the towers' results for a global batch: arrows 1 to 4.

        is_measured: whether to update the noise scale.
        """
        with checks.checked_rows(*batch):
            shards = self.split(batch, placed)                                  # 1
            with tf.device(self.parameter_device):  # 1 for all but a LossScaleOptimizer
                loss_scale = tf.cast(self.optimizer.scale_loss(tf.ones([])), tf.float32)
            outputs = self.run_towers("train", shards, loss_scale)              # 2 and 3
            computed = self._add_up(outputs, shards if with_predictions else None)  # 4
            if self.noise is not None and is_measured:
                self._measure(self.noise, outputs, computed.tree, shards, loss_scale)
            return computed

    def update(self, computed: Computed) -> tf.Tensor:
        """Updates parameters, optimizer and state (arrow 5); returns the loss."""
        variables = self.trainable_variables
        with tf.name_scope(structures.UPDATE), tf.device(self.parameter_device):
            parameters = {i: v for i, v in computed.same.items() if i < len(variables)}
            assign_merged(variables, parameters, {})  # the update starts from assigned values
            if parameters:
                self.strategy.refresh()
            loss, added = self.strategy.update(computed.tree)
            self._assign_state(computed, added)
        return loss

    def whole(self, batch: BatchValues) -> BatchValues:
        """Compares the workers' batches; returns the batch with y and sample_weight of all rows."""
        with tf.name_scope(structures.SPLIT), tf.device(HOST):
            self.exchange.check_same_batch(batch)
            return self.exchange.join_labels(batch)

    def split(self, batch: BatchValues, placed: Placed = None) -> list[Shard]:
        """Splits the global batch, from `whole`, into T shards (arrow 1)."""
        with tf.name_scope(structures.SPLIT), tf.device(HOST):
            shards = sharding.shard_batch(batch, self.num_towers)
        for tower, values in zip(self.local_towers, placed or []):
            shards[tower] = shards[tower]._replace(values=values)
        return shards

    def run_towers(self, name: str, shards: list[Shard], *options: Any) -> list[TowerOutput]:
        """Calls the traced tower on each of this worker's shards, on its device (arrows 2, 3)."""
        traced, weigh = self.tower.trace(name, shards[self.local_towers.start].values)
        inputs, compiled = self._inputs(shards), None
        if self.uses_xla:
            flags = self.full_batch.compiled(name, [shard.size for shard in shards])
            compiled = [flags[t] for t in self.local_towers]

        def run(function: TracedTower, others: list[list[Any]]) -> list[Any]:
            return function.run(
                list(zip(inputs, others, strict=True)), self.tower_devices, self._sum_towers,
                compiled=compiled, take_turns=self.policy.take_turns,
                first=self.local_towers.start,
            )

        if name == "predict":
            shares = [Shares(tf.zeros([0], tf.float64), shard.share) for shard in shards]
        else:
            losses = self.tower.losses
            with tf.name_scope(structures.WEIGHTS), tf.device(self.parameter_device):
                if weigh is None:
                    weights = [losses.weigh(*shard.values[1:], shard.size) for shard in shards]
                else:
                    sizes = [[shards[t].size] for t in self.local_towers]
                    weights = self.exchange.all_gather(run(weigh, sizes))
                shares = tower_shares(losses.terms(*shards[0].values[1:]), weights, shards)
        return run(traced, [[shares[t], *options] for t in self.local_towers])

    def _inputs(self, shards: list[Shard]) -> list[TowerInput]:
        """Returns the inputs of each tower of this worker (arrow 3), sent once to each device."""
        source, first = self.parameter_device, len(self.trainable_variables)
        inputs = []
        with tf.name_scope(structures.PARAMETERS), tf.device(source):
            arrived = self.strategy.spread(self.tower.state, [source, *self.tower_devices])
            seeds = {i: arrived[source][first + i] for i in self.tower.seeds}
            for t, device in zip(self.local_towers, self.tower_devices, strict=True):
                parameters, state = arrived[device][:first], arrived[device][first:]
                folded = state_lib.tower_seeds(list(seeds.values()), t)
                moved = transfer(folded, source, device, packed=self.strategy.packed)
                for i, seed in zip(seeds, moved, strict=True):
                    state[i] = seed
                inputs.append(TowerInput(parameters, state, *shards[t].values))
        return inputs

    def _add_up(self, outputs: list[TowerOutput], shards: list[Shard] | None) -> Computed:
        """Adds loss, gradients and state (arrow 4); joins the outputs if `shards` are given."""
        assigned, predictions, finite = outputs[0].assigned, None, None
        with tf.name_scope(structures.SUM), tf.device(self.parameter_device):
            same = self._broadcast(assigned.same)
            values = [[o.loss, *o.gradients, *o.assigned.parts.values()] for o in outputs]
            tree = self.strategy.add_up(values, self.tower_devices)
        with tf.device(self.parameter_device):
            if shards is not None:
                predictions = self._predictions(outputs, shards)
            if outputs[0].finite is not None:
                finite = tf.stack(self.exchange.all_gather([o.finite for o in outputs]))
        return Computed(tree, list(assigned.parts), same, predictions, finite)

    def _predictions(self, outputs: list[TowerOutput], shards: list[Shard]) -> Structure:
        """Returns the model's outputs for the global batch, with their masks and logits.

        Rows are joined in order. An output without rows is tower 0's, or a sum over the towers.
        """
        first = outputs[0]
        found = self._broadcast(first.without_rows.same)
        if parts := first.without_rows.parts:
            added = self._sum_towers([list(o.without_rows.parts.values()) for o in outputs])
            found |= zip(parts, added, strict=True)
        for i, value in enumerate(first.predictions):
            if value is not None and i not in found:
                rows = self.exchange.rows([o.predictions[i] for o in outputs], shards)
                found[i] = marked(rows, {
                    name: self.exchange.rows([o.marks[i][name] for o in outputs], shards)
                    for name in first.marks[i]
                })
        flat = [found.get(i) for i in range(len(first.predictions))]
        return tf.nest.pack_sequence_as(self.tower.losses.outputs, flat)

    def infer(
        self, name: str, batch: BatchValues, placed: Placed = None
    ) -> tuple[tf.Tensor, Structure]:
        """Returns (loss, predictions) of "test" or "predict"; assigns the state, as Keras does."""
        with checks.checked_rows(*batch), tf.device(self.parameter_device):
            shards = self.split(batch, placed)
            computed = self._add_up(self.run_towers(name, shards), shards)
            loss, *added = add_tree(computed.tree)
            self._assign_state(computed, added)
            return loss, computed.predictions

    def gradients_of(self, batch: BatchValues) -> tuple[tf.Tensor, Values]:
        """Returns (loss, [gradient]) of a global batch, averaged; assigns nothing."""
        with tf.device(self.parameter_device):
            outputs = self.run_towers("train", self.split(batch), tf.ones([]))
            loss, *added = add_tree(self._add_up(outputs, None).tree)
        return loss, [join_lookups(g, v.shape) for g, v in zip(added, self.trainable_variables)]

    # Helpers of the arrows.

    def _measure(
        self, noise: NoiseMetric, outputs: list[TowerOutput], tree: Tree, shards: list[Shard],
        loss_scale: tf.Tensor,
    ) -> None:
        """Updates the noise scale, outside of the update: XLA adds squares slowly."""
        def norm(gradients: Values) -> tf.Tensor:
            shapes = [variable.shape for variable in self.trainable_variables]
            return squared_norm([*map(join_lookups, gradients, shapes)]) / loss_scale**2

        with tf.device(self.parameter_device):
            norms = self.exchange.all_gather([norm(output.gradients) for output in outputs])
            sizes = tf.stack([shard.size for shard in shards])
            noise.update_state(tf.stack(norms), sizes, norm(add_tree(tree)[1:]))

    def _broadcast(self, values: Mapping[int, tf.Tensor]) -> dict[int, tf.Tensor]:
        """Returns tower 0's values on the parameter device, given this worker's first tower's."""
        source, target = self.tower_devices[0], self.parameter_device
        moved = transfer(list(values.values()), source, target, packed=self.strategy.packed)
        return dict(zip(values, self.exchange.broadcast(moved), strict=True))

    def _sum_towers(self, values: list[Values]) -> Values:
        """Sums V values of each of this worker's towers over all towers; returns V sums."""
        with tf.name_scope(structures.SUM), tf.device(self.parameter_device):
            return add_tree(self.strategy.reduce(values, self.tower_devices))

    def _assign_state(self, computed: Computed, added: Values) -> None:
        """Assigns the towers' merged values to the state; `added`: sums for `computed.added`."""
        first = len(self.trainable_variables)
        same = {i: value for i, value in computed.same.items() if i >= first}
        sums = dict(zip(computed.added, added, strict=True))
        assign_merged([*self.trainable_variables, *self.tower.state], same, sums)

    # Properties and checks.

    @property
    def optimizer(self) -> Any:
        """The optimizer of the update; make a new step for another one."""
        return self._optimizer

    @property
    def has_unsaved_noise(self) -> bool:
        """Whether a traced tower draws noise with tf.random, whose state cannot be saved."""
        return any(traced.has_unsaved_noise for traced in self.tower.traced.values())

    @property
    def faults(self) -> list[str]:
        """Returns the lines that make the averaged gradient another one, with the fixes."""
        return self.tower.faults

    @property
    def unlisted_variables(self) -> list[Any]:
        """Returns variables that the model uses but Keras does not list; found while tracing."""
        return self.tower.state[self.tower.num_listed:]

    def check_agreement(self) -> None:
        """Raises ValueError if workers differ in versions, settings or variables."""
        checks.check_agreement(self.cluster, [*self.model.variables, *self.optimizer.variables], {
            "num_towers": self.num_towers, "batch_norm": self.batch_norm,
            "nonfinite": self.nonfinite, "stages": self.stages.names if self.stages else None,
            "the optimizer": type(self.optimizer).__name__,
        })

    def trace_tower(self, name: str, x: Any, y: Any, sample_weight: Any) -> Any:
        """Traces the tower for a batch, or its specs; returns symbolic predictions."""
        output = self.tower.trace(name, (x, y, sample_weight))[0].structured_outputs
        return tf.nest.pack_sequence_as(self.tower.losses.outputs, output.predictions)
