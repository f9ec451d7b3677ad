"""Which cases gpu.py measures, in the order of their importance: time may run out.

    1. towers, fit and MirroredStrategy, every workload       4. the limit
    2. with and without XLA: Keras' fit compiles on one GPU   5. other sizes and precisions
    3. the trip over the CPU                                  6. one switch at a time
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

PRECISIONS = ("float32", "mixed_float16", "mixed_bfloat16")
TRIP = "trip"  # no contender: the transfers alone
CONTENDERS = (
    "towers", "fit", "mirrored", "compiled", "fit_no_jit", TRIP, "limit",
    "on_gpu", "unplaced", "mirrored_one",
)


class Setup(NamedTuple):
    """The options that the contenders of a comparison have in common.

    batch_size: the global batch.
    """

    workload: str
    precision: str
    batch_size: int
    num_devices: int


class Case(NamedTuple):
    """One process: a `Setup`, and who trains."""

    workload: str
    precision: str
    batch_size: int
    num_devices: int
    contender: str

    @property
    def setup(self) -> Setup:
        """The case without its contender."""
        return Setup(*self[:4])

    def __str__(self) -> str:
        return f"{name_setup(self.setup)}: {self.contender}"


# Examples of the global batch for each of many GPUs, and as small cases: the first by which a
# workload is known, then others.
_EXAMPLES = {
    "cnn": (128, 1024),
    "mlp41m": (128,),
    "resnet50": (32,),
    "gru": (64,),
    "notebook_cnn": (128, 1024),
}
WORKLOADS = tuple(_EXAMPLES)
_SMALL_SHARE = 32  # of these examples
_PRECISIONS = {"resnet50": ("mixed_bfloat16", "float32", "mixed_float16")}  # the first counts most

# A switch, where it can matter, and whether one GPU shows it. cuDNN's GRU takes no part in XLA.
_SWITCHES: dict[str, tuple[tuple[str, ...], bool]] = {
    "on_gpu": (("mlp41m", "gru", "resnet50", "cnn"), True),
    "unplaced": (("resnet50", "mlp41m", "cnn"), True),
    "compiled": (("cnn", "mlp41m", "resnet50", "notebook_cnn"), True),
}


def plan(
    num_devices: int,
    workloads: Collection[str] = WORKLOADS,
    contenders: Collection[str] = CONTENDERS,
    small: bool = False,
) -> list[Case]:
    """The cases in their order, each once.

    Args:
        num_devices: how many GPUs, logical or physical, are compared beside one.
        workloads, contenders: the names to measure.
        small: with batches as small as the small models.
    """
    main, others = _setups(num_devices, small)
    cases = [
        *_headlines(main),
        *_of(main, ("compiled", "fit_no_jit"), many=False),
        *_of(main, (TRIP,)),
        *_of(main, ("limit",)),
        *_headlines(others),
        *_switched(main),
        *_of(others, ("limit",)),
        *_of(main, ("mirrored_one",), one=False),
    ]
    wanted = [case for case in cases if case.workload in workloads and case.contender in contenders]
    return [case for case in dict.fromkeys(wanted) if _is_meant(case)]


def shortened(cases: Sequence[Case]) -> list[Case]:
    """Enough of them to see every contender, and every workload and precision, at work once.

    With towers beside each, so that there is a ratio; and with many devices, where that is planned.
    """
    shown: set = set()
    kept: set[Case] = set()
    for case in sorted(cases, key=lambda case: -case.num_devices):
        new = {case.contender, (case.workload, case.precision)} - shown
        if new:
            kept |= {case, case._replace(contender="towers")}
            shown |= new
    return [case for case in cases if case in kept]


def name_setup(setup: Setup) -> str:
    """"resnet50 bfloat16, 256 on 8 devices"."""
    precision = setup.precision.removeprefix("mixed_")
    shown = "" if precision == "float32" else f" {precision}"
    devices = "1 device" if setup.num_devices == 1 else f"{setup.num_devices} devices"
    return f"{setup.workload}{shown}, {setup.batch_size:,} on {devices}"


def _setups(num_devices: int, small: bool) -> tuple[list[Setup], list[Setup]]:
    """(those by which each workload is known, all the others).

    One GPU and many take the same global batch, which is the same update; one GPU takes what is
    asked for of each of many as well, where that is said.
    """
    main, others = [], []
    for workload, examples in _EXAMPLES.items():
        precision, *precisions = _PRECISIONS.get(workload, ("float32",))
        first, *further = [max(1, n // _SMALL_SHARE) if small else n for n in examples]
        main += _one_and_many(workload, precision, first, num_devices)
        for each in precisions:
            others += _one_and_many(workload, each, first, num_devices)
        for n in further:
            others += [Setup(workload, precision, size, 1) for size in (first, n)]
            others += _one_and_many(workload, precision, n, num_devices)[1:]
    return main, others


def _one_and_many(workload: str, precision: str, examples: int, num_devices: int) -> list[Setup]:
    batch_size = examples * num_devices
    return [Setup(workload, precision, batch_size, n) for n in dict.fromkeys((1, num_devices))]


def _headlines(setups: Sequence[Setup]) -> list[Case]:
    """Towers and the peer that a user would take instead; fit at each global batch, on one GPU."""
    cases = []
    for setup in setups:
        cases.append(Case(*setup, "towers"))
        if setup.num_devices > 1:
            cases.append(Case(*setup, "mirrored"))
        cases.append(Case(*setup._replace(num_devices=1), "fit"))
    return cases


def _of(
    setups: Sequence[Setup], contenders: Sequence[str], one: bool = True, many: bool = True
) -> list[Case]:
    return [
        Case(*setup, contender)
        for setup in setups
        if (many if setup.num_devices > 1 else one)
        for contender in contenders
    ]


def _switched(setups: Sequence[Setup]) -> list[Case]:
    """Towers with one switch at a time, with many GPUs first."""
    return [
        Case(*setup, switch)
        for switch, (workloads, on_one) in _SWITCHES.items()
        for many in (True, False)
        for setup in setups
        if setup.workload in workloads and (setup.num_devices > 1) == many and (many or on_one)
    ]


def _is_meant(case: Case) -> bool:
    """Whether XLA can compile anything of a workload: it takes none of cuDNN's layers."""
    return not (case.workload == "gru" and case.contender in ("compiled", "fit_no_jit"))
