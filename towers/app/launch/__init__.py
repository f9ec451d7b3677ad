"""The launcher: the workers of one run as processes on this machine, each with its TF_CONFIG.

    __main__.py            the command
    worker_environment.py  TF_CONFIG, addresses, and the GPUs of each worker
    command.py             the command of each worker, at first and after one was lost
    worker.py              a worker's process and its lines
    screen.py              the terminal
    supervise.py           runs all workers until the last has ended; passes signals on
    launcher.py            starts again with one worker less after one was lost
"""
