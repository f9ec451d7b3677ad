"""What the chief saves, another worker has; the processes themselves are in workers_test.py."""

import numpy as np
import pytest

from tests.checkpointing.wire import Wire
from tests.loop_test import config
from towers.checkpointing import run_dir
from towers.checkpointing.position import Position
from towers.training.build import build
from towers.training.follower import Follower
from towers.training.saver import Saver


@pytest.fixture(name="run", scope="module")
def _run():
    return build(config())


def save(run, directory, position):
    """As the chief; the kernel's value at that time."""
    made = run_dir.create(str(directory), "n", run.config.to_json())
    (made / run_dir.CHECKPOINTS).mkdir()
    saver = Saver(run, made, (), pytest.fail)
    saver.begin(Position())
    saver.save(position)
    assert saver.wait()
    (made / run_dir.FINAL).touch()
    saver.finish(position)
    return made, run.step.model.trainable_variables[0].numpy()


def test_it_has_the_chiefs_state_and_leaves_no_file(run, tmp_path):
    directory, kernel = save(run, tmp_path / "chiefs", Position(step=3, epoch_step=3))
    wire = Wire()
    run = run._replace(workers=wire)
    Saver(run, directory, (), pytest.fail).load()
    run.step.model.trainable_variables[0].assign(kernel + 1)
    wire.turn()
    follower = Follower(run, tmp_path / "own", (), pytest.fail)
    loaded = follower.load()
    assert (loaded.position.step, loaded.path.parent.parent) == (3, directory)
    assert follower.finished_step() == 3
    follower.begin(loaded.position)
    np.testing.assert_array_equal(run.step.model.trainable_variables[0].numpy(), kernel)
    follower.save(loaded.position)
    follower.finish(loaded.position)
    assert follower.wait() and follower.newest_step() is None
    assert not (tmp_path / "own").exists()


def test_of_a_new_run_there_is_nothing_to_hear(run, tmp_path):
    wire = Wire()
    run = run._replace(workers=wire)
    assert Saver(run, tmp_path, (), pytest.fail).load(resume=False) is None
    wire.turn()
    follower = Follower(run, tmp_path, (), pytest.fail)
    assert follower.load(resume=False) is None
    follower.begin(Position())
    assert list(tmp_path.iterdir()) == []
