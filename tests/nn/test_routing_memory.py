"""Scratch memory of the compiled routing belongs to it while other threads allocate.

Compiled code frees an array after its last use, and a pointer into it is no use: before the arrays
were kept on purpose, this aborted with a damaged heap or gave other numbers. One malloc arena makes
threads reuse each other's freed blocks at once.
"""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import threading, numpy as np, torch
torch.set_num_threads(1)
from cimage_dist.nn.kernels.cpu import routing as routing_cpu
from cimage_dist.nn.routing import Routing
generator = torch.Generator().manual_seed(0)
nodes = 1500
x, grad = (torch.randn(nodes, 4, 8, generator=generator) for _ in range(2))
degrees = torch.randint(3, 12, (nodes,), generator=generator)
indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degrees.cumsum(0)])
ids = torch.randint(0, nodes, (int(indptr[-1]),), generator=generator)

def run():
    call = Routing(x, indptr, ids, None, 0, 4, 1.0, False, True, True)
    return routing_cpu.forward(call), routing_cpu.backward(grad, call)[0]

first, done = run(), threading.Event()

def disturb():
    while not done.is_set():
        sizes = (50, 100, 300, 512, 700, 1000, 1500, 2000, 3000)
        rows = [np.full(size, np.nan, np.float32) for size in sizes]

threads = [threading.Thread(target=disturb) for _ in range(2)]
[t.start() for t in threads]
same = all(torch.equal(a, b) for _ in range(60) for a, b in zip(run(), first))
done.set()
[t.join() for t in threads]
print("same" if same else "different")
"""


def test_other_threads_do_not_disturb_it():
    env = os.environ | {"MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "same"), done.stderr[-500:]
