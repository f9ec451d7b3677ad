"""A model's own train_step on towers: traced once, cut where the towers meet, run level by level.

A GAN's step, on two towers:

    level 0   tower 0   D(real), D(G(noise)), loss, gradient of D --+
              tower 1   D(real), D(G(noise)), loss, gradient of D --+-- collective: their sum
    level 1   home                                                  +-- D's optimizer: one update
    level 2   tower 0   D, as it is now, of G(noise); gradient of G --+
              tower 1   D, as it is now, of G(noise); gradient of G --+-- collective: their sum
    level 3   home                                                    +-- G's optimizer: one update
    ...       home      running means of the losses, which are the logs

    trace.py             the step once, symbolically  variables.py  what it reads and assigns
    step_collectives.py  where towers meet            patches.py    the calls that make them meet
    run_step.py          the levels, which towers/graph cuts, on the towers' devices

A scalar is the batch's mean, and weighs n_i / N; what has a batch axis, or is a sum over one,
counts by its rows. towers/graph tells them apart, and warns of what is neither.
"""

from towers.custom_step.run_step import OwnStep

__all__ = ["OwnStep"]
