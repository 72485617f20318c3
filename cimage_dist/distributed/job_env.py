"""What surrounds a job: address and token of the cluster, the uploaded folder and its excludes. Imports no Ray: its variables must be set before."""

from __future__ import annotations

import logging
import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cimage_dist.errors import UserError

DEFAULT_ADDRESS = "http://127.0.0.1:8265"
FILE = Path("launch") / "runtime_env.yaml"
STORAGE = "CIMAGE_STORAGE"
KNOWN_FIELDS = {"excludes", "env_vars", "pip", "working_dir", "py_modules", "config"}


def dashboard_address(given: str | None) -> str:
    """--address, else RAY_API_SERVER_ADDRESS, else an http RAY_ADDRESS, else the dashboard's usual place on this machine."""
    ray_address = os.environ.get("RAY_ADDRESS", "")
    address = given or os.environ.get("RAY_API_SERVER_ADDRESS") or (ray_address if ray_address.startswith("http") else DEFAULT_ADDRESS)
    if "://" not in address:
        address = f"http://{address}"
    if not address.startswith(("http://", "https://")):
        raise UserError(f"{address} is not the address of a Ray dashboard. Give one like http://head:8265 with --address or RAY_API_SERVER_ADDRESS.")
    return address.rstrip("/")


def use_token(token_file: Path | None) -> None:
    """Switch token authentication on for this process unless RAY_AUTH_MODE says otherwise; the token comes from a file or the environment."""
    if token_file is not None:
        _check_token_file(token_file, "--token-file")
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(token_file.resolve())
        os.environ.pop("RAY_AUTH_TOKEN", None)
    if os.environ.setdefault("RAY_AUTH_MODE", "token").lower() != "token" or os.environ.get("RAY_AUTH_TOKEN"):
        return
    if token_file is None and (path := os.environ.get("RAY_AUTH_TOKEN_PATH")):
        _check_token_file(Path(path), "RAY_AUTH_TOKEN_PATH")
    elif token_file is None and not (Path.home() / ".ray" / "auth_token").is_file():
        raise UserError(
            "No authentication token: give --token-file FILE, or set RAY_AUTH_TOKEN_PATH or RAY_AUTH_TOKEN. "
            "For a cluster without authentication set RAY_AUTH_MODE=disabled."
        )


def _check_token_file(path: Path, where: str) -> None:
    try:
        is_empty = not path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{where}: the token file {path} cannot be read ({error.__class__.__name__}).") from None
    if is_empty:
        raise UserError(f"{where}: the token file {path} is empty.")
    if path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        logging.getLogger(__name__).warning("%s can be read by others; chmod 600 would keep the token yours", path)


def load_runtime_env(given: Path | None, folder: Path, storage: str | None) -> dict[str, Any]:
    """The runtime environment of a job that starts in an uploaded copy of `folder`."""
    import yaml

    path = given or _find_file(folder)
    try:
        body = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"The runtime environment {path} cannot be read: {error}") from None
    if not isinstance(body, dict) or not set(body) <= KNOWN_FIELDS:
        raise UserError(f"{path} is not a runtime environment: expected some of {', '.join(sorted(KNOWN_FIELDS))}.")
    env: dict[str, Any] = {"working_dir": str(folder), **body}
    if storage:
        env["env_vars"] = {**(env.get("env_vars") or {}), STORAGE: storage}
    return env


def _find_file(folder: Path) -> Path:
    """In the working directory, else in the checkout that this code belongs to, else where the package was installed."""
    for root in (folder, Path(__file__).parents[2], Path(sys.prefix) / "share" / "cimage-dist"):
        if (root / FILE).is_file():
            return root / FILE
    raise UserError(f"{FILE} was found neither in {folder} nor with the package. Submit from a checkout, or give --runtime-env FILE.")


def check_uploaded(yaml_paths: Sequence[str], folder: Path) -> None:
    """Config files must lie in the folder that is uploaded, and be named as the job will find them."""
    for text in yaml_paths:
        path = Path(text)
        if path.is_absolute() or not path.resolve().is_relative_to(folder.resolve()):
            raise UserError(f"{text} would not be found by the job: only {folder} is uploaded. Copy it there and name it by a relative path.")
