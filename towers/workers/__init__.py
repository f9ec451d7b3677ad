"""The processes of one run: which there are, what they send each other, which was lost."""
