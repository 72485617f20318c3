"""Joining a Ray cluster, or starting Ray on this machine: token authentication, bound to loopback, and enough room for the workers."""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path

import ray

from cimage_dist.config import Config
from cimage_dist.errors import UserError


def start_ray(cfg: Config) -> None:
    """Join the cluster named by RAY_ADDRESS, or start Ray here for this run only; fail at once where the workers do not fit."""
    if not ray.is_initialized():
        if os.environ.get("RAY_ADDRESS"):
            ray.init(log_to_driver=False, logging_level=logging.ERROR)
        else:
            own_token()
            ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, _node_ip_address="127.0.0.1")
    check_room(cfg)


def own_token() -> None:
    """Have a token that only this user can read, where none is given. Ray would make one by itself, readable by all."""
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token" or os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
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
    """Whether workers run on GPUs: as asked, else where the cluster has any. The driver may well have none itself."""
    return cfg.resources.device == "cuda" or (cfg.resources.device == "auto" and ray.cluster_resources().get("GPU", 0) > 0)


def check_room(cfg: Config) -> None:
    """The fewest workers the run may go on with must fit into the cluster as it is; an elastic run waits for the others."""
    res = cfg.resources
    workers = res.min_workers or res.num_workers
    have = ray.cluster_resources()
    wanted = {"CPU": workers * res.cpus_per_worker, "GPU": workers if uses_gpu(cfg) else 0}
    for kind, count in wanted.items():
        if have.get(kind, 0) < count:
            raise UserError(
                f"{workers} workers need {count} {kind}s, the Ray cluster has {have.get(kind, 0):g}. Lower resources.num_workers or resources.cpus_per_worker."
            )
