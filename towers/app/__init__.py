"""train.py and what it needs: everything of towers that is no part of the library."""
