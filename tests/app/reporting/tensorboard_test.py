"""The log is read back by TensorBoard's own reader."""

import resource
import shutil
import signal
import sys
from contextlib import closing, contextmanager

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import flags
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.results import classifier_result
from tests.resuming import FLAGS, train
from towers.app.command_line import as_flags
from towers.app.reporting import tensorboard
from towers.app.reporting.tensorboard import TensorBoardLog
from towers.step import TowerStep

KERNEL = np.array([[0.0], [1.0], [3.0]], "float32")


def make_step(optimizer="sgd", num_towers=2):
    with tf.device("/cpu:0"):
        model = keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(1, name="last", use_bias=False)], name="model"
        )
        model.set_weights([KERNEL])
    devices = [f"/cpu:{i}" for i in range(num_towers)]
    return TowerStep(model, optimizer, "mse", devices=devices)


@pytest.fixture(name="step", scope="module")
def _step():
    return make_step()


@pytest.fixture(name="traced_step", scope="module")
def _traced_step():
    step = make_step(num_towers=3)
    step.train_batch(np.ones((6, 3), "float32"), np.ones((6, 1), "float32"))
    return step


def row(epoch, loss=0.5):
    """An epoch whose values all differ; exact in float32, as TensorBoard keeps them."""
    return classifier_result(
        epoch, loss, 0.25, 2 * loss, 0.125, seconds=3.0, examples_per_second=1000.5
    )


def fail(message):
    raise AssertionError(message)


def write(directory, step, *rows, warn=fail, **options):
    with closing(TensorBoardLog(directory, step, warn, **options)) as log:
        for each in rows:
            log.write(each)


def read(directory):
    log = EventAccumulator(str(directory), size_guidance={"histograms": 0})  # 0: all
    log.Reload()
    return log


def scalars(directory):
    """{tag: {epoch: value}}; an epoch that stands twice is an error."""
    log, found = read(directory), {}
    for tag in log.Tags()["scalars"]:
        events = log.Scalars(tag)
        found[tag] = {event.step: event.value for event in events}
        assert len(found[tag]) == len(events), tag
    return found


def losses(directory):
    return scalars(directory)["loss/train"]


def test_every_epoch_has_its_scalars_at_the_epochs_number(tmp_path, step):
    write(tmp_path / "log", step, row(1, 0.5), row(2, 0.375))
    assert scalars(tmp_path / "log") == {
        "loss/train": {1: 0.5, 2: 0.375},
        "loss/validation": {1: 1.0, 2: 0.75},
        "accuracy/train": {1: 0.25, 2: 0.25},
        "accuracy/validation": {1: 0.125, 2: 0.125},
        "speed/examples_per_second": {1: 1000.5, 2: 1000.5},
        "speed/learning_rate": {1: pytest.approx(0.01), 2: pytest.approx(0.01)},
    }


def test_an_epoch_can_be_read_before_the_log_is_closed(tmp_path, step):
    log = TensorBoardLog(tmp_path, step, fail)
    log.write(row(1))
    assert losses(tmp_path) == {1: 0.5}
    log.close()


def test_the_learning_rate_is_that_of_the_schedule_inside_a_loss_scale_optimizer(tmp_path):
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0], [0.5, 0.25])
    step = make_step(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(schedule)))
    log = TensorBoardLog(tmp_path, step, fail)
    log.write(row(1))
    step.optimizer.inner_optimizer.iterations.assign(1)
    log.write(row(2))
    assert scalars(tmp_path)["speed/learning_rate"] == {1: 0.5, 2: 0.25}


def test_a_nan_loss_is_written_as_such(tmp_path, step):
    write(tmp_path, step, row(1, float("nan")))
    assert np.isnan(losses(tmp_path)[1])


def test_the_graph_shows_a_tower_on_each_device(tmp_path, traced_step):
    write(tmp_path, traced_step, row(1))
    calls = [node for node in read(tmp_path).Graph().node if node.op == "PartitionedCall"]
    assert [node.device for node in calls] == ["/device:CPU:0", "/device:CPU:1", "/device:CPU:2"]


def test_a_step_that_nothing_has_traced_has_no_graph(tmp_path, step):
    write(tmp_path, step, row(1))
    assert not read(tmp_path).Tags()["graph"]


def test_histograms_are_those_of_the_trainable_variables_at_each_epoch(tmp_path):
    step = make_step()
    log = TensorBoardLog(tmp_path, step, fail, histograms=True)
    log.write(row(1))
    step.model.set_weights([2 * KERNEL])
    log.write(row(2))
    before, after = read(tmp_path).Histograms("model/last/kernel")
    assert (before.step, after.step) == (1, 2)
    assert (before.histogram_value.max, after.histogram_value.max) == (3, 6)


def test_without_histograms_there_are_only_scalars(tmp_path, step):
    write(tmp_path, step, row(1))
    assert read(tmp_path).Tags()["histograms"] == []


def test_a_histogram_counts_values_in_buckets_of_equal_width():
    proto = tensorboard.histogram(KERNEL)  # 0, 1 and 3: buckets 0.1 wide
    assert (proto.min, proto.max, proto.num, proto.sum, proto.sum_squares) == (0, 3, 3, 4, 10)
    np.testing.assert_allclose(proto.bucket_limit, np.arange(1, 31) / 10)
    assert [i for i, count in enumerate(proto.bucket) if count] == [0, 10, 29]


@pytest.mark.parametrize(
    ("values", "num", "low", "high"),
    [([np.nan, -1.0, np.inf], 1, -1, -1), ([np.nan], 0, 0, 0), ([2.5, 2.5], 2, 2.5, 2.5)],
)
def test_a_histogram_leaves_out_what_is_not_finite(values, num, low, high):
    proto = tensorboard.histogram(np.array(values))
    assert (proto.num, proto.min, proto.max, sum(proto.bucket)) == (num, low, high, num)


def test_a_resumed_run_shows_the_epochs_that_it_repeats_once_with_their_new_values(tmp_path, step):
    write(tmp_path, step, row(1, 0.5), row(2, 0.25), row(3, 0.125))
    write(tmp_path, step, row(2, 2.0))
    assert losses(tmp_path) == {1: 0.5, 2: 2.0}  # 3 is still to come again
    write(tmp_path, step, row(3, 3.0), row(4, 4.0))
    assert losses(tmp_path) == {1: 0.5, 2: 2.0, 3: 3.0, 4: 4.0}


def test_a_run_that_was_killed_and_resumed_shows_every_epoch_once(tmp_path):
    flags = (*FLAGS, "--epochs=3", "--tensorboard", "--histograms")
    code, _, stderr = train(*flags, cwd=tmp_path, fault="step == 10 and kill('KILL')")
    assert code == -signal.SIGKILL, stderr
    assert list(losses(tmp_path / "run/tensorboard")) == [1, 2]
    newest = max((tmp_path / "run/checkpoints").glob("epoch-*"))
    assert newest.name == "epoch-2-step-8"
    shutil.rmtree(newest)  # the run goes on before the last epoch in the log
    code, _, stderr = train("--resume=run", cwd=tmp_path)
    assert code == 0, stderr
    assert len(list((tmp_path / "run/tensorboard").iterdir())) == 2
    log = read(tmp_path / "run/tensorboard")
    tags = log.Tags()
    found = [log.Scalars(tag) for tag in tags["scalars"]]
    found += [log.Histograms(tag) for tag in tags["histograms"]]
    assert {tuple(event.step for event in events) for events in found} == {(1, 2, 3)}


def test_a_resumed_run_writes_its_histograms_and_graph_again(tmp_path, traced_step):
    write(tmp_path, traced_step, row(1), row(2), histograms=True)
    write(tmp_path, traced_step, row(2), histograms=True)
    log = read(tmp_path)
    assert [event.step for event in log.Histograms("model/last/kernel")] == [1, 2]
    assert log.Tags()["graph"]


def test_a_file_that_ends_in_mid_record_costs_no_other_epoch(tmp_path, step):
    write(tmp_path, step, row(1, 0.5), row(2, 0.25))
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-5])
    assert losses(tmp_path) == {1: 0.5}
    write(tmp_path, step, row(2, 2.0), row(3, 3.0))
    assert losses(tmp_path) == {1: 0.5, 2: 2.0, 3: 3.0}


def test_a_file_in_the_directorys_place_is_one_warning(tmp_path, step):
    (tmp_path / "log").write_text("in the way")
    warnings = []
    write(tmp_path / "log", step, row(1), row(2), warn=warnings.append)
    assert warnings == [f"{tmp_path / 'log'} cannot be written (File exists); training goes on."]
    assert (tmp_path / "log").read_text() == "in the way"


def test_a_full_disk_is_one_warning_and_what_was_written_before_stays(tmp_path, step):
    warnings = []
    with closing(TensorBoardLog(tmp_path, step, warnings.append)) as log:
        log.write(row(1))
        (file,) = tmp_path.iterdir()
        with largest_file(file.stat().st_size + 10):
            log.write(row(2))
            log.write(row(3))
    assert warnings == [f"{tmp_path} cannot be written (File too large); training goes on."]
    assert losses(tmp_path) == {1: 0.5}


def test_a_missing_package_is_an_error_that_says_how_to_install_it(monkeypatch):
    tensorboard.check_installed()
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "tensorboard.version")
    with pytest.raises(ValueError) as raised:
        tensorboard.check_installed()
    flags.DEFINE_boolean("tensorboard", False, "for this test")
    text = as_flags(str(raised.value))
    delattr(flags.FLAGS, "tensorboard")
    assert text.startswith("--tensorboard needs the package tensorboard: ")
    assert text.endswith("pip install 'tf-towers[tensorboard]'")


@contextmanager
def largest_file(size):
    """The system refuses to write files beyond `size` bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
