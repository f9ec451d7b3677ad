#!/bin/sh
# worker.sh RUN_DIR FLAGS: begins the run in RUN_DIR, or resumes it.
run=$1; shift
# The run is your own, so its modules may be imported.
if [ -s "$run/config.json" ]; then
    exec python train.py --trust_run_dir --resume="$run"
fi
exec python train.py --run_dir="$run" "$@"
