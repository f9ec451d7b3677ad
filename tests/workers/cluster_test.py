import json

import pytest

from towers.workers.cluster import ALONE, Cluster, find_cluster

HOSTS = ["10.0.0.1:2222", "10.0.0.2:2222", "host.domain:65535"]


def tf_config(cluster, task):
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


@pytest.mark.parametrize("kind, index, num_chiefs, expected", [
    ("worker", 0, 0, 0), ("worker", 2, 0, 2), ("chief", 0, 1, 0), ("worker", 1, 1, 2),
])
def test_tf_config_names_the_workers_and_this_one(kind, index, num_chiefs, expected):
    """A chief is worker 0, and the others follow."""
    cluster = {"worker": HOSTS[num_chiefs:], "chief": HOSTS[:num_chiefs]}
    found = find_cluster(tf_config(cluster, {"type": kind, "index": index}))
    assert found == Cluster(tuple(HOSTS), expected)
    assert (found.num_workers, found.is_chief) == (3, expected == 0)


@pytest.mark.parametrize("environment", [
    {}, {"TF_CONFIG": ""}, {"TF_CONFIG": "{}"}, {"SLURM_STEP_NUM_TASKS": "1"},
    {"TF_CONFIG": "{}", "SLURM_STEP_NUM_TASKS": "4"},
    tf_config({"worker": HOSTS[:1]}, {"type": "worker", "index": 0}),
])
def test_who_is_named_alone_is_alone(environment):
    assert find_cluster(environment) == ALONE
    assert ALONE.num_workers == 1 and ALONE.is_chief


WORKER_0 = {"type": "worker", "index": 0}


@pytest.mark.parametrize("environment, said", [
    *(({"TF_CONFIG": text}, 'is not JSON of the form {"cluster": ')
      for text in ("{", "[1]", "7", '{"cluster": {"worker": 3}}', '{"cluster": []')),
    (tf_config({"worker": HOSTS}, {"type": "worker", "index": 3}),
     "this is worker 3, and names 3 of these: .* from 0 to 2"),
    (tf_config({"worker": HOSTS}, {"type": "worker", "index": -1}), "this is worker -1"),
    (tf_config({"worker": HOSTS}, {"type": "worker", "index": "x"}), "this is worker 'x'"),
    (tf_config({"worker": HOSTS}, {"type": "evaluator", "index": 0}), "the job 'evaluator'"),
    *((tf_config({"worker": [*HOSTS, address]}, WORKER_0), f"{address!r}, which is no host:port")
      for address in ("10.0.0.9", ":2222", "host:x", "host:70000", "host:0", "::1:2222",
                      "http://n:1", 7)),
    (tf_config({"worker": HOSTS + HOSTS[:1]}, WORKER_0), "the address 10.0.0.1:2222 twice"),
])
def test_a_tf_config_that_makes_no_sense_is_an_error_that_says_why(environment, said):
    with pytest.raises(ValueError, match=f"^TF_CONFIG .*{said}"):
        find_cluster(environment)


def test_slurms_variables_name_workers(monkeypatch):
    """As `srun --nodes=2 --ntasks=4` sets them on machines 9 and 10."""
    slurm = {
        "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "node[9-10]", "SLURM_PROCID": "3",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURMD_NODENAME": "node10",
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
