"""`fit` that goes on where its process was killed: `towers.Resume`."""
