"""What a trained model is for: scores, predictions, and a file that serves without towers."""
