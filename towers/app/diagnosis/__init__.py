"""Shows where a step runs, whether its gradient is right, and where its time goes."""
