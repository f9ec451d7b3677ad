"""`make_parallel` runs any Keras model on towers. Its `fit` can resume where it was killed."""
