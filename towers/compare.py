"""Runs the command of towers/app/compare.py: `python -m towers.compare`."""

import sys

from towers.app.compare import main

if __name__ == "__main__":
    sys.exit(main())
