#!/bin/sh
# worker.sh RUN_DIR FLAGS: begins the run in RUN_DIR, or resumes it.
run=$1; shift
if [ -s "$run/config.json" ]; then exec python train.py --resume="$run"; fi
exec python train.py --run_dir="$run" "$@"
