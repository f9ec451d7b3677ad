"""Uses a trained model: evaluates it, predicts, and exports it for use without towers."""
