"""`make_parallel`: any Keras model on towers; and its `fit`, which goes on where it was killed."""
