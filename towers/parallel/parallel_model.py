"""make_parallel: any Keras model on towers, with Keras' own compile, fit, evaluate and predict.

    parallel.fit                                       Keras' loop, callbacks and data adapters
        train_step
            TowerStep.compute, .update                 towers, averaging, one update
            loss tracker, metrics                      Keras' own, over the global batch
        a train_step of the model's own
            OwnStep                                    traced once, run on towers level by level
"""

import functools
import itertools
import types
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from towers.graph.repeatable import UNSAVED_NOISE
from towers.machine import hang, loss_internals
from towers.machine.gpus import as_integer, device_indices, gpu_devices
from towers.machine.logical import undivided_cpu
from towers.machine.policy import policy_of
from towers.workers.watch import watched
from towers.machine.words import plural
from towers.workers.workers import Workers, join_workers
from towers.custom_step import OwnStep
from towers.parallel.fresh_copies import with_fresh_copies
from towers.parallel.hang_timeout import watching
from towers.parallel.layers_ahead import Base, build, build_loss, take_over, track_outputs
from towers.parallel.placed_batches import PlacedBatches, has_use, let_go
from towers.parallel.requirements import check_model, explained, hint_gpu_variables
from towers.resume.resumed_fit import fit_arguments, given_callbacks, is_resumed, resumed_fit
from towers.step.compiled import losses, overrides, track_losses, update_metrics
from towers.step import TowerStep, checks
from towers.step import state as state_lib
from towers.step.gathering import NeedsOtherTowers
from towers.step.first_error import NewestBatch, first_error, run_in_turn
from towers.step.row_counts import check_arrays, readable
from towers.step.stages import check_groups, check_stages
from towers.step.structures import batch_specs
from towers.step.xla import follows_keras, small_loops


def make_parallel(
    model: keras.Model,
    gpus: Any = None,
    *,
    num_towers: int | None = None,
    batch_norm: str | None = None,
    strategy: str = "parameter_server",
    gpus_per_tower: int = 1,
    stages: Sequence[str] | None = None,
) -> keras.Model:
    """The model as one whose fit, evaluate and predict run on towers.

    ```python
    parallel = towers.make_parallel(model, 8)
    parallel.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    parallel.fit(x, y, batch_size=1024)
    parallel.save("model.keras")  # plain Keras
    ```

    It has the layers and variables of `model`: train one, and the other has learnt. Whatever Keras
    writes of it (`save`, `export`, `clone_model`) is the plain model. Each is compiled on its own;
    a model that is compiled already hands its compile arguments on. `batch_size` is the global
    batch. Towers are graphs on devices of their own: `run_eagerly` is off, and `jit_compile`
    compiles each of them, as Keras decides or as `compile` was told; not a step of its own.

    Of several workers, each makes the same model and gives it the same global batches.

    Args:
        model: any Keras 3 model; one that is not built yet is built on the first batch, on the
            CPU. A `train_step`, `test_step` or `predict_step` of its class's own is run as
            docs/own_train_step.md says.
        gpus: a count, or a list of device indices such as [0, 2, 4]; None means all GPUs. Other
            GPUs are hidden from TensorFlow, which would take their memory; where it has started
            already, a warning says so. On a machine without GPUs the towers run on the logical CPU
            devices that `logical_cpus` makes. If TensorFlow has started with one CPU device, all
            towers share it, and a warning says so. None means all logical CPU devices there.
        num_towers: the number of towers of all workers together; None means one tower for each
            `gpus_per_tower` of the devices that `gpus` names.
        batch_norm, strategy, gpus_per_tower, stages: as for `TowerStep`.

    Raises:
        ValueError: the model cannot be computed in towers, or an argument makes no sense.
    """
    check_model(model)
    checks.check_batch_norm(batch_norm)
    checks.check_strategy(strategy)
    count = None if num_towers is None else as_integer(num_towers)
    if num_towers is not None and (count is None or count < 1):
        raise ValueError(f"num_towers ({num_towers!r}) must be an integer of at least 1.")
    options: dict[str, Any] = {"batch_norm": batch_norm, "strategy": strategy}
    check_stages(gpus_per_tower, stages, **options)
    devices = gpu_devices(gpus, count, gpus_per_tower)
    num_devices = len(devices) if gpus is None else len(device_indices(gpus))
    check_groups(num_devices, gpus_per_tower)
    workers = join_workers()
    towers = num_devices // gpus_per_tower * workers.num_workers if count is None else count
    if gpus is None or len(devices) < num_devices:
        shared = undivided_cpu(workers.most_towers(towers), (gpus, count) != (None, None))
        if shared is not None:
            warnings.warn(shared, stacklevel=2)
    return parallel_on(
        model, devices, towers, gpus_per_tower=gpus_per_tower, stages=stages, **options
    )


def parallel_on(
    model: keras.Model, devices: list[str], towers: int, *, batch_norm: str | None = None,
    strategy: str = "parameter_server", gpus_per_tower: int = 1,
    stages: Sequence[str] | None = None,
) -> keras.Model:
    """`make_parallel`, given the names of the devices and the number of towers."""
    given = model._towers.base.model if isinstance(model, ParallelModel) else model
    is_mirrored = strategy == "mirrored" and not policy_of(devices).shares_memory
    home = devices[0] if is_mirrored else "/cpu:0"
    base = Base(given, {} if model.built else dict(vars(given)), home)
    parallel = _share(
        model, _Towers(
            base, devices, towers, batch_norm, strategy, gpus_per_tower, stages,
            Workers(join_workers()),
        )
    )
    if not is_mirrored:
        hint_gpu_variables(_home(parallel))
    if isinstance(model, ParallelModel):
        parallel.jit_compile = model._towers.jit_compile
    _forget_functions(parallel)
    return parallel


@dataclass
class _Towers:
    """State of a ParallelModel beside the model, hidden from Keras' attribute tracking.

    base: the model that was given; it is the one that builds itself.
    wants_eager: whether it was compiled with run_eagerly=True.
    jit_compile: what Keras made of `compile(jit_compile=)`; it is the towers', not the model's.
    workers: those that call its fit, evaluate and predict together.
    step: made on the first batch after each `compile`.
    own_steps: "train", "test", "predict": those of its class's own, or that gather; made alike.
    newest: the newest batch of each step; if a tower fails, all towers run on that batch again.
    """

    base: Base
    devices: list[str]
    num_towers: int
    batch_norm: str | None
    strategy: str
    gpus_per_tower: int
    stages: Sequence[str] | None
    workers: Workers
    wants_eager: bool = False
    jit_compile: bool = False
    step: TowerStep | None = None
    own_steps: dict[str, OwnStep] = field(default_factory=dict)
    newest: dict[str, NewestBatch] = field(
        default_factory=lambda: {name: NewestBatch() for name in ("train", "test", "predict")}
    )


class ParallelModel(keras.Model):
    """A model whose steps run on towers; made by `make_parallel`, never by its constructor.

    An instance's class derives from this one and from the model's own class, and its attributes are
    the model's: it *is* the model, with other steps and with a `compile` of its own. All else is in
    functions below, whose names cannot be those of a user's attributes.
    """

    _towers: _Towers
    run_eagerly: bool

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles as `keras.Model.compile`."""
        with tf.device(_home(self)):
            super().compile(*args, **kwargs)
        _forget_functions(self)
        if kwargs.get("jit_compile", "auto") == "auto" and len(args) < 8:  # it is the eighth
            towers, (loss, _) = self._towers, losses(self)
            towers.jit_compile |= small_loops(
                towers.base.model, towers.num_towers, loss, towers.batch_norm
            )

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """Trains as `keras.Model.fit`; with a `towers.Resume` among the callbacks it goes on."""
        fit, towers = super().fit, self._towers
        if towers.strategy != "parameter_server":
            fit = with_fresh_copies(fit, lambda: getattr(self._towers.step, "strategy", None))
        try:
            with watching(given_callbacks(args, kwargs), towers.devices, towers.num_towers):
                if is_resumed(args, kwargs):
                    made = {
                        "num_towers": towers.num_towers,
                        "batch_norm": towers.batch_norm or "average",
                    }
                    history = resumed_fit(
                        self, fit, fit_arguments(*args, **kwargs), identity=made,
                        prepare=functools.partial(_prepare_training, self),
                    )
                else:
                    history = fit(*args, **kwargs)
            towers.workers.barrier()
            return history
        finally:
            let_go(self.train_function)
            if self._towers.step is not None:
                self._towers.step.strategy.trust(False)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates as `keras.Model.evaluate`."""
        values = super().evaluate(*args, **kwargs)
        self._towers.workers.barrier()
        return values

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predicts as `keras.Model.predict`."""
        outputs = super().predict(*args, **kwargs)
        self._towers.workers.barrier()
        return outputs

    def train_step(self, data: Any) -> dict[str, tf.Tensor]:
        """One synchronous update, or what the model's own does; called by Keras' loop."""
        own = _own_step(self, "train")
        if own is not None:
            with tf.control_dependencies(self._towers.newest["train"].keep(data)):
                return own(data)
        return _update(self, *keras.utils.unpack_x_y_sample_weight(data))

    def test_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Loss and metrics of one global batch; called by Keras' loop."""
        own = _own_step(self, "test")
        if own is not None:
            with tf.control_dependencies(self._towers.newest["test"].keep(data)):
                return own(data)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.control_dependencies(self._towers.newest["test"].keep(x, y, sample_weight)):
            loss, y_pred = _step(self, "test", x).infer("test", (x, y, sample_weight))
        with tf.device(_home(self)), tf.control_dependencies([loss]):
            track_losses(self, x, y, y_pred, sample_weight, training=False)
            return update_metrics(self, loss, x, y, y_pred, sample_weight)

    def predict_step(self, data: Any) -> Any:
        """The outputs for one global batch; called by Keras' loop."""
        own = _own_step(self, "predict")
        if own is not None:
            with tf.control_dependencies(self._towers.newest["predict"].keep(data)):
                return own(data)
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.control_dependencies(self._towers.newest["predict"].keep(x, None, None)):
            return _step(self, "predict", x).infer("predict", (x, None, None))[1]

    def make_train_function(self, force: bool = False) -> None:
        """Keras' function, which first makes variables."""
        _make_function(self, "train", super().make_train_function, force)

    def make_test_function(self, force: bool = False) -> None:
        """Keras' function, which first makes variables."""
        _make_function(self, "test", super().make_test_function, force)

    def make_predict_function(self, force: bool = False) -> None:
        """Keras' function, which first makes variables."""
        _make_function(self, "predict", super().make_predict_function, force)

    def __repr__(self) -> str:
        """Shows the plain model's own text, the number of towers and their devices."""
        towers = self._towers
        where = f"{towers.num_towers} {plural('tower', towers.num_towers)}"
        return f"<parallel {super().__repr__()}: {where} on {', '.join(towers.devices)}>"

    def __reduce__(self) -> Any:
        """Pickles, and copies, as the plain model."""
        warnings.warn(
            f"a copy or a pickle of parallel model {self.name!r} is the plain model: its fit runs "
            "on one device. Call towers.make_parallel on it to train it on towers.",
            stacklevel=2,
        )
        plain = object.__new__(self.__class__)
        plain.__dict__.update(vars(self))
        return plain.__reduce__()


def _share(model: keras.Model, towers: _Towers) -> ParallelModel:
    """A ParallelModel with the attributes of `model`: the same layers, variables, trackers."""
    plain = model.__class__  # of a parallel model, too, the plain model's class

    def fill(namespace: dict[str, Any]) -> None:
        namespace["__module__"] = plain.__module__
        # Keras writes `model.__class__` into files and clones by it: this makes both plain.
        namespace["__class__"] = property(lambda self: plain)

    made = types.new_class(plain.__name__, (ParallelModel, plain), exec_body=fill)
    parallel: ParallelModel = object.__new__(made)
    parallel.__dict__.update(vars(model))
    # Not through setattr, which would track what `towers` holds as parts of the model.
    parallel.__dict__["_towers"] = towers
    if not model.built:

        @functools.wraps(towers.base.model.build)
        def build_it(*args: Any, **kwargs: Any) -> None:
            towers.base.model.build(*args, **kwargs)
            take_over(parallel, towers.base)

        parallel.__dict__["build"] = build_it
    return parallel


# What is made on the first batch.


def _make_function(model: ParallelModel, name: str, make: Callable, force: bool) -> None:
    """Lets Keras make its function, to begin with `_make_variables`."""
    attribute = f"{name}_function"
    before = getattr(model, attribute)
    if force:  # by whoever has changed the model, or its optimizer, since `compile`
        model._towers.step, model._towers.own_steps = None, {}
    make(force)
    function = getattr(model, attribute)
    if function is before:
        return

    def call(data: Any) -> Any:
        with watched(join_workers(), f"a {name} step"), readable(), first_error(
            functools.partial(_run_in_turn, model, name)
        ):
            return function(data)

    def first_call(data: Any) -> Any:
        preparing = hang.within(f"the first {name} step's making", is_patient=True)
        with preparing, explained(model.name, model._towers.wants_eager):
            data = _make_variables(model, name, data)
            setattr(model, attribute, call)
            if name == "train" and _own_step(model, name) is None and has_use(
                model._towers.step, model.steps_per_execution, data
            ):
                step = _track_outputs(model, data.element_spec)
                setattr(model, attribute, PlacedBatches(step, functools.partial(_update, model)))
            return getattr(model, attribute)(data)

    setattr(model, attribute, first_call)


def _run_in_turn(model: ParallelModel, name: str) -> None:
    """Runs the towers on the newest batch, one after the other: the first error is raised."""
    batch, step = model._towers.newest[name].read(), model._towers.step
    if batch is None:
        return
    own = model._towers.own_steps.get(name)
    if own is not None:
        before = [(variable, variable.numpy()) for variable in own.variables]
        try:
            own(*batch)
        finally:
            for variable, value in before:
                variable.assign(value)
    elif step is not None:
        run_in_turn(step, name, *batch)


def _update(
    model: ParallelModel, x: Any, y: Any = None, sample_weight: Any = None, placed: Any = None
) -> dict[str, tf.Tensor]:
    """One update of the towers, and Keras' metrics; `placed`: as of `TowerStep.train_batch`."""
    step = _step(model, "train", x)
    with tf.control_dependencies(model._towers.newest["train"].keep(x, y, sample_weight)):
        computed = step.compute((x, y, sample_weight), placed)
        y_pred = computed.predictions
        with tf.device(_home(model)):
            track_losses(model, x, y, y_pred, sample_weight, training=True)
        loss = step.update(computed)
    with tf.device(_home(model)), tf.control_dependencies([loss]):
        return update_metrics(model, loss, x, y, y_pred, sample_weight)


def _make_variables(model: ParallelModel, name: str, data: Any) -> Any:
    """Makes what Keras would make in the graph: with variables made in it, it is traced twice.

    Args:
        model: the parallel model.
        name: "train", "test" or "predict".
        data: what Keras gives its function: an iterator over batches, or a list of them.

    Returns:
        The same data, for the function.
    """
    if isinstance(data, tf.data.Iterator):
        batch = data.element_spec
    elif isinstance(data, list):
        batch = data[0]
    else:
        batch = next(data)
        data = itertools.chain([batch], data)
    check_arrays(*keras.utils.unpack_x_y_sample_weight(batch))
    batch = batch_specs(batch)
    own = _own_step(model, name)
    if own is None:
        try:
            _trace_ahead(model, name, *keras.utils.unpack_x_y_sample_weight(batch))
        except NeedsOtherTowers:  # Keras' own step, then, as if the model's class had written it
            own = _add_own_step(model, name)
    if own is not None:
        own.prepare(batch)
        model._towers.newest[name].prepare(batch)
    else:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        rest = (None, None) if name == "predict" else (y, sample_weight)
        model._towers.newest[name].prepare(x, *rest)
    return data


def _prepare_training(model: ParallelModel, specs: Any) -> list[keras.Variable]:
    """Makes all variables for batches of these specs; returns those that Keras may not list."""
    _make_variables(model, "train", [specs])
    own = _own_step(model, "train")
    if (own or _step(model, "train", specs)).has_unsaved_noise:
        warnings.warn(UNSAVED_NOISE, stacklevel=2)
    if own is not None:
        return own.variables
    return _track_outputs(model, specs).met_variables


def _track_outputs(model: ParallelModel, specs: Any) -> TowerStep:
    """Makes the means of several outputs' losses; returns the step that trains."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch_specs(specs))
    step = _step(model, "train", x)
    y_pred = step.trace_tower("train", x, y, sample_weight)
    track_outputs(model, step.home, y, y_pred)
    return step


def _trace_ahead(model: ParallelModel, name: str, x: Any, y: Any, sample_weight: Any) -> None:
    """Traces the tower, for whose outputs the metrics are then made."""
    if name == "predict":  # which has no metrics, and passes over labels
        y = sample_weight = None
    else:
        build_loss(model, model._towers.base, x, y, sample_weight)
    step = _step(model, name, x)
    step.check_agreement()
    y_pred = step.trace_tower(name, x, y, sample_weight)
    metrics = None if name == "predict" else loss_internals.compiled_metrics(model)
    if metrics is not None and not metrics.built:
        with tf.device(step.home):
            metrics.build(y, y_pred)


def _step(model: ParallelModel, name: str, x: Any) -> TowerStep:
    """The TowerStep; made outside of the graph, where Keras is tracing one.

    One that `predict` or `evaluate` made does not train: layers may have been frozen since then.
    """
    step = model._towers.step
    if step is None or name == "train" and step.optimizer is not model.optimizer:
        with tf.init_scope():
            build(model, model._towers.base, x)
            step = model._towers.step = _make_step(model, name)
    return step


def _own_step(model: ParallelModel, name: str) -> OwnStep | None:
    """The runner of a step of the class's own, or one that gathers; None: `TowerStep` runs it."""
    towers = model._towers
    if overrides(model, f"{name}_step") and name not in towers.own_steps:
        _add_own_step(model, name)
    return towers.own_steps.get(name)


def _add_own_step(model: ParallelModel, name: str) -> OwnStep:
    towers = model._towers
    if towers.strategy != "parameter_server" or towers.gpus_per_tower > 1:
        raise ValueError(
            f"model {model.name!r} needs the rows of all towers: it has a custom {name}_step, "
            "calls towers.gather, or has a loss that is neither a mean nor a sum over examples. "
            "Use strategy='parameter_server' and gpus_per_tower=1."
        )
    where = towers.devices, towers.num_towers, towers.batch_norm
    return towers.own_steps.setdefault(name, OwnStep(model, f"{name}_step", *where))


def _make_step(model: ParallelModel, name: str) -> TowerStep:
    loss, loss_weights = losses(model)
    return TowerStep(
        model,
        model.optimizer if name == "train" else "sgd",  # which is never called
        loss,
        loss_weights=loss_weights,
        devices=model._towers.devices,
        num_towers=model._towers.num_towers,
        batch_norm=model._towers.batch_norm,
        strategy=model._towers.strategy,
        gpus_per_tower=model._towers.gpus_per_tower,
        stages=model._towers.stages,
        jit_compile=model._towers.jit_compile and model._towers.gpus_per_tower == 1,
    )


# What a step is made of beside the towers.


def _home(model: ParallelModel) -> str:
    return state_lib.variables_device(model) if model.built else model._towers.base.home


def _forget_functions(model: ParallelModel) -> None:
    """Drops what belongs to an earlier `compile`, and the options that towers cannot follow."""
    model._towers.wants_eager = bool(model.run_eagerly)
    if model.run_eagerly:
        warnings.warn(
            f"run_eagerly=True has no effect on parallel model {model.name!r}: towers are "
            "graphs. Debug the model itself, on one device.",
            stacklevel=3,
        )
    model.run_eagerly = False
    towers = model._towers
    towers.jit_compile = follows_keras(model, towers.devices, towers.num_towers, towers.batch_norm)
    model.jit_compile = False  # around the whole step, XLA would put all towers on one device
    model.train_function = model.test_function = model.predict_function = None
    model._towers.step, model._towers.own_steps = None, {}
