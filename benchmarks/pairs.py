"""Runs contenders in turn, each in a fresh process, and compares them pair by pair.

A machine's speed drifts; the ratio of two runs that follow each other does not.
"""

import csv
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def run_contender(contender: str, **flags: Any) -> dict[str, float]:
    """One process of `contender.py`; returns what it measured.

    Raises:
        RuntimeError: the process failed; holds the end of what it wrote.
    """
    command = [sys.executable, "-m", "benchmarks.contender", f"--contender={contender}"]
    command += [f"--{name}={value}" for name, value in flags.items()]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if run.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{run.stderr[-2000:]}")
    return json.loads(run.stdout.splitlines()[-1])


def compare(
    contender: str, peer: str, measure: str, num_pairs: int, **flags: Any
) -> list[dict[str, Any]]:
    """A contender and a peer in turn, `num_pairs` times.

    Returns:
        A row for each pair: the measure of both, and contender / peer.
    """
    rows = []
    for pair in range(num_pairs):
        ours = run_contender(contender, **flags)
        other = run_contender(peer, **flags)
        rows.append({
            **flags, "contender": contender, "peer": peer, "pair": pair, "measure": measure,
            "value": round(ours[measure], 3), "peer_value": round(other[measure], 3),
            "ratio": round(ours[measure] / other[measure], 3),
            "peak_memory_mb": round(ours["peak_memory_mb"]),
            "peer_peak_memory_mb": round(other["peak_memory_mb"]),
        })
        print("  ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    median = statistics.median(row["ratio"] for row in rows)
    print(f"{contender} / {peer}: median ratio {median:.2f} of {num_pairs} pairs", flush=True)
    return [{**row, "median_ratio": median} for row in rows]


def machine() -> dict[str, str]:
    """What the figures were measured on."""
    from importlib.metadata import version

    return {
        "cores": str(len(os.sched_getaffinity(0))), "processor": processor(),
        "python": platform.python_version(), "tensorflow": version("tensorflow"),
        "keras": version("keras"),
    }


def processor() -> str:
    """The processor's name, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((s.split(":")[1].strip() for s in lines if s.startswith("model name")), "unknown")


def append_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Appends rows, with the machine and the command that made them; writes a header if new."""
    command = "python " + " ".join([f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    rows = [{**row, **machine(), "command": command} for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        if is_new:
            writer.writeheader()
        writer.writerows(rows)
