"""Finds the workers of the run, and which of them this process is: from TF_CONFIG or Slurm.

    TF_CONFIG = {"cluster": {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]},
                 "task": {"type": "worker", "index": 1}}

Worker 0 is the chief, which alone writes the run's directory. In a cluster with a job "chief", as
Kubeflow makes it, the chief is worker 0, and the job "worker" follows.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

TF_CONFIG = "TF_CONFIG"
_SLURM_TASKS = "SLURM_STEP_NUM_TASKS"  # `srun` sets it, `sbatch` alone does not
_SLURM_PORT = 8888  # for the first task on a machine; the SlurmClusterResolver's default
_JOBS = ("chief", "worker")
LARGEST_PORT = 65_535
# An IPv6 address needs brackets: "::1:2222" could also be an address without a port.
_ADDRESS = re.compile(r"(?:\[[\w.:%]+\]|[\w.-]+):([0-9]{1,5})", re.ASCII)
_EXAMPLE = '{"cluster": {"worker": ["10.0.0.1:2222", ...]}, "task": {"type": "worker", "index": 0}}'


@dataclass(frozen=True)
class Cluster:
    """Lists the workers of a run, and says which of them this process is."""

    addresses: tuple[str, ...] = ()  # "host:port"; one or none if this process is alone
    index: int = 0  # of this process; 0 is the chief

    @property
    def num_workers(self) -> int:
        return max(1, len(self.addresses))

    def most_towers(self, num_towers: int) -> int:
        """Returns the largest number of towers in one worker: ceil(num_towers / num_workers)."""
        return -(-num_towers // self.num_workers)

    @property
    def is_chief(self) -> bool:
        return self.index == 0


ALONE = Cluster()
LOST_WORKER = 3  # the exit code of a process that ends because another worker is lost


class LostWorkerError(RuntimeError):
    """Another worker has ended or does not answer, so this process can compute no more steps."""


def find_cluster(environment: Mapping[str, str] = os.environ) -> Cluster:
    """Returns the cluster that the environment names; `ALONE` if it names none, or one worker."""
    if environment.get(TF_CONFIG):
        cluster = _from_tf_config(environment[TF_CONFIG])
    elif int(environment.get(_SLURM_TASKS, 1)) > 1:
        cluster = _from_slurm()
    else:
        return ALONE
    if cluster.num_workers > 1:
        return cluster
    return ALONE


def _from_tf_config(text: str) -> Cluster:
    try:
        config = json.loads(text)
        jobs = config.get("cluster", {})
        task = config.get("task", {})
        named = {job: list(jobs[job]) for job in jobs}
        kind, index = task.get("type", "worker"), task.get("index", 0)
    except (ValueError, AttributeError, TypeError):
        raise _malformed("is not JSON of the form") from None
    if not named:
        return ALONE
    others = sorted({*named, kind} - {*_JOBS})
    if others:
        raise _malformed(
            f"names the job {others[0]!r}: every worker trains and evaluates, there are only "
            "worker and chief. It must look like"
        )
    addresses = [address for job in _JOBS for address in named.get(job, [])]
    for address in addresses:
        found = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
        if found is None or not 1 <= int(found[1]) <= LARGEST_PORT:
            raise _malformed(f"has {address!r}, which is no host:port. It must look like")
        if addresses.count(address) > 1:
            raise ValueError(f"{TF_CONFIG} has the address {address} twice: give each another.")
    count = len(named.get(kind, []))
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < count:
        raise _malformed(
            f"says that this is {kind} {index!r}, and names {count} of these: indices go from 0 to "
            f"{count - 1}. It must look like"
        )
    return Cluster(tuple(addresses), index + (kind == "worker") * len(named.get("chief", [])))


def _from_slurm() -> Cluster:
    """Returns the cluster that TensorFlow's resolver finds for Slurm, which assigns the GPUs."""
    import tensorflow as tf

    try:
        count = int(os.environ[_SLURM_TASKS])
        resolver = tf.distribute.cluster_resolver.SlurmClusterResolver(
            port_base=_SLURM_PORT, gpus_per_node=count, gpus_per_task=1, auto_set_gpu=False
        )
        # The resolver orders machines as text, but Slurm by number: node2 comes before node10.
        addresses = sorted(
            resolver.cluster_spec().as_dict()["worker"],
            key=lambda name: [
                int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)
            ],
        )
        index, here = resolver.task_id, os.environ.get("SLURMD_NODENAME")
        if here is not None and addresses[index].rpartition(":")[0] != here:
            raise ValueError(f"task {index} is on {here}, and should be at {addresses[index]}")
    except (RuntimeError, ValueError, KeyError, OSError) as error:
        raise ValueError(
            f"Slurm's variables name no workers that can be found ({error}). Give {TF_CONFIG} "
            f"instead, or {TF_CONFIG}={{}} for a worker that is alone."
        ) from None
    return Cluster(tuple(addresses), index)


def _malformed(what: str) -> ValueError:
    return ValueError(f"{TF_CONFIG} {what} {_EXAMPLE}")
