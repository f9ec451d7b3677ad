"""Lines and pictures of a run while it runs."""
