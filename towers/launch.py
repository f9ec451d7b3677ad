"""Runs the command of towers/app/launch: `python -m towers.launch`."""

import sys

from towers.app.launch.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
