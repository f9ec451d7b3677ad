"""The launcher: the workers of one run as processes on this machine, each with its TF_CONFIG.

    __main__.py    the command
    cluster.py     TF_CONFIG, addresses
    gpus.py        which worker gets which GPUs
    command.py     what a worker runs, at first and after one was lost
    worker.py      a worker's process
    lines.py       what it says, line by line; errors wait until it is known which was the first
    screen.py      what the terminal shows of all of them
    stop.py        Ctrl-C and SIGTERM, passed on
    cause.py       how the workers have ended, and which end explains the others
    supervise.py   all workers, from their start to the end of the last
    run.py         the same again, with one worker less, where one was lost
"""
