"""Lists the choices for options of a step, for library and flags; imports no TensorFlow."""

from dataclasses import dataclass

BATCH_NORM = ("average", "synchronized", "tower0")
NONFINITE = ("apply", "stop", "skip")
ADD_ON = ("auto", "cpu")


@dataclass(frozen=True)
class Strategy:
    """Says which devices have the parameters and update them; the defaults are for one device.

    has_copies: whether each tower device has a copy of the parameters.
    has_owners: whether one device updates each parameter and keeps its slots, instead of all.
    refuses_stages: why layers cannot be on several devices, and what to do instead; "" allows it.
    """

    has_copies: bool = False
    has_owners: bool = False
    refuses_stages: str = ""

    def __post_init__(self) -> None:
        assert self.has_copies or not self.has_owners, "owners send parameters to the other copies"


_COPIES = "a device of a stage needs that stage's parameters alone. Use strategy=parameter_server."
STRATEGIES = {
    "parameter_server": Strategy(),
    "mirrored": Strategy(has_copies=True, refuses_stages=_COPIES),
    "sharded": Strategy(has_copies=True, has_owners=True, refuses_stages=_COPIES),
}
ASYNC = "async"
ASYNC_REFUSED = (
    "strategy=async: towers is synchronous; updates with gradients of older parameters are another "
    "computation. `python -m experiments.staleness`, in a checkout, shows what they cost. Use "
    "strategy=parameter_server or strategy=mirrored."
)
