"""Lists the cases of gpu.py. The most important cases come first, because time may run out."""

from collections.abc import Collection, Iterable
from typing import NamedTuple

PRECISIONS = ("float32", "mixed_float16", "mixed_bfloat16")  # Keras dtype policies
TRANSFERS = "trip"  # not a contender: the copies of a step between CPU and GPUs alone
HEADLINES = ("towers", "fit", "mirrored")
CONTENDERS = (
    *HEADLINES,
    "compiled",
    "fit_no_jit",
    TRANSFERS,
    "limit",
    "on_gpu",
    "unplaced",
    "mirrored_one",
)
ONE_DEVICE = {"fit", "fit_no_jit"}
SEVERAL_DEVICES = {"mirrored", "mirrored_one"}
NO_XLA = {("gru", "compiled"), ("gru", "fit_no_jit")}  # XLA cannot compile cuDNN's GRU

# Examples per GPU of the global batch. The first size of a workload is its main size.
SIZES = {
    "cnn": (128, 1024),
    "mlp41m": (128,),
    "resnet50": (32,),
    "gru": (64,),
    "notebook_cnn": (128, 1024),
}
WORKLOADS = tuple(SIZES)
SMALL_SHARE = 32  # small models get this share of these examples
# The first precision of a workload is its main precision.
MAIN_PRECISIONS = {"resnet50": ("mixed_bfloat16", "float32", "mixed_float16")}


class Case(NamedTuple):
    """One measurement in its own process. `batch_size` is the global batch."""

    workload: str
    precision: str
    batch_size: int
    num_devices: int
    contender: str

    @property
    def size(self) -> str:
        """The case without its contender, such as "resnet50 bfloat16, 256 on 8 devices"."""
        precision = self.precision.removeprefix("mixed_")
        shown = "" if precision == "float32" else f" {precision}"
        devices = "1 device" if self.num_devices == 1 else f"{self.num_devices} devices"
        return f"{self.workload}{shown}, {self.batch_size:,} on {devices}"

    def __str__(self) -> str:
        return f"{self.size}: {self.contender}"


def make_plan(
    num_devices: int,
    workloads: Collection[str] = WORKLOADS,
    contenders: Collection[str] = CONTENDERS,
    small: bool = False,
) -> list[Case]:
    """Returns the cases in their order, each once.

    Args:
        num_devices: number of GPUs that are compared with one GPU, at the same global batch.
        workloads, contenders: the names to measure.
        small: whether the models are small.
    """
    main, others = [], []
    for workload in workloads:
        first, *further = [max(1, n // SMALL_SHARE) if small else n for n in SIZES[workload]]
        precision, *precisions = MAIN_PRECISIONS.get(workload, ("float32",))
        main += _one_and_several(workload, precision, first * num_devices, num_devices)
        for other in precisions:
            others += _one_and_several(workload, other, first * num_devices, num_devices)
        for size in further:
            others.append(Case(workload, precision, first, 1, ""))  # one GPU's share of main
            others += _one_and_several(workload, precision, size * num_devices, num_devices)
    cases = [
        *_cases(main, HEADLINES),
        *_cases(main, ["compiled", "fit_no_jit"]),
        *_cases(main, [TRANSFERS]),
        *_cases(main, ["limit"]),
        *_cases(others, HEADLINES),
        *_cases(main, ["on_gpu", "unplaced", "mirrored_one"]),
    ]
    return [case for case in dict.fromkeys(cases) if case.contender in contenders]


def _one_and_several(
    workload: str, precision: str, batch_size: int, num_devices: int
) -> list[Case]:
    """Returns cases without a contender, on one device and on several."""
    return [Case(workload, precision, batch_size, count, "") for count in (1, num_devices)]


def _cases(sizes: Iterable[Case], contenders: Iterable[str]) -> list[Case]:
    """Returns a case for each size and each contender that can run it."""
    return [
        size._replace(contender=contender)
        for size in sizes
        for contender in contenders
        if contender not in (SEVERAL_DEVICES if size.num_devices == 1 else ONE_DEVICE)
        and (size.workload, contender) not in NO_XLA
    ]
