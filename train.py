"""Trains a model with synchronous data parallelism: one tower for each GPU, one update on the CPU.

    python train.py --num_gpus=8 --batch_size=128

Every flag has a default. A machine without GPUs runs the same command on logical CPU devices.
"""

import dataclasses
import os
import sys
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

from absl import flags

import towers
from towers import command_line
from towers.after_training.model_files import file_config, find_file
from towers.checkpointing.continued import continued_config, resumed_directory
from towers.config import TrainConfig
from towers.machine import terminal


def define_flags() -> None:
    """One flag for each field of TrainConfig, with the field's default; and commands."""
    default = {field.name: field.default for field in dataclasses.fields(TrainConfig)}

    def define(kind: Any, name: str, *arguments: Any, **bounds: Any) -> None:
        kind(name, default[name], *arguments, **bounds)

    _define_data_flags(define)
    _define_device_flags(define)
    _define_training_flags(define)
    _define_run_flags(define)
    _define_flags_that_look(define)
    _define_flags_after_training(define)


def _define_data_flags(define: Callable[..., None]) -> None:
    """What is trained, and on what."""
    string, integer, number = flags.DEFINE_string, flags.DEFINE_integer, flags.DEFINE_float
    define(string, "model", "cnn, notebook_cnn, mlp, gru, lstm, resnet, resnet20, resnet56, "
           "resnet50; package.module:function (input_shape, num_classes), or without arguments, "
           "-> a Keras model; or FILE.keras, which is trained further. A compiled one brings its "
           "own loss, metrics and optimizer. The default trains in minutes.")
    define(string, "dataset", "mnist, fashion_mnist, cifar10, music, image_folder, npz, "
           "synthetic, array_record, tfrecord, or package.module:function -> (train, test). The "
           "default needs no download.")
    define(string, "data_dir", "Directory of the data set's files; for npz, the file. Default: "
           "the data set's own place.")
    define(string, "image_size", "Of image_folder: HEIGHTxWIDTH or HEIGHTxWIDTHxCHANNELS, such as "
           "224x224x3, of all images. Default: what most of those to train on have.")
    define(string, "features", "Of array_record and tfrecord: package.module:function, one record "
           "-> (x, y). Default: none, for these need one.")
    define(integer, "data_workers", "Processes that read a source with __len__ and __getitem__; "
           "they change no bit. Default: 0, a thread of this process, which needs no copies.")
    define(number, "data_timeout", "Seconds that one example of such a source may "
           "take. The default outlasts a network disk's hiccups.")
    define(integer, "shuffle_buffer", "Examples among which a tf.data.Dataset that memory does not "
           "hold is shuffled; they are held there. More mix better.")
    define(string, "augment", "Change each training example at random: crop_flip, or "
           "package.module:function (x, seed) -> x, or -> a Keras layer. Default: nothing.")


def _define_device_flags(define: Callable[..., None]) -> None:
    """What runs where."""
    integer = flags.DEFINE_integer
    choice = flags.DEFINE_enum
    number = flags.DEFINE_float
    switch = flags.DEFINE_boolean
    define(integer, "num_gpus", "Devices that run towers. Default: all GPUs; without any, one "
           "logical CPU device a core.")
    define(integer, "logical_gpus", "Divide the GPUs into so many, of equal memory, to rehearse a "
           "run with fewer: real kernels and copies, not their speed. Default: each is one.")
    define(command_line.DEFINE_count_or_auto, "num_towers", "Towers, over all devices: what "
           "defines the run, whatever the number of devices. auto: one for each device, or 2, 4 "
           "..., until a step fits into its memory. Default: one for each device.")
    define(integer, "accumulate", "Towers on each device, computed one after the other, in place "
           "of --num_towers: the gradient of a batch that needs so many times the memory. Default: "
           "one.")
    define(choice, "device", ["auto", "gpu", "cpu"], "What towers run on. The default takes GPUs "
           "when there are any.")
    define(choice, "variable_device", ["cpu", "gpu"], "Where the parameters live and are updated, "
           "/cpu:0 or /gpu:0. Default: the CPU, which is as near to each GPU as to any other.")
    define(integer, "batch_size", "Global batch: examples of one update, over all towers, so that "
           "the number of GPUs never changes the mathematics. Default: 128, the Keras convnet's.")
    define(integer, "batch_size_per_gpu", "Examples of one update on each device, instead of "
           "--batch_size. Default: --batch_size divided among the towers.")
    define(switch, "prefetch_to_devices", "Copy each tower's next shard to its "
           "device while a step runs. Default: on GPUs; a CPU's towers share its memory.")
    define(switch, "pack_transfers", "Move parameters and gradients between devices "
           "as one tensor a dtype. Off by default: it copies every byte once more at both ends.")
    define(switch, "inline_towers", "Optimize all towers as one graph: on GPUs, "
           "gradients may leave while the backward pass goes on. Off by default: it starts slower.")
    define(switch, "jit_compile", "Compile each tower with XLA. Off by default: it "
           "takes long to start, and mostly pays on GPUs.")
    define(integer, "cpu_threads", "Threads of each operation on a CPU; they change the last bits "
           "of the results. Default: the cores divided among the towers.")
    define(number, "worker_timeout", "Of several workers: seconds after which one is lost that "
           "does not answer, or lets the others wait; all end.")


def _define_training_flags(define: Callable[..., None]) -> None:
    """How long, and how the parameters change, and which."""
    string = flags.DEFINE_string
    integer = flags.DEFINE_integer
    choice = flags.DEFINE_enum
    number = flags.DEFINE_float
    switch = flags.DEFINE_boolean
    define(integer, "epochs", "Passes over the training data; 0 evaluates only. Default: 12, after "
           "which the Keras convnet reaches 0.99 on MNIST.")
    define(integer, "max_steps", "Updates after which the run ends, even in mid-epoch. Default: no "
           "limit.")
    define(string, "optimizer", "A Keras optimizer: adam, sgd, rmsprop, ... Default: the model's "
           "own.")
    define(number, "learning_rate", "Of the one update with the averaged gradient; "
           "independent of the number of towers. Default: the optimizer's own.")
    define(string, "schedule", "What becomes of the learning rate over --epochs (or --max_steps): "
           "constant; cosine or linear, to 0; or step:30,60, a tenth after each of these epochs. "
           "The default can be changed by callbacks.")
    define(integer, "warmup_steps", "Updates over which the learning rate rises from "
           "0, before --schedule. Default: none.")
    define(number, "weight_decay", "Keras', of every trainable variable in each update: w -= "
           "learning rate * weight_decay * w. Default: the optimizer's own, mostly none.")
    define(number, "momentum", "Of sgd or rmsprop. Default: the optimizer's own, mostly none.")
    define(number, "clip_norm", "The largest norm of all averaged gradients together; larger ones "
           "are scaled down. Default: no limit.")
    define(number, "ema", "Momentum, such as 0.999, of an average of each variable over the "
           "updates, which final.keras holds in the variable's place. Default: none.")
    define(number, "label_smoothing", "The part of each label that is spread over all classes, "
           "such as 0.1. Default: none.")
    define(string, "class_weight", "What an example of each class counts in the loss, as in "
           "Keras' fit: 0:1,1:5, a class that is not named 1; or balanced, so that each class "
           "counts as much as any other. Default: all count 1.")
    define(number, "dropout", "Rate of every Dropout layer, 0 for none. Default: the "
           "model's own rates.")
    define(choice, "batch_norm", ["average", "synchronized", "tower0"], "How the towers' "
           "BatchNormalization statistics become one. The default uses every example.")
    define(string, "freeze", "A regular expression: variables in whose path it is found stay as "
           "they are; a layer, all of whose are, is frozen as in Keras. Default: none.")
    define(string, "init_from", "A .keras file, whose values the variables of the same names and "
           "shapes begin with. Default: all begin at random.")
    define(integer, "seed", "Of the parameters, the order of the examples and dropout. The "
           "default is fixed, so that a run can be repeated.")
    define(choice, "precision", ["float32", "mixed_float16", "mixed_bfloat16"], "Keras' dtype "
           "policy, of all towers. The default is exact to float rounding.")
    define(switch, "deterministic", "Use only kernels that give the same bits twice, "
           "and refuse operations that have none. Off by default: it costs speed on GPUs, and on "
           "CPUs alone the bits are the same without it.")
    define(choice, "nonfinite", ["stop", "skip"], "What a NaN or infinite loss or gradient does: "
           "end the run before the update, or leave that update out and count it.")


def _define_run_flags(define: Callable[..., None]) -> None:
    """What a run leaves, and who is told of it."""
    string = flags.DEFINE_string
    integer = flags.DEFINE_integer
    choice = flags.DEFINE_enum
    switch = flags.DEFINE_boolean
    define(string, "run_dir", "Directory of the run: new, or empty. Default: the next free "
           "runs/<model>-<dataset>-001.")
    define(string, "resume", "Directory of a run that goes on: alone, it brings back every flag. "
           "Beside it only --num_gpus, --logical_gpus, --device, --prefetch_to_devices, "
           "--checkpoint_every, --nonfinite, --data_workers, --data_timeout, --tensorboard, "
           "--histograms, --export, --worker_timeout, --trust_run_dir, an --epochs or --max_steps "
           "that is not reached yet, or a larger --early_stopping. --resume=auto: go on with the "
           "run in --run_dir where there is one, else begin it.")
    define(switch, "trust_run_dir", "With --resume, --evaluate or --predict, import modules that "
           "the run's config.json names from the run's own directory, too: it runs what whoever "
           "wrote them wants.")
    define(integer, "checkpoint_every", "Updates from one checkpoint to the next, beside each "
           "epoch's end. Default: at least one every 10 minutes.")
    define(string, "monitor", "The column of results.csv that makes an epoch the best, whose model "
           "best.keras holds. Default: val_accuracy, or val_loss where there is none.")
    define(choice, "monitor_mode", ["auto", "min", "max"], "Whether the lowest or the highest "
           "--monitor is the best. The default is what Keras knows of the metric.")
    define(integer, "early_stopping", "Epochs without a better --monitor after which the run ends. "
           "Default: never.")
    define(string, "callbacks", "package.module:function -> a list of Keras callbacks, which are "
           "told of every step and epoch. Default: none.")
    define(switch, "tensorboard", "Write scalars and the step's graph to "
           "tensorboard/ in the run's directory. Off by default: results.csv and results.png hold "
           "the scalars.")
    define(switch, "histograms", "With --tensorboard, the parameters' histograms "
           "each epoch. Off by default: they take time and room.")


def _define_flags_that_look(define: Callable[..., None]) -> None:
    """What is looked at, instead of training or before."""
    switch = flags.DEFINE_boolean
    define(command_line.DEFINE_switch_or_warn, "verify_gradients", "Compare the averaged gradient "
           "with the large-batch gradient on the first batch, then train; where they differ, name "
           "the loss or layer and end before the first update, or, with =warn, train all the same. "
           "Off by default: it takes the memory of a whole global batch on one device.")
    define(switch, "profile", "Measure the phases of a step, name what bounds it and "
           "what to change; train nothing.")
    define(switch, "plan", "Print devices, towers, shard sizes and the bytes that "
           "each step moves; train nothing.")
    flags.DEFINE_boolean("devices", False, "Print versions, libraries, GPUs, CPU and the devices "
                         "that towers would get; train nothing.")


def _define_flags_after_training(define: Callable[..., None]) -> None:
    """What is done with a trained model."""
    define(flags.DEFINE_string, "export", "A new directory for a SavedModel, which serves without "
           "towers: of the model at the run's end, or at that of a complete run with --resume, or "
           "of the file of --evaluate or --predict. Default: none is written.")
    for name, result in (("evaluate", "print its loss and metrics"),
                         ("predict", "write its outputs to --out, in the data's order")):
        flags.DEFINE_string(name, None, f"A .keras file, or a run's directory for its best.keras: "
                            f"{result}, for the test data, on all towers; train nothing. Data and "
                            "batch are those of the run in whose directory the file lies, unless "
                            "they are given.")
    flags.DEFINE_string("out", None, "With --predict, a new file: .npz for all outputs, .csv for "
                        "label and probability, beside the names of image files and of classes. "
                        "Neither takes memory for more than a batch.")


def parse_flags(argv: list[str]) -> TrainConfig | None:
    """The configuration that the command line asks for; None where it was --help, now printed.

    Raises:
        ValueError: a flag is unknown, a value makes no sense, or something is no flag.
    """
    if not command_line.parse_flags(argv):
        return None
    _check_commands()
    fields: list[Any] = [flags.FLAGS[field.name] for field in dataclasses.fields(TrainConfig)]
    given = {flag.name: flag.value for flag in fields if flag.present}
    resumed = resumed_directory(given)
    if resumed is not None:
        return continued_config(resumed, given)
    if flags.FLAGS.evaluate or flags.FLAGS.predict:
        return file_config(_model_file(), given)
    values: dict[str, Any] = {flag.name: flag.value for flag in fields}
    return TrainConfig(**{**values, "resume": None})


def _check_commands() -> None:
    """Raises ValueError for flags that ask for two things at once, or for half of one."""
    evaluate, predict, out = (flags.FLAGS[name].value for name in ("evaluate", "predict", "out"))
    if predict and not out:
        raise ValueError(f"predict ({predict}) needs `out`, a new file: out=predictions.npz.")
    if out and not predict:
        raise ValueError(f"out ({out}) needs `predict`, a .keras file.")
    given = [f"`{name}`" for name in ("evaluate", "predict", "resume") if flags.FLAGS[name].value]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)}: give only one of them.")


def _model_file() -> Path:
    name = "evaluate" if flags.FLAGS.evaluate else "predict"
    return find_file(str(flags.FLAGS[name].value), name)


def run(config: TrainConfig) -> None:
    """Trains, with libraries' messages in log.txt; on the terminal with --verbosity=1."""
    with (
        nullcontext() if command_line.is_verbose() else terminal.quiet_stderr() as noise,
        command_line.users_lines_named(noise, __file__),
    ):
        if flags.FLAGS.devices:
            show_devices(config)
        elif flags.FLAGS.evaluate or flags.FLAGS.predict:
            use_file(config)
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


def use_file(config: TrainConfig) -> None:
    """Evaluates a trained model, or writes its predictions."""
    from towers.machine import environment

    environment.check()  # as above
    from towers.after_training import export
    from towers.after_training.predicting import evaluate_file, predict_file
    from towers.reporting import own_warnings
    from towers.reporting.report import Report

    file = _model_file()
    export.check(config.export)
    with closing(Report()) as out, own_warnings.told(out.warn):
        if flags.FLAGS.evaluate:
            evaluate_file(config, file, out)
        else:
            predict_file(config, file, os.path.expanduser(str(flags.FLAGS.out)), out)
        if config.export is not None:
            out.line(export.export_model(file, config.export))


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
