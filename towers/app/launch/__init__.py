"""Launches the workers of one run as processes on this machine, each with its TF_CONFIG.

    __main__.py            the command
    worker_environment.py  TF_CONFIG, addresses, and the GPUs of each worker
    supervise.py           runs all workers until the last has ended
    launcher.py            restarts with one worker less after a worker was lost
"""
