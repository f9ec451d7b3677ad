"""What a run says and draws while it runs."""
