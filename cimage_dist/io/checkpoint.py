"""Checkpoints: `ckpt/step-000400/{state.safetensors,state.json}`, then `ckpt/LATEST` (and
`ckpt/BEST`).

A checkpoint becomes visible only by the rename of its complete directory; the pointer files are a
convenience. Loading verifies checksums and falls back to the newest checkpoint that is whole.
Nothing is ever unpickled.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from cimage_dist.errors import UserError
from cimage_dist.io import artifacts

FORMAT = 1
TENSORS, META = "state.safetensors", "state.json"
log = logging.getLogger("cimage")
Record = TypeVar("Record")


class Checkpoint(NamedTuple):
    path: Path
    step: int
    tensors: dict[str, Tensor]
    meta: dict[str, Any]


def _name(step: int) -> str:
    return f"step-{step:08d}"


def save(folder: Path, step: int, tensors: dict[str, Tensor], meta: dict[str, Any]) -> Path:
    """Write one checkpoint atomically and point LATEST at it."""
    final = folder / _name(step)
    with artifacts.committed_dir(final) as tmp:
        artifacts.write_safetensors(
            tmp / TENSORS,
            {name: value.detach().cpu().contiguous() for name, value in tensors.items()},
        )
        body = {
            "format": FORMAT,
            "step": step,
            "files": artifacts.describe_files(tmp, [TENSORS]),
            "meta": meta,
        }
        artifacts.write_json(tmp / META, body)
    point(folder, "LATEST", step)
    return final


def point(folder: Path, pointer: str, step: int) -> None:
    artifacts.write_text(folder / pointer, _name(step) + "\n")


def steps(folder: Path) -> list[int]:
    """Steps of the checkpoints present, ascending, valid or not."""
    if not folder.is_dir():
        return []
    names = (
        path.name for path in folder.iterdir() if path.is_dir() and path.name.startswith("step-")
    )
    return sorted(
        int(name.removeprefix("step-")) for name in names if name.removeprefix("step-").isdigit()
    )


def why_invalid(path: Path) -> str | None:
    """The reason a checkpoint cannot be used, or None."""
    try:
        body = json.loads((path / META).read_text())
        if body["format"] != FORMAT:
            return f"{path / META} has format {body['format']}, this version reads {FORMAT}"
        return artifacts.damaged_file(path, body["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{path / META} cannot be read ({error})"


def load(path: Path) -> Checkpoint:
    """Load one checkpoint onto the CPU; a damaged one is a UserError naming the file."""
    from safetensors.torch import load_file

    reason = why_invalid(path)
    if reason:
        raise UserError(
            f"Checkpoint is damaged: {reason}. Delete {path} to continue from an earlier one."
        )
    body = json.loads((path / META).read_text())
    return Checkpoint(path, body["step"], load_file(path / TENSORS), body["meta"])


def load_latest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint that is whole; damaged ones are passed over with a warning."""
    for step in reversed(steps(folder)):
        path = folder / _name(step)
        reason = why_invalid(path)
        if reason is None:
            return load(path)
        log.warning("passing over a damaged checkpoint: %s", reason)
    return None


def load_selected(folder: Path, select: str) -> Checkpoint:
    """The checkpoint to embed with: BEST when selection is by validation, else the newest."""
    if select == "val" and (folder / "BEST").is_file():
        return load(folder / (folder / "BEST").read_text().strip())
    found = load_latest(folder)
    if found is None:
        raise UserError(
            f"No usable checkpoint in {folder}. Run `cimage pretrain` with the same config first."
        )
    return found


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints and the best one, and what killed writers
    left.
    """
    best = (folder / "BEST").read_text().strip() if (folder / "BEST").is_file() else ""
    for step in steps(folder)[:-keep]:
        if _name(step) != best:
            artifacts.remove_dir(folder / _name(step))
    for name in ("step", "LATEST", "BEST"):
        artifacts.remove_leftovers(folder, name)


def pack_optimizer(
    optimizer: torch.optim.Optimizer,
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """(tensors named `optim.<parameter index>.<name>`, parameter groups as plain values)."""
    state = optimizer.state_dict()
    tensors = {
        f"optim.{index}.{name}": value
        for index, slots in state["state"].items()
        for name, value in slots.items()
    }
    return tensors, state["param_groups"]


def unpack_optimizer(
    optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], groups: list[dict[str, Any]]
) -> None:
    slots: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith("optim."):
            _, index, slot = name.split(".", 2)
            slots.setdefault(int(index), {})[slot] = value
    optimizer.load_state_dict({"state": slots, "param_groups": groups})


def pack_model(model: nn.Module) -> dict[str, Tensor]:
    return {f"model.{name}": value for name, value in model.state_dict().items()}


def model_weights(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix("model."): value
        for name, value in tensors.items()
        if name.startswith("model.")
    }


def unpack_model(model: nn.Module, tensors: dict[str, Tensor], where: Path) -> None:
    try:
        model.load_state_dict(model_weights(tensors))
    except RuntimeError as error:
        raise UserError(
            f"Checkpoint {where} does not fit this config and graph: "
            f"{' '.join(str(error).split())[:300]}"
        ) from None


def pack_record(name: str, record: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A dataclass as (tensors named `<name>.<field>`, its other fields as plain values)."""
    values = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
    tensors = {f"{name}.{key}": value for key, value in values.items() if isinstance(value, Tensor)}
    return tensors, {key: value for key, value in values.items() if not isinstance(value, Tensor)}


def unpack_record(
    kind: type[Record], name: str, tensors: dict[str, Tensor], plain: dict[str, Any]
) -> Record:
    """The `kind` that `pack_record` took apart; `tensors` may hold others too."""
    prefix = f"{name}."
    own = {key.removeprefix(prefix): tensors[key] for key in tensors if key.startswith(prefix)}
    return kind(**own, **plain)
