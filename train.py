"""Trains a model: the command of towers/app/__main__.py, from a checkout.

python train.py --num_gpus=8 --batch_size=128
"""

import sys

from towers.app.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
