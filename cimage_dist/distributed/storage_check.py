"""Before the first step: every node writes into the run directory, and every node reads what the others wrote."""

from __future__ import annotations

import secrets
import shutil
import time
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cimage_dist.errors import UserError

SEEN_WITHIN_S = 40.0
"""Network file systems cache what a folder holds, NFS by default up to 30 s (acdirmin)."""
ANSWER_WITHIN_S = 180.0
ADVICE = "Put run.dir on storage that all nodes mount at the same place, or set CIMAGE_STORAGE to such a folder."


def check_storage(run_root: Path) -> None:
    """Raise UserError with the names of the nodes that cannot write the run directory or do not see each other's files there."""
    run_root = Path(run_root).absolute()
    if "runtime_resources" in run_root.parts:
        raise UserError(f"The run directory {run_root} lies in the job's copy of the working directory, which Ray deletes. {ADVICE}")
    probe = run_root / f".storage-check-{secrets.token_hex(8)}"
    try:
        probe.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"The run directory {run_root} cannot be written ({error.strerror}). {ADVICE}") from None
    try:
        nodes = {
            node["NodeID"]: f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}, node {node['NodeID'][:8]})" for node in ray.nodes() if node["Alive"]
        }
        _complain(nodes, _on_each(nodes, _write, str(probe)), f"These nodes cannot write the run directory {run_root}")
        _complain(
            nodes, _on_each(nodes, _read, str(probe), nodes, SEEN_WITHIN_S), f"These nodes do not see what others wrote into the run directory {run_root}"
        )
    finally:
        shutil.rmtree(probe, ignore_errors=True)


def _complain(nodes: dict[str, str], answers: dict[str, str], what: str) -> None:
    if bad := {node: text for node, text in answers.items() if text}:
        raise UserError(f"{what}: {'; '.join(f'{nodes[node]}: {text}' for node, text in bad.items())}. {ADVICE}")


def _on_each(nodes: dict[str, str], probe: Any, *args: Any) -> dict[str, str]:
    """node -> what went wrong there, or an empty text. One task on each node at the same time, which needs no CPU of its own."""
    task = ray.remote(num_cpus=0, max_retries=0)(probe)
    refs = {node: task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(node, *args) for node in nodes}
    done, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=ANSWER_WITHIN_S)
    answers = {}
    for node, ref in refs.items():
        if ref not in done:
            answers[node] = f"no answer within {ANSWER_WITHIN_S:.0f} s"
            ray.cancel(ref)
            continue
        try:
            answers[node] = ray.get(ref)
        except ray.exceptions.RayError as error:
            answers[node] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return answers


def _write(node: str, folder: str) -> str:
    path = Path(folder) / node
    try:
        path.write_text(node)
    except OSError as error:
        return f"{error.strerror}: {path.parent.parent}"
    return ""


def _read(node: str, folder: str, names: dict[str, str], patience_s: float) -> str:
    missing = dict(names)
    deadline = time.monotonic() + patience_s
    while True:
        for other in list(missing):
            try:
                if (Path(folder) / other).read_text() == other:
                    del missing[other]
            except OSError:
                continue
        if not missing:
            return ""
        if time.monotonic() > deadline:
            return f"nothing there from {', '.join(missing.values())}"
        time.sleep(0.5)
