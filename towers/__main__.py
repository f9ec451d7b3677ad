"""Runs the command of towers/app: `python -m towers`."""

import sys

from towers.app.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
