"""Joining a Ray cluster, or starting Ray on this machine: token authentication, bound to loopback,
and enough room for the workers.

Before the first step: every node writes into the run directory, and every node reads what the
others wrote.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import time
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cimage_dist.config import Config, is_url
from cimage_dist.errors import UserError
from cimage_dist.io.storage import Remote


def start_ray(cfg: Config) -> None:
    """Join the cluster named by RAY_ADDRESS, or start Ray here for this run only; fail at once
    where the workers do not fit.
    """
    if not ray.is_initialized():
        if os.environ.get("RAY_ADDRESS"):
            ray.init(log_to_driver=False, logging_level=logging.ERROR)
        else:
            own_token()
            ray.init(
                address="local",
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _node_ip_address="127.0.0.1",
            )
    check_room(cfg)


def own_token() -> None:
    """Have a token that only this user can read, where none is given. Ray would make one by itself,
    readable by all.
    """
    if (
        os.environ.get("RAY_AUTH_MODE", "token").lower() != "token"
        or os.environ.get("RAY_AUTH_TOKEN")
        or os.environ.get("RAY_AUTH_TOKEN_PATH")
    ):
        return
    path = Path.home() / ".ray" / "auth_token"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
    except FileExistsError:
        if path.stat().st_uid == os.getuid():
            path.chmod(0o600)


def uses_gpu(cfg: Config) -> bool:
    """Whether workers run on GPUs: as asked, else where the cluster has any. The driver may well
    have none itself.
    """
    return cfg.resources.device == "cuda" or (
        cfg.resources.device == "auto" and ray.cluster_resources().get("GPU", 0) > 0
    )


def check_room(cfg: Config) -> None:
    """The fewest workers the run may continue with must fit into the cluster as it is; an elastic
    run waits for the others.
    """
    res = cfg.resources
    workers = res.min_workers or res.num_workers
    have = ray.cluster_resources()
    wanted = {"CPU": workers * res.cpus_per_worker, "GPU": workers if uses_gpu(cfg) else 0}
    for kind, count in wanted.items():
        if have.get(kind, 0) < count:
            raise UserError(
                f"{workers} workers need {count} {kind}s, the Ray cluster has "
                f"{have.get(kind, 0):g}. Lower resources.num_workers or resources.cpus_per_worker."
            )


SEEN_WITHIN_S = 40.0
"""Network file systems cache what a folder holds, NFS by default up to 30 s (acdirmin)."""
ANSWER_WITHIN_S = 180.0
ADVICE = (
    "Put run.dir on storage that all nodes mount at the same place, or set CIMAGE_STORAGE "
    "to such a folder."
)


def _alive() -> dict[str, str]:
    """{id: name for messages} of the nodes."""
    return {
        node["NodeID"]: f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}, node "
        f"{node['NodeID'][:8]})"
        for node in ray.nodes()
        if node["Alive"]
    }


def check_storage(place: str) -> None:
    """Raise UserError with the names of the nodes that cannot write the run directory or do not see
    each other's files there; on object storage, that cannot read it.
    """
    if is_url(place):
        nodes = _alive()
        _complain(
            nodes, _on_each(nodes, _reach, place), f"These nodes cannot reach the run at {place}"
        )
        return
    run_root = Path(place).absolute()
    if "runtime_resources" in run_root.parts:
        raise UserError(
            f"The run directory {run_root} is in the job's copy of the working directory, "
            f"which Ray deletes. {ADVICE}"
        )
    probe = run_root / f".storage-check-{secrets.token_hex(8)}"
    try:
        probe.mkdir(parents=True)
    except OSError as error:
        raise UserError(
            f"The run directory {run_root} cannot be written ({error.strerror}). {ADVICE}"
        ) from None
    nodes = _alive()
    try:
        _complain(
            nodes,
            _on_each(nodes, _write, str(probe)),
            f"These nodes cannot write the run directory {run_root}",
        )
        _complain(
            nodes,
            _on_each(nodes, _read, str(probe), nodes, SEEN_WITHIN_S),
            f"These nodes do not see what others wrote into the run directory {run_root}",
        )
    finally:
        shutil.rmtree(probe, ignore_errors=True)


def _complain(nodes: dict[str, str], answers: dict[str, str], what: str) -> None:
    if bad := {node: text for node, text in answers.items() if text}:
        raise UserError(
            f"{what}: {'; '.join(f'{nodes[node]}: {text}' for node, text in bad.items())}. {ADVICE}"
        )


def _on_each(nodes: dict[str, str], probe: Any, *args: Any) -> dict[str, str]:
    """node -> what went wrong there, or an empty text. One task on each node at the same time,
    which needs no CPU of its own.
    """
    task = ray.remote(num_cpus=0, max_retries=0)(probe)
    refs = {
        node: task.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote(node, *args)
        for node in nodes
    }
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


def _reach(node: str, url: str) -> str:
    try:
        Remote(url).newest()
    except UserError as error:
        return str(error)
    return ""


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
