"""Real processes: who the workers are, what they tell each other, how they end without one."""

import json
import re
import signal
import socket
import time

import pytest

from tests import processes as started
from towers.workers import watch, workers
from towers.workers.cluster import ALONE, Cluster, LOST_WORKER, find_cluster

WORKER = ("-m", "tests.workers.worker")


ACTS = ("collectives", "between_steps", "differ", "part")


@pytest.fixture(scope="module")
def both():
    """Maps each of ACTS to what two workers have said in it."""
    ended = started.run_all(2, *WORKER, *ACTS)
    assert [code for code, _, _ in ended] == [0, 0], ended[0][2]
    said = [[json.loads(line) for line in lines.splitlines()] for _, lines, _ in ended]
    return dict(zip(ACTS, zip(*said, strict=True), strict=True))


def test_workers_tell_each_other_flags_and_bytes(both):
    for said in both["between_steps"]:
        assert said == {
            "all_reduce_max": [[0, 7], [1, 3]],
            "all_gather": [[0], [255, 1]],
            "broadcast": list(range(9)),
            "answers": True,
        }


def test_who_is_alone_hears_itself():
    told = workers.Workers()
    assert told.all_reduce_max(3, 0) == (3, 0)
    told.check_same({"seed": 1})
    told.barrier()
    assert (told.all_gather(b"x"), told.broadcast(b"y")) == ([b"x"], b"y")


def test_what_differs_from_the_chief_is_told_everywhere(both):
    for said, versions in both["differ"]:
        assert re.fullmatch(
            r"worker 1 \(127.0.0.1:\d+\) differs from the chief in index \(1, the chief's is 0\), "
            r"a \(1, the chief's is 0\), b \(1, the chief's is 0\) and 1 more. All workers must be "
            r"given the same.",
            said,
        )
        assert "differs from the chief in Keras' version (1, the chief's is 0). All" in versions


def test_who_parts_waits_for_the_others(both):
    came, parted = both["part"]
    assert parted > came


def test_who_has_met_the_others_once_may_end_and_holds_nobody():
    began_at = time.monotonic()
    ended = started.run_all(2, *WORKER, "part_once")
    assert [code for code, _, _ in ended] == [0, 0], ended[0][2]
    assert time.monotonic() - began_at < 0.8 * watch.DEFAULT_TIMEOUT


@pytest.mark.matrix
def test_a_worker_may_come_late():
    hosts = started.addresses(2)
    first = started.start(hosts, 1, *WORKER, "between_steps", TIMEOUT="60")
    time.sleep(8)
    second = started.start(hosts, 0, *WORKER, "between_steps", TIMEOUT="60")
    assert [code for code, _, _ in started.finish([first, second], 60)] == [0, 0]


def test_a_taken_port_is_an_error_before_tensorflow_starts():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        hosts = [f"127.0.0.1:{taken.getsockname()[1]}", "127.0.0.1:1"]
        process = started.start(hosts, 0, *WORKER, "steps")
        ((code, _, errors),) = started.finish([process], timeout=60)
    assert code == 1
    assert f"this worker's address is {hosts[0]}, and port" in errors
    assert "Address already in use. Is another worker of this index running?" in errors


def begin(count, what, **environment):
    """Workers, all of which have begun to meet."""
    processes = started.start_all(count, *WORKER, what, **environment)
    for process in processes:
        assert process.first_line() == '"begun"'
    return processes


@pytest.mark.telling("2-epochs*")  # workers_run_test kills the chief in a step
@pytest.mark.parametrize(
    "lost, what, phase",
    [(0, "steps", "the end of a step"), (2, "epochs", "the beginning of an epoch")],
)
def test_a_killed_worker_is_named_by_all_others_at_once(lost, what, phase):
    processes = begin(3, what)
    killed_at = time.monotonic()
    processes[lost].send_signal(signal.SIGKILL)
    others = [process for i, process in enumerate(processes) if i != lost]
    for code, _, errors in started.finish(others, timeout=60):
        assert code == LOST_WORKER
        assert f"error: worker {lost} (127.0.0.1:" in errors
        assert f"was lost in {phase}. Start the run again with resume=DIR" in errors
    assert time.monotonic() - killed_at < 10


def hang(what, **environment):
    """(worker 1, stderr of worker 0) where worker 1 hangs; it is stopped in "steps"."""
    processes = begin(2, what, **environment)
    if what == "steps":
        processes[1].send_signal(signal.SIGSTOP)
    ((code, _, errors),) = started.finish(processes[:1], timeout=60)
    assert code == LOST_WORKER
    return processes[1], errors


@pytest.mark.matrix
def test_a_stopped_worker_is_named_after_the_timeout():
    process, errors = hang("steps", TIMEOUT="4")
    process.kill()
    assert "error: worker 1 (127.0.0.1:" in errors and "did not answer for" in errors


def test_a_worker_that_hangs_between_steps_is_named_and_says_where():
    process, errors = hang("hang_between_steps")
    assert re.search(
        r"error: worker 1 \(127.0.0.1:\d+\) did not come to the end of a step for [3-9] seconds, "
        r"and the log there says where it hangs. Start the run again with resume=DIR",
        errors,
    )
    ((code, _, errors),) = started.finish([process], timeout=60)
    assert code == -signal.SIGABRT
    assert re.search(
        r"error: the others wait for this worker, which has hung for [3-9] seconds, in "
        r"sleep_for_long \(.*worker.py, line \d+\). Start the run again",
        errors,
    )


@pytest.mark.matrix
def test_a_worker_that_hangs_wholly_ends_the_others_after_ten_times_the_timeout():
    process, errors = hang("hang_wholly")
    process.kill()
    assert re.search(  # a machine that is busy may not answer either
        "the workers answer, but not all of them came to the end of a step within|did not answer",
        errors,
    )


@pytest.mark.matrix
def test_nobody_ends_while_nobody_waits_as_long_or_a_worker_writes_a_file():
    ended = started.run_all(2, *WORKER, "pause")
    assert [(code, said) for code, said, _ in ended] == [(0, '"came"\n')] * 2, ended


@pytest.mark.matrix
@pytest.mark.parametrize("present", [0, 1])
def test_a_worker_that_never_starts_is_named_after_the_timeout(present):
    hosts = started.addresses(2)
    process = started.start(hosts, present, *WORKER, "steps", TIMEOUT="4")
    ((code, _, errors),) = started.finish([process], timeout=60)
    assert code == LOST_WORKER, errors
    assert f"worker {1 - present} ({hosts[1 - present]})" in errors


def have_the_values_in_order(said):
    count = len(said)
    for worker, values in enumerate(said):
        assert values == {
            "gather": [[100.0 * w, 100.0 * w + 1, 100.0 * w + 2] for w in range(count)],
            "bool": [[w == 0] for w in range(count)],
            "bfloat16": [0.5] * count,
            "all_to_all": [100 * w + worker for w in range(count)],
            "broadcast": [0.5],
        }


def test_every_worker_has_the_others_values_in_order(both):
    have_the_values_in_order(both["collectives"])


@pytest.mark.matrix
def test_eleven_workers_have_the_others_values_in_order():
    """TensorFlow's own order is that of text: 10 comes before 2."""
    ended = started.run_all(11, *WORKER, "collectives")
    assert [code for code, _, _ in ended] == [0] * 11, ended[0][2]
    have_the_values_in_order([json.loads(said) for _, said, _ in ended])


HOSTS = ["10.0.0.1:2222", "10.0.0.2:2222", "host.domain:65535"]


def tf_config(cluster, task):
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


@pytest.mark.parametrize(
    "kind, index, num_chiefs, expected",
    [
        ("worker", 0, 0, 0),
        ("worker", 2, 0, 2),
        ("chief", 0, 1, 0),
        ("worker", 1, 1, 2),
    ],
)
def test_tf_config_names_the_workers_and_this_one(kind, index, num_chiefs, expected):
    """A chief is worker 0, and the others follow."""
    cluster = {"worker": HOSTS[num_chiefs:], "chief": HOSTS[:num_chiefs]}
    found = find_cluster(tf_config(cluster, {"type": kind, "index": index}))
    assert found == Cluster(tuple(HOSTS), expected)
    assert (found.num_workers, found.is_chief) == (3, expected == 0)


@pytest.mark.parametrize(
    "environment",
    [
        {"TF_CONFIG": ""},
        {"SLURM_STEP_NUM_TASKS": "1"},
        {"TF_CONFIG": "{}", "SLURM_STEP_NUM_TASKS": "4"},
        tf_config({"worker": HOSTS[:1]}, {"type": "worker", "index": 0}),
    ],
)
def test_who_is_named_alone_is_alone(environment):
    assert find_cluster(environment) == ALONE
    assert ALONE.num_workers == 1 and ALONE.is_chief


WORKER_0 = {"type": "worker", "index": 0}


@pytest.mark.parametrize(
    "environment, said",
    [
        *(
            ({"TF_CONFIG": text}, 'is not JSON of the form {"cluster": ')
            for text in ("{", "[1]", '{"cluster": {"worker": 3}}')
        ),
        (
            tf_config({"worker": HOSTS}, {"type": "worker", "index": 3}),
            "this is worker 3, and names 3 of these: .* from 0 to 2",
        ),
        (tf_config({"worker": HOSTS}, {"type": "worker", "index": -1}), "this is worker -1"),
        (tf_config({"worker": HOSTS}, {"type": "worker", "index": "x"}), "this is worker 'x'"),
        (tf_config({"worker": HOSTS}, {"type": "evaluator", "index": 0}), "the job 'evaluator'"),
        *(
            (
                tf_config({"worker": [*HOSTS, address]}, WORKER_0),
                f"{address!r}, which is no host:port",
            )
            for address in (
                "10.0.0.9",
                ":2222",
                "host:x",
                "host:70000",
                "::1:2222",
                "http://n:1",
                7,
            )
        ),
        (tf_config({"worker": HOSTS + HOSTS[:1]}, WORKER_0), "the address 10.0.0.1:2222 twice"),
    ],
)
def test_a_tf_config_that_makes_no_sense_is_an_error_that_says_why(environment, said):
    with pytest.raises(ValueError, match=f"^TF_CONFIG .*{said}"):
        find_cluster(environment)


def test_slurms_variables_name_workers(monkeypatch):
    """As `srun --nodes=2 --ntasks=4` sets them on machines 9 and 10."""
    slurm = {
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NODELIST": "node[9-10]",
        "SLURM_PROCID": "3",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURMD_NODENAME": "node10",
    }
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    expected = ("node9:8888", "node9:8889", "node10:8888", "node10:8889")
    assert find_cluster() == Cluster(expected, 3)
    monkeypatch.setenv("SLURMD_NODENAME", "node9")
    with pytest.raises(ValueError, match="task 3 is on node9, and should be at node10:8889"):
        find_cluster()
    monkeypatch.delenv("SLURM_STEP_NODELIST")
    with pytest.raises(ValueError, match="Slurm's variables name no workers .* Give TF_CONFIG"):
        find_cluster()
