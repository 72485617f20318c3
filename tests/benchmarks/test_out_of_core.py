"""The benchmark of graphs larger than memory, on a small one; what it rests on, under a limit."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cimage_dist.io import artifacts

ROOT = Path(__file__).parents[2]

NODES = 8_000_000

# Makes a batch, finds the trusted labels and draws keyed samples on a store whose arrays of N
# entries are larger than the private memory that is left.
PROGRAM = """
import resource, sys
from pathlib import Path
import numpy as np, torch
from cimage_dist import comm, keyed
from cimage_dist.ci.pseudolabels import select_confident
from cimage_dist.comm import even_sample
from cimage_dist.sampling.loader import BatchSource
from cimage_dist.train.initial import read_labels
torch.set_num_threads(1)
folder = Path(sys.argv[1])
part = lambda name: np.load(folder / name, mmap_mode="r")
def work(indptr, indices, x, found):
    source = BatchSource(
        indptr, indices, fanouts=[3, 2], batch_edges=16, seed=0, hide_rate=0.3, features=x
    )
    batch = source[1]
    assert batch.x.shape[1] == 2 and batch.pairs.shape == (32, 2)
    nodes = len(indptr) - 1
    key = keyed.stream(0, "refresh-sample")
    base = select_confident(found.labels, found.confidence, range(nodes))
    kept = even_sample(lambda rows: found.labels[rows], range(nodes), 4, 100, key)
    assert np.count_nonzero(base) >= 0.15 * nodes and np.count_nonzero(kept) == 100
    assert len(keyed.highest(key, nodes, 10)) == 10
    assert abs(len(keyed.below(key, 1e-4, 0, nodes)) - 1e-4 * nodes) < 6 * (1e-4 * nodes) ** 0.5 + 1
comm._PART_ROWS = keyed._PART = 1 << 16
given = part("indptr.npy"), part("indices.npy"), part("x.npy")
given = (*given, read_labels(folder / "labels", len(given[0]) - 1))
few = 4000
indptr = np.arange(few + 1, dtype=np.int64)
ring = np.arange(few, dtype=np.int32).reshape(-1, 2)[:, ::-1].reshape(-1)
for array in (indptr, ring):
    array.setflags(write=False)  # as mapped files are: other code is compiled for these
found = type(given[3])(given[3].labels[:few], given[3].confidence[:few])
work(indptr, ring, np.zeros((few, 2), np.float16), found)  # libraries and compiled code
status = Path("/proc/self/status").read_text()
size = 1024 * int(status.split("VmData:")[1].split()[0])
resource.setrlimit(resource.RLIMIT_DATA, (size + int(sys.argv[2]),) * 2)
work(*given)
"""
COPY = "copy = np.array(given[0])"  # one array of N entries too many


@pytest.fixture(scope="module")
def large_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs of nodes."""
    folder, nodes = tmp_path_factory.mktemp("store"), NODES
    np.save(folder / "indptr.npy", np.arange(nodes + 1, dtype=np.int64))
    pairs = np.arange(nodes, dtype=np.int32).reshape(-1, 2)[:, ::-1]
    np.save(folder / "indices.npy", np.ascontiguousarray(pairs).reshape(-1))
    x = np.lib.format.open_memmap(folder / "x.npy", "w+", np.float16, (nodes, 2))
    x.flush()  # a file with holes
    with artifacts.committed_dir(folder / "labels") as tmp:
        np.save(tmp / "labels.npy", np.arange(nodes) % 4)
        np.save(tmp / "confidence.npy", np.random.default_rng(0).random(nodes))
        files = artifacts.describe_files(tmp, ["labels.npy", "confidence.npy"])
        artifacts.write_json(tmp / artifacts.MANIFEST, {"files": files, "facts": {}})
    return folder


@pytest.mark.parametrize("also", ["", COPY])
def test_nothing_of_n_entries_is_private(large_store: Path, also: str) -> None:
    """Beside the mapped files there is room for less than eight bytes a node: marks of one byte a
    node fit, and parts of 65,536 rows.
    """
    room = 8 * NODES - (1 << 20)
    command = [sys.executable, "-c", PROGRAM + also, str(large_store), str(room)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if also:
        assert "MemoryError" in done.stderr, done.stderr[-2000:]
    else:
        assert done.returncode == 0, done.stderr[-2000:]


def test_the_benchmark_runs_small(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    sizes = "--scale 0.0001 --batch 8 --fanouts [3,2,2] --steps 2 --samples 200 --rows 64"
    command = [sys.executable, "benchmarks/out_of_core.py", *sizes.split(), "--limits", "2"]
    done = subprocess.run(
        [*command, "--json", str(out)], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(out.read_text())
    assert found["large"]["build"]["nodes"] == 11106
    assert set(found["large"]["train"]["warm"]) == set(found["small"]["train"]["cold"])
    limited = found["limits"]["2"]
    assert "not_possible" in limited or limited["refresh"]["confident"] > 0
    assert re.search(r"large: 11,106 nodes, 1\d\d,\d{3} undirected edges", done.stdout)
