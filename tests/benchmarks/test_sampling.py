"""The benchmark of the data path: another version of the code makes the same batches."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_it_compares_with_another_tree() -> None:
    sizes = "--nodes 300 --degree 4 --batch 8 --rounds 2 --features 4 --fanouts 3 2"
    command = [sys.executable, "benchmarks/sampling.py", *sizes.split(), "--baseline", str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "the same bits" in done.stdout and "bound: " in done.stdout
