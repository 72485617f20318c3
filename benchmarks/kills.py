"""Training on Ray is killed at random moments: does every run end with the bits of an undisturbed
one, how many steps are repeated, and how long does it take to notice and to start again?

    python benchmarks/kills.py [--worker 20] [--driver 5] [--node 5] [--frozen 2] [--silent 1]
        [--record]

Two Ray nodes of one CPU each on this machine, two sampled workers, one on each; several kills in
each run of STEPS steps. `noticed_s`: until the workers that were left have ended; `restarted_s`:
until the new ones have read their checkpoint, `restart_cpu_s` of it CPU time of the busiest of
them. A killed driver is started again by hand, so only `restarted_s` counts there. A frozen worker
and a silent node (all its processes: a machine that is gone without a word) are stopped, not
killed, and counted beside the kills.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from hardware import facts

from cimage_dist.config import ResourcesConfig
from cimage_dist.io import checkpoint
from tests.distributed.conftest import Cluster, Run, cluster_of, kill_node, processes_of, wait_until

STEPS, EVERY = 480, 20
KILLS_OF_A_RUN = 5
KINDS = {"worker": 20, "driver": 5, "node": 5, "frozen": 2, "silent": 1}
RESULT = Path(__file__).parent / "results" / "kills.json"
# What the program sets by itself, in place of the tests' shorter ones.
PATIENCE = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "1",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "15",
}
SETTINGS = (
    "train.epochs=32",
    f"run.checkpoint_every={EVERY}",
    "resources.max_failures=100",
    f"resources.lost_after_s={ResourcesConfig().lost_after_s}",
)
# As in k8s/base/cluster.yaml and launch/slurm.sbatch.
HEAD = {
    "RAY_health_check_period_ms": "2000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "3",
}


def start(cluster: Cluster, name: str) -> Run:
    return cluster.pretrain(name, *SETTINGS, **PATIENCE)


def outcome(run: Run) -> tuple[dict[str, torch.Tensor], Any, list[float]]:
    run.finish()
    saved = checkpoint.load_latest(run.root / "ckpt")
    assert saved is not None and saved.step == STEPS
    return saved.tensors, saved.meta, [record["loss"] for record in run.records()]


def is_equal(found: Any, expected: Any) -> bool:
    """Weights, optimiser, partition and every loss, to the bit; every step recorded once."""
    tensors, meta, losses = expected
    return (
        found[1:] == (meta, losses)
        and found[0].keys() == tensors.keys()
        and all(torch.equal(found[0][name], tensors[name]) for name in tensors)
    )


def cpu_seconds(processes: list[psutil.Process]) -> float:
    """Of the busiest of them, since it started."""
    most = 0.0
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            most = max(most, times.user + times.system)
    return most


def gone(victims: list[psutil.Process]) -> bool:
    return not any(
        process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in victims
    )


def disturb(cluster: Cluster, run: Run, kind: str, draw: random.Random) -> tuple[Run, Any]:
    """Kill (or freeze) once, wait for the next start of the workers, and say what it cost."""
    run.wait(lambda: len(cluster.workers()) == 2, "two workers")
    workers = before = cluster.workers()
    count, node = len(run.attempts()), cluster.nodes()[-1]
    victim = draw.choice(workers)
    is_rank_0 = kind in ("worker", "frozen") and victim.pid == cluster.holder(run.root).pid
    began = time.time()
    if kind == "worker":
        victim.kill()
    elif kind == "frozen":
        victim.suspend()
    elif kind == "driver":
        run.process.kill()
        run.process.communicate()
    elif kind == "node":
        kill_node(node)
    else:
        silent = processes_of(node)
        for process in silent:
            process.suspend()
        workers = [worker for worker in workers if worker not in silent]  # the others end by Ray
    time.sleep(0.3)
    reached = run.step()  # nobody continues without the others
    wait_until(lambda: gone(workers), "the end of the workers")
    noticed = time.time() - began
    if kind == "driver":
        began = time.time()
        run = start(cluster, run.root.name)
    if kind in ("node", "silent"):
        cluster.add_node()
    run.wait(lambda: len(run.attempts()) > count, "another start of the workers")
    attempt = run.attempts()[count]
    used = cpu_seconds([worker for worker in cluster.workers() if worker not in before])
    if kind == "silent":
        kill_node(node)
    with suppress(psutil.NoSuchProcess):
        victim.kill()
    about = {"kind": kind, "run": run.root.name, "at_step": reached}
    about |= {"rank_0": is_rank_0} if kind in ("worker", "frozen") else {}
    about |= {
        "steps_lost": reached - attempt["after_step"],
        "noticed_s": None if kind == "driver" else round(noticed, 1),
        "restarted_s": round(attempt["unix_time"] - began, 1),
        "restart_cpu_s": round(used, 1),
        "load": round(os.getloadavg()[0], 1),
    }
    print(json.dumps(about), flush=True)
    return run, about


def middle(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "most": max(values)}


def summary(events: list[dict[str, Any]]) -> dict[str, Any]:
    found = {}
    for kind in KINDS:
        own = [event for event in events if event["kind"] == kind]
        if own:
            found[kind] = {
                "count": len(own),
                "bit_equal": sum(event["bit_equal"] for event in own),
            } | {
                name: middle([event[name] for event in own])
                for name in ("steps_lost", "noticed_s", "restarted_s", "restart_cpu_s")
                if own[0][name] is not None
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for kind, count in KINDS.items():
        parser.add_argument(f"--{kind}", type=int, default=count)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", action="store_true", help=f"write {RESULT.name}")
    args = parser.parse_args()
    draw = random.Random(args.seed)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    kinds = [kind for kind in KINDS for _ in range(getattr(args, kind))]
    draw.shuffle(kinds)
    events: list[dict[str, Any]] = []
    with cluster_of(0, 1) as cluster:
        cluster.start(1, 1, **HEAD)
        cluster.add_node()
        expected = outcome(start(cluster, "whole"))
        for index in range(0, len(kinds), KILLS_OF_A_RUN):
            own = kinds[index : index + KILLS_OF_A_RUN]
            moments = sorted(draw.sample(range(1, STEPS - 2 * EVERY), len(own)))
            run, made = start(cluster, f"run-{index}"), []
            for moment, kind in zip(moments, own, strict=True):
                run.wait_for_step(moment)
                time.sleep(draw.uniform(0, 0.3))
                run, about = disturb(cluster, run, kind, draw)
                made.append(about)
            equal = is_equal(outcome(run), expected)
            events += [about | {"bit_equal": equal} for about in made]
            print(f"{run.root.name}: bit-equal {equal}", flush=True)
            result = {"hardware": facts(1), "steps": STEPS, "checkpoint_every": EVERY}
            result |= {"complete": len(events) == len(kinds)}
            result |= {"summary": summary(events), "events": events}
            if args.record:  # after each run, so that a benchmark that is stopped leaves its part
                RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(summary(events), indent=2))
    sys.exit(not all(event["bit_equal"] for event in events))


if __name__ == "__main__":
    main()
