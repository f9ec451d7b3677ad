"""Finds the best batch and GPU count: the command of towers/app/sweep/__main__.py, from a checkout.

python sweep.py --batch_sizes=64,128,256 --gpu_counts=1,2,4,8 --model=cnn --max_steps=100
"""

import sys

from towers.app.sweep.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
