"""Runs a custom train_step on towers: traces it once, cuts it at collectives, runs the levels.

A GAN's step, on two towers:

    level 0   tower 0   D(real), D(G(noise)), loss, gradient of D --+
              tower 1   D(real), D(G(noise)), loss, gradient of D --+-- collective: their sum
    level 1   home                                                  +-- D's optimizer: one update
    level 2   tower 0   the updated D(G(noise)), loss, gradient of G --+
              tower 1   the updated D(G(noise)), loss, gradient of G --+-- collective: their sum
    level 3   home                                                     +-- G's optimizer: one update
    ...       home      running means of the losses, which are the logs

    trace.py             traces the step once          variables.py  records reads, assignments
    step_collectives.py  records collectives           patches.py    replaces calls to add these
    run_step.py          runs the levels, which towers/graph cuts; `home` is the parameter device

A mean over the shard weighs n_i / N in the batch's mean; rows, and sums over rows, count as they
are. towers/graph tells means from sums, and warns of values that are neither.
"""

from towers.custom_step.run_step import CustomStep

__all__ = ["CustomStep"]
