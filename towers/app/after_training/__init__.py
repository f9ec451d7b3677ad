"""Uses of a trained model: scores, predictions, and a file that serves without towers."""
