"""Lines, pictures and files of a run for its user."""
