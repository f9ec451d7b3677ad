"""Launches the workers of one run as processes on this machine, each with its TF_CONFIG.

    __main__.py   the command
    launcher.py   gives each worker its TF_CONFIG and GPUs; restarts with one worker less
    supervise.py  runs all workers until the last has ended
"""
