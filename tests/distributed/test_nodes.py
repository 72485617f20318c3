"""Training across real Ray nodes that come and go. Each run takes two to four minutes on a small
machine.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from cimage_dist.io import checkpoint
from tests.distributed.conftest import (
    CHECKPOINT_EVERY,
    STEPS,
    Cluster,
    Expected,
    Run,
    cluster_of,
    kill_node,
    processes_of,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two nodes need two CPUs"),
]

KILLS = 3


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """The head and one further node, with room for one worker each: two workers are on two
    nodes.
    """
    with cluster_of(2, 1) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def expected(cluster: Cluster) -> Expected:
    run = cluster.pretrain("whole")
    run.wait_for_step(1)
    assert workers_by_node(cluster) == dict.fromkeys(cluster.nodes(), 1)
    return Expected.of(run)


def workers_by_node(cluster: Cluster) -> dict[int, int]:
    pids = {worker.pid for worker in cluster.workers()}
    return {
        node: len(pids & {process.pid for process in processes_of(node)})
        for node in cluster.nodes()
    }


def lose_a_node(cluster: Cluster, run: Run) -> int:
    """Kill the node that is not the head; the last step that was recorded."""
    kill_node(cluster.nodes()[-1])
    time.sleep(0.5)
    assert len(cluster.nodes()) == 1
    return run.step()


@pytest.mark.parametrize("index", range(KILLS))
def test_a_lost_node_is_replaced(
    index: int, cluster: Cluster, expected: Expected, record_property: Any
) -> None:
    """A run of fixed size waits for the replacement and ends as if nothing had been."""
    draw = random.Random(100 + index)
    run = cluster.pretrain(f"lost-{index}")
    run.wait_for_step(draw.randint(1, STEPS - 10))
    time.sleep(draw.uniform(0, 0.3))
    reached, lost_at = lose_a_node(cluster, run), time.time()
    assert reached < STEPS, "the kill came too late"
    cluster.add_node()
    run.wait(lambda: len(run.attempts()) > 1, "the start on the new node")
    attempt = run.attempts()[1]
    lost = reached - attempt["after_step"]
    expected.check(run)
    assert 0 <= lost <= CHECKPOINT_EVERY and attempt["workers"] == 2
    facts = {
        "killed_at": reached,
        "steps_lost": lost,
        "seconds_to_go_on": round(attempt["unix_time"] - lost_at, 1),
    }
    print(f"node {index}: {facts}")
    for name, value in facts.items():
        record_property(name, value)


def test_an_elastic_run_shrinks_and_grows(cluster: Cluster) -> None:
    """Two workers, one while a node is missing, two again; every global batch once, in the planned
    order.
    """
    epochs = 100_000  # a node comes up meanwhile, however long it takes; then the run is stopped
    run = cluster.pretrain(
        "elastic", "resources.min_workers=1", f"train.epochs={epochs}", CIMAGE_RESIZE_EVERY_S="5"
    )
    run.wait_for_step(2 * CHECKPOINT_EVERY)
    assert run.attempts()[0]["workers"] == 2
    reached, lost_at = lose_a_node(cluster, run), time.time()
    run.wait(lambda: run.attempts()[-1]["workers"] == 1, "one worker to continue")
    shrunk = run.attempts()[-1]
    assert 0 <= reached - shrunk["after_step"] <= CHECKPOINT_EVERY
    print(
        f"shrunk after {shrunk['unix_time'] - lost_at:.0f} s, {reached - shrunk['after_step']} "
        "steps lost"
    )
    run.wait_for_step(shrunk["after_step"] + 2 * CHECKPOINT_EVERY)
    cluster.add_node()
    joined = time.time()
    run.wait(lambda: run.attempts()[-1]["workers"] == 2, "two workers again")
    grown = run.attempts()[-1]
    assert grown["after_step"] > shrunk["after_step"]
    print(f"grown {grown['unix_time'] - joined:.0f} s after the node joined")
    run.wait_for_step(grown["after_step"] + 2 * CHECKPOINT_EVERY)
    run.process.terminate()
    run.finish(143)
    saved = checkpoint.load_latest(run.root / "ckpt")
    assert saved is not None
    assert [record["step"] for record in run.records()] == list(range(1, saved.step + 1))
    assert {record["total_steps"] for record in run.records()} == {epochs * STEPS // 4}
