"""`python -m towers.launch`: the command of towers/app/launch."""

import sys

from towers.app.launch.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
