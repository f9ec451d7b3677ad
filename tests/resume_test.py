"""A run that was killed goes on to the bits of one that never was: real processes and signals."""

import pytest

from tests.resuming import FLAGS, STEPS, outcome, train
from towers import checkpoints


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nobody has interrupted."""
    cwd = tmp_path_factory.mktemp("whole")
    code, stdout, stderr = train(*FLAGS, cwd=cwd)
    assert code == 0, stdout + stderr
    return cwd / "run"


def check_killed_at(step, whole, cwd, *, every=1, resume=()):
    """SIGKILL after `step` updates, then --resume."""
    code, _, _ = train(
        *FLAGS, f"--checkpoint_every={every}", cwd=cwd, fault=f"step == {step} and kill('KILL')"
    )
    assert code == -9
    code, stdout, stderr = train("--resume=run", *resume, cwd=cwd)
    assert code == 0, stdout + stderr
    assert outcome(cwd / "run") == outcome(whole)
    return stdout


@pytest.mark.parametrize(
    ("step", "every", "flags"), [(4, 3, ["--num_gpus=1"]), (7, 1, ["--num_gpus=4"])]
)
def test_a_killed_run_goes_on_to_the_same_bits_on_any_devices(step, every, flags, whole, tmp_path):
    assert "from step" in check_killed_at(step, whole, tmp_path, every=every, resume=flags)


@pytest.mark.slow
@pytest.mark.parametrize("step", range(1, STEPS + 1))
@pytest.mark.parametrize("every", [1, 3])
def test_a_run_killed_at_any_step_goes_on_to_the_same_bits(step, every, whole, tmp_path):
    check_killed_at(step, whole, tmp_path, every=every)


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        ("INT", 130, "stopped by Ctrl-C"),
        pytest.param("TERM", 143, "stopped by SIGTERM", marks=pytest.mark.slow),
    ],
)
def test_a_signal_saves_in_mid_epoch_and_the_run_goes_on(number, code, said, whole, tmp_path):
    ended, stdout, stderr = train(*FLAGS, cwd=tmp_path, fault=f"step == 6 and kill({number!r})")
    assert ended == code and stderr.endswith(f"{said}\n")
    assert stdout.endswith("saved at step 6. Resume: python train.py --resume=run\n")
    assert train("--resume=run", cwd=tmp_path)[0] == 0
    assert outcome(tmp_path / "run") == outcome(whole)


def test_a_second_ctrl_c_ends_at_once_and_leaves_the_older_checkpoint(tmp_path):
    """Both come while a step runs, which is before the first could be obeyed."""
    fault = "step == 6 and (kill('INT'), kill('INT'))"
    code, stdout, _ = train(*FLAGS, cwd=tmp_path, fault=fault)
    assert code == 130 and "saved at" not in stdout
    path, _, wrong = checkpoints.read_newest(tmp_path / "run" / "checkpoints")
    assert (path.name, wrong) == ("epoch-1-step-4", [])
