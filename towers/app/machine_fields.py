"""Declares the fields of TrainConfig that say what is trained, and on which devices."""

import dataclasses
import re

from towers.app.fields import Role, choice, code, count, number, path, switch, text, value_error
from towers.machine import choices

AUTO = "auto"
# Larger numbers would lead to computations that never end or cannot start.
_MOST_DEVICES, _MOST_TOWERS = 1024, 65_536
_LONGEST_WAIT = 1_000_000  # seconds; the system's limit is not much higher
ON_THE_MACHINE = Role.FREE | Role.LOCAL


def _check_image_size(name: str, value: str) -> None:
    if not re.fullmatch(r"[1-9][0-9]{0,4}x[1-9][0-9]{0,4}(x[13])?", value):
        raise value_error(
            name,
            value,
            "HEIGHTxWIDTH, each from 1 to 99999, or HEIGHTxWIDTHxCHANNELS, 1 (gray) "
            "or 3 (color), such as 224x224x3",
        )


def _check_counts(name: str, value: str) -> None:
    if value != AUTO and not re.fullmatch(r"[1-9][0-9]{0,3}(,[1-9][0-9]{0,3})*", value):
        raise value_error(name, value, "auto, or a number of towers for each device, such as 3,1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MachineFields:
    """Holds the model, the data, the devices, the towers and the batch."""

    # Model and data.
    model: str = code(
        "cnn",
        "The model: a built-in one (cnn, notebook_cnn, mlp, gru, gru_large, "
        "lstm, lstm_large, resnet, resnet20, resnet56, resnet50), FILE.keras, which is trained "
        "further, or package.module:function, called with (input_shape, num_classes) or without "
        "arguments. A compiled model brings its own loss, metrics and optimizer.",
        is_path=True,
    )
    dataset: str = code(
        "mnist",
        "The data: a built-in data set (mnist, fashion_mnist, cifar10, "
        "music, image_folder, npz, synthetic), or package.module:function, which returns "
        "(train, test).",
    )
    data_dir: str | None = path(
        None,
        "The directory of the data set's files; for npz, the file. Beside `resume`, the place to "
        "which the same data have moved. Default: the data set's own place.",
        ON_THE_MACHINE,
    )
    image_size: str | None = text(
        None,
        "The size of image_folder's images: HEIGHTxWIDTH or HEIGHTxWIDTHxCHANNELS, such as "
        "224x224x3. Default: the most frequent size.",
        check=_check_image_size,
    )
    data_workers: int = count(
        0,
        "The number of processes that read a source with __len__ and __getitem__; 0 uses a thread "
        "of this process. Results do not depend on it.",
        ON_THE_MACHINE,
        at_least=0,
        at_most=1024,
    )
    shuffle_buffer: int = count(
        10_000,
        "The number of examples among which a tf.data.Dataset is shuffled if it does not fit into "
        "memory.",
    )
    augment: str | None = code(
        None,
        "Random changes of each training example: crop_flip, or "
        "package.module:function, which takes (x, seed) and returns x, or takes nothing and "
        "returns a Keras layer. Default: none.",
    )

    # Devices, towers and batch.
    num_gpus: int | None = count(
        None,
        "The number of devices that run towers. With a fixed "
        "`num_towers`, results do not depend on it. Default: all GPUs; without GPUs, one logical "
        "CPU device for each core.",
        ON_THE_MACHINE | Role.BEGINNING,
        at_most=_MOST_DEVICES,
    )
    logical_gpus: int | None = count(
        None,
        "The number of logical GPUs, of equal memory, into which the GPUs are divided. It "
        "simulates a larger machine, but not its speed. Default: GPUs are not divided.",
        ON_THE_MACHINE | Role.BEGINNING,
        at_most=_MOST_DEVICES,
    )
    num_towers: int | str | None = count(
        None,
        "The number of towers over all devices. It defines the run: a fixed number gives "
        "bit-identical results on any number of devices. auto doubles the number until the first "
        "step fits into memory. Default: one for each device.",
        Role.BEGINNING,
        at_most=_MOST_TOWERS,
        word=AUTO,
    )
    accumulate: int | None = count(
        None,
        "The number of towers on each device, computed one after "
        "the other, instead of `num_towers`. A device then needs memory for one tower's share of "
        "the batch. Default: 1.",
        Role.BEGINNING,
        at_most=1024,
    )
    towers_per_device: str | None = text(
        None,
        "The number of towers on each device, such as 3,1 if the first is three times as fast. "
        "Results depend on their sum alone. auto spreads `num_towers` by the measured seconds of "
        "a tower on each device. Default: equal numbers.",
        ON_THE_MACHINE | Role.BEGINNING,
        check=_check_counts,
    )
    device: str = choice(
        AUTO,
        (AUTO, "gpu", "cpu"),
        "The kind of device that runs towers. auto takes GPUs if there are any.",
        ON_THE_MACHINE | Role.BEGINNING,
    )
    variable_device: str = choice(
        "cpu",
        ("cpu", "gpu"),
        "The device that holds and updates the parameters: /cpu:0 or /gpu:0.",
    )
    strategy: str = choice(
        "parameter_server",
        tuple(choices.STRATEGIES),
        "The place of the parameters. parameter_server: `variable_device` alone. mirrored: a copy "
        "of them and of the optimizer's state on each GPU. sharded: a copy of them on each GPU, "
        "while the GPUs divide the update and the optimizer's state. mirrored and sharded give "
        "the results of `variable_device`=gpu.",
        Role.FREE,
        refused={choices.ASYNC: choices.ASYNC_REFUSED},
    )
    add_on: str = choice(
        "auto",
        choices.ADD_ON,
        "The devices that add the towers' gradients. auto adds on GPUs if towers run there. cpu "
        "adds on the CPU alone, which helps if a link between GPUs fails. Both give the same "
        "bits, except in sums of denormal numbers.",
        ON_THE_MACHINE,
    )
    gpus_per_tower: int = count(
        1,
        "The number of GPUs that share the layers of each tower, in as many stages, for a model "
        "that does not fit into one GPU. With `accumulate`=8, 8 towers use them in a pipeline.",
        Role.FREE | Role.BEGINNING,
        at_most=_MOST_DEVICES,
    )
    stages: str | None = text(
        None,
        "With `gpus_per_tower`, the names of the layers that begin the "
        "second and later stages: NAME,NAME. `plan` shows the stages. Default: towers "
        "balances the bytes of parameters and outputs.",
        Role.FREE | Role.BEGINNING,
    )
    batch_size: int | None = count(
        None, "Global batch: the number of examples of one update, over all towers. Default: 128."
    )
    batch_size_per_gpu: int | None = count(
        None,
        "The number of examples of one update on each "
        "device, instead of `batch_size`. Default: `batch_size` divided among the towers.",
    )
    jit_compile: bool | str = switch(
        AUTO,
        "Compiles each tower with XLA, which starts more slowly and is mostly faster on GPUs. "
        "auto follows Keras on GPUs: XLA compiles if every layer supports it, or as a compiled "
        "model says. On CPUs, auto compiles small recurrent models.",
        word=AUTO,
    )
    cpu_threads: int | None = count(
        None,
        "The number of threads of each operation on a CPU. They "
        "change the last bits of the results. Default: the cores divided among the towers.",
        Role.BEGINNING,
        at_most=65_536,
    )
    worker_timeout: float = number(
        60.0,
        "The seconds without an answer after which a worker counts as lost and all workers stop.",
        Role.FREE,
        at_most=_LONGEST_WAIT,
    )
    hang_timeout: float | str = number(
        AUTO,
        "The seconds without a step, a read batch or a written file after which a run says where "
        "it hangs and ends with exit code 4; 0 means never. auto means 10 times the longest wait "
        "so far, at least 5 minutes.",
        ON_THE_MACHINE,
        at_most=_LONGEST_WAIT,
        word=AUTO,
    )
