"""make_parallel's fit on several real workers, by scripts that know nothing of them."""

import json
import signal

import pytest

from tests.real_workers import run_all

WORKER = ("-m", "tests.fit_worker")


def test_fit_evaluate_and_predict_give_the_bits_of_one_process(tmp_path):
    digests = set()
    for count in (1, 2):
        out = tmp_path / str(count)
        out.mkdir()
        for code, _, errors in run_all(count, *WORKER, "fit", out):
            assert code == 0, errors
        digests |= {json.loads(path.read_text()) for path in out.iterdir()}
    assert len(digests) == 1


def test_a_fit_whose_workers_were_killed_goes_on_to_the_bits_of_one_process(tmp_path):
    for count, killed in ((1, []), (2, ["killed"]), (2, [])):
        out = tmp_path / str(count)
        out.mkdir(exist_ok=True)
        for code, _, errors in run_all(count, *WORKER, "resumed", out, *killed):
            assert code == (-signal.SIGKILL if killed else 0), errors
    assert not list((tmp_path / "2" / "backup-1").glob("*"))  # the chief's alone
    digests = {path.read_text() for path in tmp_path.glob("*/*.json")}
    assert len(digests) == 1 and len(list(tmp_path.glob("*/*.json"))) == 3


@pytest.mark.parametrize("what, said", [
    ("other_shuffle", "ValueError: the workers have different global batches in a train step. Give "
                      "each the same examples in the same order"),
    ("own_step", "That works in one process only, and the environment names"
                 " 2 workers. Unset TF_CONFIG."),
    ("late", "ValueError: the environment names 2 workers, but TensorFlow has started before this "
             "process joined them: a model's variables start it, too. Call towers.join_workers()"),
    ("other_model", "differs from the chief in variable 0 kernel ("),
])
def test_workers_that_would_train_something_else_are_refused(what, said, tmp_path):
    ended = run_all(2, *WORKER, what, tmp_path, timeout=120)
    assert all(code == 1 and said in errors for code, _, errors in ended), ended
