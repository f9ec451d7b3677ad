"""make_parallel runs any Keras model on towers, with Keras' compile, fit, evaluate and predict.

parallel.fit            Keras' loop, callbacks and data adapters
    train_step          Keras' own or a custom one, traced once for the whole batch
        DividedStep     the trace, divided among towers; one update
"""

import functools
import types
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import keras
import tensorflow as tf

from towers.machine.argument_names import names_checked
from towers.machine.devices import HOST, is_gpu, policy_of
from towers.machine.gpus import as_integer, device_indices, gpu_devices
from towers.machine.logical import undivided_cpu
from towers.machine.user_lines import warn_user
from towers.machine.words import plural
from towers.parallel.fresh_copies import with_fresh_copies
from towers.parallel.fit_options import HangTimeout, NoiseScale
from towers.parallel.model_state import (
    STATE,
    Towers,
    drop_iterator,
    forget_functions,
    parameter_device_of,
    take_over,
    towers_of,
)
from towers.parallel.model_steps import PlacedBatches, make_function, prepare_training, run_step
from towers.resume.resume import Resume, only_one
from towers.resume.resumed_fit import fit_arguments, resumed_fit
from towers.step import checks
from towers.step.compiled import COMPILED
from towers.step.placement import Placement
from towers.step.structures import Structure
from towers.step.xla import FullBatch
from towers.workers.workers import join_workers
from towers.workers.written_files import check_writers


@names_checked
def make_parallel(
    model: keras.Model,
    gpus: int | Sequence[int] | None = None,
    *,
    num_towers: int | None = None,
    batch_norm: str | None = None,
    strategy: str = "parameter_server",
    gpus_per_tower: int = 1,
    stages: Sequence[str] | None = None,
    towers_per_device: Sequence[int] | None = None,
    add_on: str = "auto",
) -> keras.Model:
    """Returns the model with a fit, evaluate and predict that run on towers.

    ```python
    parallel = towers.make_parallel(model, 8)
    parallel.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    parallel.fit(x, y, batch_size=1024)
    parallel.save("model.keras")  # the plain model
    ```

    The parallel model has the layers and variables of `model`, so training one changes both.
    `save`, `export` and `clone_model` write the plain model. If `model` is compiled, the parallel
    model is compiled with the same arguments. `batch_size` is the global batch. `run_eagerly` has
    no effect. `jit_compile` compiles the towers, except in a custom `train_step`. To turn XLA off,
    compile the parallel model: Keras does not tell "auto" and False apart in a compiled model.

    A custom `train_step`, `test_step` or `predict_step` is traced for the whole batch, as on one
    device, and its operations are divided among towers.

    With several workers, each worker makes the same model and passes it the same global batches.

    Args:
        model: any Keras 3 model. A model that is not built is built on the CPU, by the first batch.
        gpus: a number of GPUs, or a list of device indices such as [0, 2, 4]. Default: all GPUs.
            The other GPUs are hidden from TensorFlow, so that their memory stays free. Without
            GPUs, towers run on the logical CPU devices that `logical_cpus` makes. If TensorFlow
            started with one CPU device, all towers share it, with a warning.
        num_towers: the number of towers of all workers together. Default: one for each device, or
            for each `gpus_per_tower` devices.
        batch_norm: "synchronized", "average" or "tower0", see `TowerStep`. Default: "synchronized",
            the mean and variance of the whole batch.
        strategy: "parameter_server" keeps the parameters on the CPU. "mirrored" keeps a copy on
            each device. With "sharded", each device also owns some of the parameters: it alone
            updates them and holds their slots.
        gpus_per_tower: the number of devices that share the layers of one tower.
        stages: with `gpus_per_tower`, the names of the layers that begin the second and later
            stages. Default: stages are balanced by bytes.
        towers_per_device: the number of towers on each device, such as [3, 1], see `TowerStep`.
            Default: equal numbers.
        add_on: "auto", or "cpu" if no device may send to another one, see `TowerStep`.

    Raises:
        ValueError: towers cannot compute the model, or an argument is wrong.
    """
    _check_model(model)
    placement = Placement(
        strategy, gpus_per_tower, stages, batch_norm or "synchronized", towers_per_device, add_on
    )
    count = _checked_count(num_towers)
    devices = gpu_devices(gpus, count or sum(towers_per_device or ()) or None, gpus_per_tower)
    num_devices = len(devices) if gpus is None else len(device_indices(gpus))
    num_groups, workers = placement.num_groups(num_devices), join_workers()
    towers = count or placement.num_towers(num_groups) * workers.num_workers
    # Towers on one device are usual if they were asked for, and a mistake on an undivided CPU.
    if gpus is None or len(devices) < num_devices:
        most, is_chosen = workers.most_towers(towers), (gpus, count) != (None, None)
        if shared := undivided_cpu(most, is_chosen):
            warn_user(shared)
    return parallel_on(model, devices, towers, placement)


def _checked_count(num_towers: int | None) -> int | None:
    """Returns the number of towers as an int; raises ValueError if it is none of at least 1."""
    count = None if num_towers is None else as_integer(num_towers)
    if num_towers is not None and (count is None or count < 1):
        raise ValueError(f"num_towers ({num_towers!r}) must be an integer of at least 1.")
    return count


def _check_model(model: keras.Model) -> None:
    """Raises ValueError if `model` is not a keras.Model, or if towers cannot run its steps."""
    if not isinstance(model, keras.Model):
        raise ValueError(f"model ({model!r}) must be a keras.Model.")
    for name in ("train_step", "test_step", "predict_step"):
        if name in vars(model):
            raise ValueError(
                f"model {model.name!r} has a {name} that was set on the instance: define it in a "
                f"class: class Own({model.__class__.__name__}): def {name}(self, data): ..."
            )
    with tf.Graph().as_default():  # a new graph has the default strategy
        is_distributed = model.distribute_strategy is not tf.distribute.get_strategy()
    if is_distributed:
        raise ValueError(
            f"model {model.name!r} was made in the scope of a tf.distribute strategy, which "
            "divides batches itself. Make the model outside of it."
        )
    if model.built:
        checks.check_model(model)


def _build_of(plain_model: keras.Model, parallel: "ParallelModel") -> Callable[..., None]:
    """Returns the `build` of a parallel model, which builds the plain one."""

    @functools.wraps(plain_model.build)
    def build(*args: object, **kwargs: object) -> None:
        plain_model.build(*args, **kwargs)
        take_over(parallel)

    return build


def parallel_on(
    model: keras.Model, devices: list[str], num_towers: int, placement: Placement, *,
    own_rows: bool = False, full_batch: FullBatch | None = None,
) -> keras.Model:  # fmt: skip
    """Returns the parallel model for these devices; own_rows: an argument of `TowerStep`."""
    is_parallel = isinstance(model, ParallelModel)
    plain_model, plain = towers_of(model).plain if is_parallel else model, model.__class__
    is_mirrored = placement.makes_copies(policy_of(devices))
    towers = Towers(
        plain_model,
        {} if model.built else dict(vars(plain_model)),
        devices[0] if is_mirrored else HOST,
        devices,
        num_towers,
        placement,
        own_rows,
        full_batch=full_batch or FullBatch(),
    )

    def fill(namespace: dict[str, object]) -> None:
        namespace["__module__"] = plain.__module__
        # Keras writes `model.__class__` into files and uses it to clone: both become plain models.
        namespace["__class__"] = property(lambda self: plain)

    made = types.new_class(plain.__name__, (ParallelModel, plain), exec_body=fill)
    parallel: ParallelModel = object.__new__(made)
    # setattr would make Keras track the content of `towers` as parts of the model.
    parallel.__dict__.update({**vars(model), STATE: towers})
    if not model.built:
        parallel.__dict__["build"] = _build_of(plain_model, parallel)
    device = parameter_device_of(parallel)
    if not is_mirrored and is_gpu(device):
        warn_user(
            f"the model's variables are on {device} and stay there: that device also averages and "
            "updates. Make the model under `with tf.device('/cpu:0'):` to have them on the CPU.",
        )
    if is_parallel:
        towers.jit_compile = towers_of(model).jit_compile
    forget_functions(parallel)
    return parallel


class ParallelModel(keras.Model):
    """A model whose steps run on towers. `make_parallel` makes it, never its constructor.

    Its instances also derive from the plain model's class and have its attributes. This class
    replaces only Keras' methods, so that no name clashes with a user's attributes.
    """

    run_eagerly: bool

    def compile(self, *args: object, **kwargs: object) -> None:
        """Compiles like `keras.Model.compile`."""
        with tf.device(parameter_device_of(self)):
            super().compile(*args, **kwargs)
        forget_functions(self)
        is_auto = kwargs.get("jit_compile", "auto") == "auto" and len(args) < 8  # 8th argument
        # COMPILED would take False for the value of "auto", which a plain model cannot tell apart.
        told = COMPILED if self.jit_compile else False
        towers_of(self).jit_compile = "auto" if is_auto else told

    def fit(self, *args: object, **kwargs: object) -> keras.callbacks.History:
        """Trains like `keras.Model.fit`. With a `towers.Resume` callback, it can resume."""
        fit, towers = super().fit, towers_of(self)
        if towers.placement.makes_copies(policy_of(towers.devices)):
            fit = with_fresh_copies(fit, towers)
        callbacks = args[5] if len(args) > 5 else kwargs.get("callbacks")  # 6th argument
        check_writers(towers.workers, callbacks)
        resume, timeout = only_one(Resume, callbacks), only_one(HangTimeout, callbacks)
        noise_scale = only_one(NoiseScale, callbacks) is not None
        if noise_scale != towers.noise_scale:
            towers.noise_scale = noise_scale
            forget_functions(self)
        watch = timeout.watch(towers.devices, towers.num_towers) if timeout else nullcontext()
        try:
            with watch, towers.full_batch.first_of("train"):
                if resume is None:
                    history = fit(*args, **kwargs)
                else:
                    history = resumed_fit(
                        self,
                        fit,
                        resume,
                        fit_arguments(*args, **kwargs),
                        identity={
                            "num_towers": towers.num_towers,
                            "batch_norm": towers.placement.batch_norm,
                        },
                        prepare=functools.partial(prepare_training, self),
                        full_batch=towers.full_batch.sizes["train"],
                    )
            towers.workers.barrier()
            return history
        finally:
            if isinstance(self.train_function, PlacedBatches):
                self.train_function.close()
            drop_iterator(self, "train")
            towers.copies.trust(False)

    def reset_metrics(self) -> None:
        """Resets the metrics, as Keras does before each epoch, and the noise scale."""
        super().reset_metrics()
        if (measuring := towers_of(self).measuring) is not None:
            measuring.noise.reset_state()

    def evaluate(self, *args: object, **kwargs: object) -> float | list[float] | dict[str, float]:
        """Evaluates like `keras.Model.evaluate`."""
        with towers_of(self).full_batch.first_of("test"):
            values = super().evaluate(*args, **kwargs)
        drop_iterator(self, "test")
        towers_of(self).workers.barrier()
        return values

    def predict(self, *args: object, **kwargs: object) -> Any:
        """Predicts like `keras.Model.predict`."""
        with towers_of(self).full_batch.first_of("predict"):
            outputs = super().predict(*args, **kwargs)
        towers_of(self).workers.barrier()
        return outputs

    def train_step(self, data: Structure) -> dict[str, tf.Tensor]:
        """Makes one step on a global batch, as the model's class defines it; Keras calls it."""
        return run_step(self, "train", data)  # type: ignore[no-any-return]

    def test_step(self, data: Structure) -> dict[str, tf.Tensor]:
        """Returns the loss and metrics after one global batch. Keras' loop calls it."""
        return run_step(self, "test", data)  # type: ignore[no-any-return]

    def predict_step(self, data: Structure) -> Structure:
        """Returns the outputs for one global batch. Keras' loop calls it."""
        return run_step(self, "predict", data)

    def make_train_function(self, force: bool = False) -> None:
        """Makes Keras' train function, whose first call creates all variables."""
        make_function(self, "train", super().make_train_function, force)

    def make_test_function(self, force: bool = False) -> None:
        """Makes Keras' test function, whose first call creates all variables."""
        make_function(self, "test", super().make_test_function, force)

    def make_predict_function(self, force: bool = False) -> None:
        """Makes Keras' predict function, whose first call creates all variables."""
        make_function(self, "predict", super().make_predict_function, force)

    def __repr__(self) -> str:
        """Returns the text of the plain model, the number of towers and their devices."""
        towers = towers_of(self)
        where = f"{towers.num_towers} {plural('tower', towers.num_towers)}"
        return f"<parallel {super().__repr__()}: {where} on {', '.join(towers.devices)}>"

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles or copies the plain model."""
        warn_user(
            f"a copy or a pickle of parallel model {self.name!r} is the plain model: its fit runs "
            "on one device. Call towers.make_parallel on it to train it on towers.",
        )
        plain = object.__new__(self.__class__)
        plain.__dict__.update(vars(self))
        return plain.__reduce__()
