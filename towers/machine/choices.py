"""Lists the choices for options of a step, for library and flags; imports no TensorFlow."""

BATCH_NORM = ("average", "synchronized", "tower0")
STRATEGIES = ("parameter_server", "mirrored", "sharded")
NONFINITE = ("apply", "stop", "skip")
ASYNC = "async"
ASYNC_REFUSED = (
    "strategy=async: towers is synchronous; updates with gradients of older parameters are another "
    "computation. `python -m experiments.staleness`, in a checkout, shows what they cost. Use "
    "strategy=parameter_server or strategy=mirrored."
)
