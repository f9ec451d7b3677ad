"""Examples that are read one by one, also by processes of their own: no TensorFlow in here."""
