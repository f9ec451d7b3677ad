"""Runs every benchmark, one after the other, and writes the one table that all pages show.

    python benchmarks/all.py --peers_python=VENV/bin/python    # about 75 minutes on 2 cores, as root
    python benchmarks/all.py --quick    # a smoke run: small models, one round; changes no page

Close other programs first. VENV holds the peers of benchmarks/exactness.py.

The results of each command go into a file of --parts. If the call is interrupted, run it again: it
continues with the commands that are left. Then it joins the files to benchmarks/results.csv, and
writes the figures of README and docs/ and their pictures.
"""

import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from absl import app, flags

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import chart, readme, rounds
from benchmarks.process import run_process

_QUICK = flags.DEFINE_bool("quick", False, "Try every command with small models, in one round.")
_PARTS = flags.DEFINE_string(
    "parts", "benchmarks/parts", "Folder for the results of each command. --quick uses its own."
)

_PEERS_PYTHON = flags.DEFINE_string(
    "peers_python", None, "The Python that benchmarks/exactness.py uses for its peers."
)

_THROUGHPUT = "throughput.py --workloads"
_QUICK_THROUGHPUT = "--workloads=tiny --rounds=1 --steps=3 --num_devices=2"
_RECOVERY = "--losses=3 --train=--max_steps=200 --train=--checkpoint_every=5"
# Each command, and the flags that a smoke run adds to it.
COMMANDS = [
    ("exactness.py", "--ways=towers --cases=R2Score"),
    ("memory.py", "--models=MobileNetV2 --megabytes=50"),
    (
        f"{_THROUGHPUT}=cnn,notebook_cnn --num_devices=4 --peers=fit,mirrored,limit",
        _QUICK_THROUGHPUT,
    ),
    (f"{_THROUGHPUT}=mlp41m,gru --num_devices=2 --peers=fit,mirrored,limit", _QUICK_THROUGHPUT),
    (f"{_THROUGHPUT}=mlp --num_devices=2 --peers=fit,mirrored", _QUICK_THROUGHPUT),
    (
        f"{_THROUGHPUT}=dcgan --num_devices=2 --contender=parallel --peers=fit,mirrored",
        _QUICK_THROUGHPUT,
    ),
    ("epochs.py", "--workloads=transformer --rounds=1"),
    (
        f"first_epochs.py --models={','.join(readme.MODELS.split())}",
        "--models=MobileNet --rounds=1",
    ),
    *(
        (
            f"recovery.py --fault={fault} {_RECOVERY} --train=--worker_timeout=5",
            "--losses=1 --train=--model=mlp --train=--max_steps=100",
        )
        for fault in readme.FAULTS
    ),
    (
        "placements.py --rounds=1",
        "--workload=mlp --num_devices=2 --compared=copies:towers,stages_2:towers",
    ),
    ("exchange.py", "--rounds=1 --workers=2"),
    ("data.py", "--limit_mib=640 --seconds=1"),
    ("checkpointing.py --rounds=3", "--model=mlp --rounds=1 --steps=120"),
]


def measure_exactness() -> dict[str, dict[str, float | None]]:
    """Returns the table of examples/what_others_get_wrong.py; call it in a fresh process."""
    from examples import what_others_get_wrong

    return what_others_get_wrong.main()


def compare_weights(out: Path) -> None:
    """Appends what devices compute, as differences from the weights of one device."""
    rows = [
        {
            "benchmark": "exactness",
            "workload": case,
            "num_devices": 4,
            "contender": way,
            "measure": "difference",
            "round": 0,
            "value": "raises" if value is None else value,
        }
        for case, differences in run_process("all.measure_exactness").items()
        for way, value in differences.items()
    ]
    rounds.append_csv(str(out), rows)


def run_command(command: str, out: Path) -> None:
    """Runs a command of this folder, which writes its rows to a file.

    Raises:
        CalledProcessError: The command failed.
    """
    words = shlex.split(f"{command} --out={out}")
    if words[0] == "exactness.py":
        words += [f"--peers_python={_PEERS_PYTHON.value}"] if _PEERS_PYTHON.value else []
    subprocess.run([sys.executable, f"benchmarks/{words[0]}", *words[1:]], cwd=ROOT, check=True)


def measure_all(parts: Path, is_quick: bool) -> list[Path]:
    """Runs the commands whose files are missing; returns the files of all commands."""
    parts.mkdir(parents=True, exist_ok=True)
    files = []
    for index, (command, quick) in enumerate([("exactness", ""), *COMMANDS]):
        part = parts / f"{index:02}.csv"
        files.append(part)
        if part.exists():
            continue
        print(f"\n{index + 1} of {len(COMMANDS) + 1}: {command}", flush=True)
        begun = part.with_suffix(".begun")
        begun.unlink(missing_ok=True)  # a part of the rows, from a call that was interrupted
        if command == "exactness":
            compare_weights(begun)
        else:
            run_command(f"{command} {quick if is_quick else ''}", begun)
        begun.rename(part)
    return files


def join(files: list[Path], target: Path) -> None:
    """Writes the rows of all files to one."""
    header, *_ = files[0].read_text(encoding="utf-8").splitlines(keepends=True)
    texts = [file.read_text(encoding="utf-8").removeprefix(header) for file in files]
    target.write_text(header + "".join(texts), encoding="utf-8")


def main(argv: list[str]) -> None:
    """Measures, then writes the table, the pages and the pictures."""
    del argv
    if _QUICK.value:
        with tempfile.TemporaryDirectory() as folder:
            join(measure_all(Path(folder), is_quick=True), Path(folder, "results.csv"))
        return
    join(measure_all(ROOT / _PARTS.value, is_quick=False), rounds.RESULTS)
    chart.draw(rounds.RESULTS, ROOT / "docs" / "images" / "throughput.png")
    if readme.main():
        raise SystemExit("error: the table lacks rows that the pages show")


if __name__ == "__main__":
    app.run(main)
