"""A run on object storage whose two workers are on nodes that share no file system: each node has a
working copy of its own. A few minutes on a small machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cimage_dist.io import mirror
from cimage_dist.io.checkpoint import load_rows
from tests.distributed.conftest import (
    CHECKPOINT_EVERY,
    SETTINGS,
    Cluster,
    Expected,
    Run,
    cluster_of,
    wait_until,
)
from tests.io.test_mirror import server  # noqa: F401  (a fixture)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two nodes need two CPUs"),
]


@pytest.fixture(scope="module")
def cluster(server: str) -> Iterator[Cluster]:  # noqa: F811
    """The head and one further node, with room for one worker each."""
    with cluster_of(0, 1) as nodes:
        nodes.start(1, 1, CIMAGE_CACHE=str(nodes.folder / "cache-0"))
        nodes.add_node(1, CIMAGE_CACHE=str(nodes.folder / "cache-1"))
        yield nodes


def copy_on(cluster: Cluster, machine: str, url: str) -> Path:
    """Where that machine has its working copy."""
    code = (
        "import sys; from cimage_dist.config import working_copy; print(working_copy(sys.argv[1]))"
    )
    env = os.environ | {"CIMAGE_CACHE": str(cluster.folder / machine)}
    told = subprocess.run(
        [sys.executable, "-c", code, url], env=env, capture_output=True, text=True, check=True
    )
    return Path(told.stdout.strip())


def pretrain(cluster: Cluster, url: str) -> Run:
    """The driver has a working copy of its own too."""
    cache = str(cluster.folder / "cache-driver")
    words = [*SETTINGS, f"run.dir={url}", "--on", "ray", "--json"]
    process = cluster.cimage("pretrain", *words, CIMAGE_CACHE=cache)
    return Run(copy_on(cluster, "cache-driver", url), process)


def test_a_killed_worker_and_a_killed_driver(cluster: Cluster, server: str) -> None:  # noqa: F811
    expected = Expected.of(cluster.pretrain("whole"))
    url = f"{server}/on-ray/run"
    run = pretrain(cluster, url)
    run.wait_for_step(CHECKPOINT_EVERY)  # seen through the storage
    cluster.workers()[1].kill()
    run.wait(lambda: len(run.attempts()) > 1, "another start of the workers")
    run.process.kill()
    run.process.communicate()
    wait_until(lambda: not cluster.workers(), "the end of the workers of a killed driver")
    again = pretrain(cluster, url)
    expected.check(again)
    assert len(again.attempts()) >= 3

    words = [*SETTINGS, f"run.dir={url}", "resources.num_workers=1", "--on", "ray", "--json"]
    embed = cluster.cimage("embed", *words, CIMAGE_CACHE=str(cluster.folder / "cache-0"))
    assert embed.wait() == 0, embed.communicate()
    os.environ["CIMAGE_CACHE"] = str(cluster.folder / "cache-reader")
    try:
        rows = load_rows(mirror.open_place(url).embeddings)
    finally:
        del os.environ["CIMAGE_CACHE"]
    plain = cluster.cimage("embed", *SETTINGS, "run.dir=whole", "--json")
    assert plain.wait() == 0, plain.communicate()
    np.testing.assert_allclose(rows, load_rows(cluster.folder / "whole/embeddings"), atol=1e-5)
