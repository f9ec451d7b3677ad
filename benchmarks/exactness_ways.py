"""The ways to train on two devices that benchmarks/exactness.py compares with one device.

Each follows the guide of its tool. Keras' backend is chosen before this module is imported.
"""

import json
import multiprocessing
import os
import queue
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

DEVICES = 2
EPOCHS = 2
START_SECONDS = 120.0  # importing Keras and its backend
BACKENDS = {"mirrored": "tensorflow", "ddp": "torch", "jax": "jax", "towers": "tensorflow"}
NOT_OFFERED = "not offered"  # what a way leaves to the user's own code


def measure(
    way: str, cases: Sequence[str] | None = None, limit_of_case: float = 120.0
) -> dict[str, dict[str, Any]]:
    """Trains each case in fresh processes; call it in a fresh interpreter.

    Args:
        way: a key of `BACKENDS`.
        cases: names in `exactness_cases.make_cases`; None for all.
        limit_of_case: seconds after which a case counts as hung.

    Returns:
        By case: {"group": ..., "value": difference, "refused: ERROR", "hung" or "not offered"}.
    """
    os.environ |= {
        "KERAS_BACKEND": BACKENDS[way],
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "JAX_ENABLE_X64": "1",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    context = multiprocessing.get_context("forkserver")
    preload = ["benchmarks.exactness_cases"] + (["towers"] if way == "towers" else [])
    context.set_forkserver_preload(preload)  # each process then starts with Keras imported
    found = {}
    for name, group in _run(context, _list_cases, (), START_SECONDS)[1]:
        if cases is None or name in cases:
            status, value = _run(context, _train, (way, name), limit_of_case)
            found[name] = {"group": group, "value": value if status else f"refused: {value}"}
            if value is None:
                found[name]["value"] = "hung"
    return found


def _run(context: Any, function: Callable, arguments: tuple, limit: float) -> tuple[bool, Any]:
    """Returns (True, the first process's result), (False, an error) or (True, None): too long."""
    num_processes = DEVICES if arguments[:1] == ("ddp",) else 1
    results = context.Queue()
    port = _free_port()
    processes = [
        context.Process(target=_report, args=(results, function, arguments, rank, port))
        for rank in range(num_processes)
    ]
    for process in processes:
        process.start()
    try:
        return _first_answer(processes, results, limit)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _first_answer(processes: Sequence[Any], results: Any, limit: float) -> tuple[bool, Any]:
    end = time.monotonic() + limit
    while time.monotonic() < end:
        try:
            rank, done, value = results.get(timeout=0.5)
        except queue.Empty:
            dead = [process for process in processes if process.exitcode not in (None, 0)]
            if dead and results.empty():
                return False, f"exit code {dead[0].exitcode}"
            continue
        if rank == 0 or not done:
            return done, value
    return True, None


def _report(results: Any, function: Callable, arguments: tuple, rank: int, port: int) -> None:
    import keras

    keras.config.set_floatx("float64")
    try:
        value = (
            function(*arguments) if function is _list_cases else function(*arguments, rank, port)
        )
    except Exception as error:
        text = str(error).replace("\x1b[1m", "").replace("\x1b[0m", "")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        results.put((rank, False, f"{type(error).__name__}: {_telling(lines)}"[:200]))
    else:
        results.put((rank, True, json.loads(json.dumps(value))))
    results.close()
    results.join_thread()
    os._exit(0)


def _telling(lines: Sequence[str]) -> str:
    """Returns the line of an error that says what is wrong, not where."""
    named = [line for line in lines if "Error: " in line]
    told = [
        line for line in lines if not line.startswith(("Exception encountered", "in user code"))
    ]
    return (named or told or [""])[0]


def _free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]


def _list_cases() -> list[tuple[str, str]]:
    from benchmarks import exactness_cases

    return [(name, case.group) for name, case in exactness_cases.make_cases().items()]


def _train(way: str, name: str, rank: int, port: int) -> float | str:
    """Returns the largest difference from one device, or `NOT_OFFERED`."""
    import numpy as np

    from benchmarks import exactness_cases

    if BACKENDS[way] == "tensorflow":
        _simulate_devices()
    case = exactness_cases.make_cases()[name]
    if way == "ddp":
        if case.metrics is not None:
            return NOT_OFFERED
        expected, (found, logs) = _train_ddp(case, rank, port)
    else:
        expected, (found, logs) = {
            "mirrored": _train_mirrored,
            "jax": _train_jax,
            "towers": _train_towers,
        }[way](case)
    largest = max(float(np.max(np.abs(one))) for one in expected[0])
    difference = _difference(expected[0], found, largest)
    return max([difference, *(_difference([a], [b], abs(a)) for a, b in zip(expected[1], logs))])


def _difference(expected: Sequence[Any], found: Sequence[Any], scale: float) -> float:
    """Returns the largest difference of an element, divided by the scale; inf for no number."""
    import numpy as np

    assert len(expected) == len(found) and all(np.isfinite(one).all() for one in expected)
    if not all(np.isfinite(other).all() for other in found):
        return float("inf")
    pairs = zip(expected, found, strict=True)
    return max(float(np.max(np.abs(np.subtract(one, other)))) for one, other in pairs) / scale


def _make_data(case: Any) -> tuple:
    import numpy as np

    return case.batch(case.examples, np.random.default_rng(3))


def _build(case: Any) -> Any:
    import keras

    keras.utils.set_random_seed(5)
    return case.build()


def _fit(case: Any, parallel: Callable = lambda model: model) -> tuple[list, list]:
    """Returns (the weights after `compile` and `fit`, the logs of the last epoch)."""
    import keras

    from benchmarks import exactness_cases

    inner = _build(case)
    model = parallel(inner if case.step is None else _with_step(inner, case.step))
    jit_compile = False if keras.backend.backend() == "tensorflow" else "auto"
    loss = {} if case.step else case.loss
    metrics = case.metrics() if case.metrics else None
    model.compile(_optimizer(case.optimizer), metrics=metrics, jit_compile=jit_compile, **loss)
    x, y, weight = _make_data(case)
    history = model.fit(
        *(x, y),
        sample_weight=weight,
        batch_size=exactness_cases.GLOBAL_BATCH,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
    ).history
    logs = [values[-1] for name, values in sorted(history.items())] if case.metrics else []
    return model.get_weights() if case.step is None else inner.get_weights(), logs


def _optimizer(options: dict[str, Any]) -> Any:
    import keras

    clip, accumulate = options.get("global_clipnorm"), options.get("accumulate")
    sgd = keras.optimizers.SGD(
        0.05, momentum=0.9, global_clipnorm=clip, gradient_accumulation_steps=accumulate
    )
    if "loss_scale" in options:
        return keras.optimizers.LossScaleOptimizer(sgd, initial_scale=options["loss_scale"])
    return sgd


def _with_step(inner: Any, loss_of: Callable) -> Any:
    """Returns a model with a custom `train_step`, as the guide of its backend writes it."""
    import keras

    make = _jax_step if keras.backend.backend() == "jax" else _tensorflow_step
    cls = type("Stepped", (keras.Model,), {"call": _call, "train_step": make(loss_of)})
    model = cls()
    model.inner = inner
    model.build(inner.input_shape)
    return model


def _call(self: Any, x: Any, training: bool = False) -> Any:
    return self.inner(x, training=training)


def _tensorflow_step(loss_of: Callable) -> Callable:
    import tensorflow as tf

    def train_step(model: Any, data: Any) -> dict:
        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss = loss_of(model(x, training=True), x, y)
            # Under a strategy, gradients are added up: TensorFlow's guide divides the loss.
            scaled = loss / tf.distribute.get_strategy().num_replicas_in_sync
        weights = model.trainable_weights
        model.optimizer.apply_gradients(zip(tape.gradient(scaled, weights), weights))
        return {"loss": loss}

    return train_step


def _jax_step(loss_of: Callable) -> Callable:
    import jax

    def train_step(model: Any, state: tuple, data: Any) -> tuple:
        trained, others, slots, metrics = state
        x, y = data[:2]

        def loss_and_updates(trained: Any) -> tuple:
            outputs, updated = model.stateless_call(trained, others, x, training=True)
            return loss_of(outputs, x, y), updated

        compute = jax.value_and_grad(loss_and_updates, has_aux=True)
        (loss, others), gradients = compute(trained)
        trained, slots = model.optimizer.stateless_apply(slots, gradients, trained)
        return {"loss": loss}, (trained, others, slots, metrics)

    return train_step


def _simulate_devices() -> None:
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * DEVICES
    )


def _train_towers(case: Any) -> tuple:
    import towers

    return _fit(case), _fit(case, lambda model: towers.make_parallel(model, DEVICES))


def _train_mirrored(case: Any) -> tuple:
    import tensorflow as tf

    expected = _fit(case)
    with tf.distribute.MirroredStrategy([f"cpu:{i}" for i in range(DEVICES)]).scope():
        return expected, _fit(case)


def _train_jax(case: Any) -> tuple:
    import keras

    expected = _fit(case)
    devices = keras.distribution.list_devices("cpu")
    assert len(devices) == DEVICES
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
    return expected, _fit(case)


def _train_ddp(case: Any, rank: int, port: int) -> tuple:
    import torch
    from torch import distributed

    from benchmarks.exactness_cases import GLOBAL_BATCH

    torch.set_num_threads(1)
    expected = _loop(case, range(case.examples), GLOBAL_BATCH, lambda model: model)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    distributed.init_process_group("gloo", rank=rank, world_size=DEVICES)
    sampler = torch.utils.data.DistributedSampler(
        range(case.examples), num_replicas=DEVICES, rank=rank, shuffle=False
    )
    wrap = torch.nn.parallel.DistributedDataParallel
    found = _loop(case, list(sampler), GLOBAL_BATCH // DEVICES, wrap)
    distributed.barrier()
    return expected, found


def _loop(case: Any, order: Sequence[int], batch_size: int, wrap: Callable) -> tuple[list, list]:
    """Trains by a loop over batches, as Keras' guide to PyTorch does, with the model's own loss."""
    import keras
    import torch

    model = _build(case)
    model.compile(**case.loss)
    trained = wrap(model)
    weights = [one.value for one in model.trainable_variables]
    optimizer = torch.optim.SGD(weights, 0.05, momentum=0.9)
    scale = case.optimizer.get("loss_scale")
    scaler = torch.amp.GradScaler("cpu", scale or 1.0, enabled=scale is not None)
    every = case.optimizer.get("accumulate", 1)
    data = _make_data(case)
    begins = range(0, len(order), batch_size)
    for number, begin in enumerate([*begins] * EPOCHS):
        rows = list(order[begin : begin + batch_size])
        x, y, weight = keras.tree.map_structure(
            lambda one: None if one is None else torch.as_tensor(one[rows]), data
        )
        is_last = number % every == every - 1
        postponed = nullcontext() if is_last or trained is model else trained.no_sync()
        with postponed:
            outputs = trained(x, training=True)
            if case.step is not None:
                loss = case.step(outputs, x, y)
            else:
                loss = model.compute_loss(x, y, outputs, weight)
            scaler.scale(loss / every).backward()
        if is_last:
            if "global_clipnorm" in case.optimizer:
                torch.nn.utils.clip_grad_norm_(weights, case.optimizer["global_clipnorm"])
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return model.get_weights(), []
