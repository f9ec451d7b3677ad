"""Which worker gets which GPUs: CUDA_VISIBLE_DEVICES."""

VARIABLE = "CUDA_VISIBLE_DEVICES"


def shares(
    num_workers: int, gpus_per_worker: int, visible: str | None, num_present: int | None
) -> list[str]:
    """Each worker's CUDA_VISIBLE_DEVICES, such as ["0,1", "2,3"].

    Args:
        num_workers: how many workers.
        gpus_per_worker: GPUs of each.
        visible: CUDA_VISIBLE_DEVICES as it is now: numbers or UUIDs; None where it is not set.
        num_present: how many GPUs the machine has; None where nobody knows. Not looked at where
            CUDA_VISIBLE_DEVICES is set.

    Raises:
        ValueError: there are not so many.
    """
    needed = num_workers * gpus_per_worker
    if visible is not None:
        names, whose = _named(visible), f"{VARIABLE}={visible!r} names"
    else:
        present = needed if num_present is None else num_present
        names, whose = list(map(str, range(present))), "this machine has"
    if len(names) < needed:
        raise ValueError(
            f"--workers ({num_workers}) with --gpus_per_worker ({gpus_per_worker}) need {needed} "
            f"GPUs; {whose} {len(names)}. {_way_out(num_workers, gpus_per_worker, len(names))}"
        )
    return [
        ",".join(names[first:first + gpus_per_worker])
        for first in range(0, needed, gpus_per_worker)
    ]


def _named(visible: str) -> list[str]:
    """The GPUs in the list; as for CUDA, it ends before the first entry that names none."""
    names = []
    for name in map(str.strip, visible.split(",")):
        if name in ("", "-1"):
            break
        names.append(name)
    return names


def _way_out(num_workers: int, gpus_per_worker: int, num_gpus: int) -> str:
    if num_gpus >= num_workers:
        return f"Use --gpus_per_worker={num_gpus // num_workers}."
    if num_gpus >= gpus_per_worker:
        return f"Use --workers={num_gpus // gpus_per_worker}."
    return "Leave --gpus_per_worker out to run on CPUs."
