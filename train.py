"""Trains a model with synchronous data parallelism: one tower for each GPU, one update on the CPU.

    python train.py --num_gpus=8 --batch_size=128

Every flag has a default. A machine without GPUs runs the same command on logical CPU devices.
"""

import dataclasses
import sys
from contextlib import closing, nullcontext
from typing import Any

from absl import flags

import towers
from towers import command_line
from towers.config import TrainConfig
from towers.machine import terminal
from towers.saving.resume import continued_config


def define_flags() -> None:
    """One flag for each field of TrainConfig, with the field's default."""
    string, integer, choice = flags.DEFINE_string, flags.DEFINE_integer, flags.DEFINE_enum
    default = {field.name: field.default for field in dataclasses.fields(TrainConfig)}

    def define(kind: Any, name: str, *arguments: Any, **bounds: Any) -> None:
        kind(name, default[name], *arguments, **bounds)

    define(string, "model", "cnn, notebook_cnn, mlp, gru, lstm, resnet, resnet20, resnet56, "
           "resnet50, or package.module:function (input_shape, num_classes) -> a built Keras "
           "model. The default trains in minutes.")
    define(string, "dataset", "mnist, fashion_mnist, cifar10, music, image_folder, npz, "
           "synthetic, array_record, tfrecord, or package.module:function -> (train, test). The "
           "default needs no download.")
    define(string, "data_dir", "Directory of the data set's files; for npz, the file. Default: "
           "the data set's own place.")
    define(string, "features", "Of array_record and tfrecord: package.module:function, one record "
           "-> (x, y). Default: none, for these need one.")
    define(integer, "data_workers", "Processes that read a source with __len__ and __getitem__; "
           "they change no bit. Default: 0, a thread of this process, which needs no copies.")
    define(flags.DEFINE_float, "data_timeout", "Seconds that one example of such a source may "
           "take. The default outlasts a network disk's hiccups.")
    define(integer, "shuffle_buffer", "Examples among which a tf.data.Dataset that memory does not "
           "hold is shuffled; they are held there. More mix better.")
    define(string, "augment", "Change each training example at random: crop_flip, or "
           "package.module:function (x, seed) -> x, or -> a Keras layer. Default: nothing.")
    define(integer, "num_gpus", "Devices that run towers. Default: all GPUs; without any, one "
           "logical CPU device a core.")
    define(integer, "logical_gpus", "Divide the GPUs into so many, of equal memory, to rehearse a "
           "run with fewer: real kernels and copies, not their speed. Default: each is one.")
    define(integer, "num_towers", "Towers, over all devices: what defines the run, whatever the "
           "number of devices. Default: one for each device.")
    define(choice, "device", ["auto", "gpu", "cpu"], "What towers run on. The default takes GPUs "
           "when there are any.")
    define(choice, "variable_device", ["cpu", "gpu"], "Where the parameters live and are updated, "
           "/cpu:0 or /gpu:0. Default: the CPU, which is as near to each GPU as to any other.")
    define(integer, "batch_size", "Global batch: examples of one update, over all towers, so that "
           "the number of GPUs never changes the mathematics. Default: 128, the Keras convnet's.")
    define(integer, "batch_size_per_gpu", "Examples of one update on each device, instead of "
           "--batch_size. Default: --batch_size divided among the towers.")
    define(integer, "epochs", "Passes over the training data; 0 evaluates only. Default: 12, after "
           "which the Keras convnet reaches 0.99 on MNIST.")
    define(integer, "max_steps", "Updates after which the run ends, even in mid-epoch. Default: no "
           "limit.")
    define(string, "optimizer", "A Keras optimizer: adam, sgd, rmsprop, ... Default: the model's "
           "own.")
    define(flags.DEFINE_float, "learning_rate", "Of the one update with the averaged gradient; "
           "independent of the number of towers. Default: the optimizer's own.")
    define(flags.DEFINE_float, "dropout", "Rate of every Dropout layer, 0 for none. Default: the "
           "model's own rates.")
    define(integer, "seed", "Of the parameters, the order of the examples and dropout. The "
           "default is fixed, so that a run can be repeated.")
    define(choice, "precision", ["float32", "mixed_float16", "mixed_bfloat16"], "Keras' dtype "
           "policy, of all towers. The default is exact to float rounding.")
    define(flags.DEFINE_boolean, "deterministic", "Use only kernels that give the same bits twice, "
           "and refuse operations that have none. Off by default: it costs speed on GPUs, and on "
           "CPUs alone the bits are the same without it.")
    define(flags.DEFINE_boolean, "jit_compile", "Compile each tower with XLA. Off by default: it "
           "takes long to start, and mostly pays on GPUs.")
    define(flags.DEFINE_boolean, "inline_towers", "Optimize all towers as one graph: on GPUs, "
           "gradients may leave while the backward pass goes on. Off by default: it starts slower.")
    define(flags.DEFINE_boolean, "pack_transfers", "Move parameters and gradients between devices "
           "as one tensor a dtype. Off by default: it copies every byte once more at both ends.")
    define(flags.DEFINE_boolean, "prefetch_to_devices", "Copy each tower's next shard to its "
           "device while a step runs. Default: on GPUs; a CPU's towers share its memory.")
    define(choice, "batch_norm", ["average", "synchronized", "tower0"], "How the towers' "
           "BatchNormalization statistics become one. The default uses every example.")
    define(string, "run_dir", "Directory of the run: new, or empty. Default: the next free "
           "runs/<model>-<dataset>-001.")
    define(string, "resume", "Directory of a run that goes on: alone, it brings back every flag. "
           "Beside it only --num_gpus, --logical_gpus, --device, --prefetch_to_devices, "
           "--checkpoint_every, --nonfinite, --data_workers, --data_timeout, --tensorboard, "
           "--histograms, or a larger --epochs, --max_steps or --early_stopping.")
    define(integer, "checkpoint_every", "Updates from one checkpoint to the next, beside each "
           "epoch's end. Default: at least one every 10 minutes.")
    define(integer, "cpu_threads", "Threads of each operation on a CPU; they change the last bits "
           "of the results. Default: the cores divided among the towers.")
    define(flags.DEFINE_float, "worker_timeout", "Of several workers: seconds after which one that "
           "does not answer is lost, and the others end.")
    define(choice, "monitor", ["val_accuracy", "val_loss", "accuracy", "loss"], "What makes an "
           "epoch the best, whose model best.keras holds: the lowest loss, the highest accuracy.")
    define(integer, "early_stopping", "Epochs without a better --monitor after which the run ends. "
           "Default: never.")
    define(choice, "nonfinite", ["stop", "skip"], "What a NaN or infinite loss or gradient does: "
           "end the run before the update, or leave that update out and count it.")
    define(flags.DEFINE_boolean, "tensorboard", "Write scalars and the step's graph to "
           "tensorboard/ in the run's directory. Off by default: results.csv and results.png hold "
           "the scalars.")
    define(flags.DEFINE_boolean, "histograms", "With --tensorboard, the parameters' histograms "
           "each epoch. Off by default: they take time and room.")
    define(flags.DEFINE_boolean, "verify_gradients", "Compare the averaged gradient with the "
           "large-batch gradient on the first batch, then train. Off by default: it takes the "
           "memory of a whole global batch on one device.")
    define(flags.DEFINE_boolean, "profile", "Measure the phases of a step, name what bounds it and "
           "what to change; train nothing.")
    define(flags.DEFINE_boolean, "plan", "Print devices, towers, shard sizes and the bytes that "
           "each step moves; train nothing.")
    flags.DEFINE_boolean("devices", False, "Print versions, libraries, GPUs, CPU and the devices "
                         "that towers would get; train nothing.")


def parse_flags(argv: list[str]) -> TrainConfig | None:
    """The configuration that the command line asks for; None where it was --help, now printed.

    Raises:
        ValueError: a flag is unknown, a value makes no sense, or something is no flag.
    """
    if not command_line.parse_flags(argv):
        return None
    fields: list[Any] = [flags.FLAGS[field.name] for field in dataclasses.fields(TrainConfig)]
    if flags.FLAGS.resume:
        given = {flag.name: flag.value for flag in fields if flag.present}
        return continued_config(flags.FLAGS.resume, given)
    values: dict[str, Any] = {flag.name: flag.value for flag in fields}
    return TrainConfig(**values)


def run(config: TrainConfig) -> None:
    """Trains, with libraries' messages in log.txt; on the terminal with --verbosity=1."""
    with nullcontext() if command_line.is_verbose() else terminal.quiet_stderr() as noise:
        if flags.FLAGS.devices:
            show_devices(config)
        else:
            towers.train(config, noise=noise)


def show_devices(config: TrainConfig) -> None:
    """Prints what there is to run on."""
    from towers.machine import environment

    environment.check()  # then the imports that start TensorFlow, whose messages are held back
    from towers.diagnosis.device_report import device_report
    from towers.reporting.report import Report

    with closing(Report()) as out:
        for line in device_report(config):
            out.line(line)


def train(argv: list[str]) -> None:
    """Does what the command line asks for."""
    config = parse_flags(argv)
    if config is not None:
        run(config)


def main(argv: list[str]) -> int:
    """The exit code."""
    define_flags()
    return command_line.exit_code(lambda: train(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
