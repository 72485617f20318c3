"""What a run stores in many pieces. Checkpoints: `ckpt/step-000400/{state.safetensors,state.json}`,
then `ckpt/LATEST` (and `ckpt/BEST`).

A checkpoint becomes visible only by the rename of its complete directory; the pointer files are a
convenience. Loading verifies checksums and falls back to the newest checkpoint that is whole.
Nothing is ever unpickled.

And large matrices as numbered .npy files of equally many rows: made in any order by any process,
read through memory maps. A folder of embeddings is such a matrix with a manifest.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cimage_dist.errors import UserError
from cimage_dist.io import artifacts

FORMAT = 1
TENSORS, META = "state.safetensors", "state.json"
log = logging.getLogger("cimage")
Record = TypeVar("Record")
_VERIFY_BYTES = 1 << 30  # beyond this only sizes are looked at, as for graph stores

Rows = NDArray[np.float32]


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


class RowFiles:
    """float32 [rows, width] in `folder`: part i holds the rows from i * size on; the last part may
    be shorter.
    """

    def __init__(self, folder: Path, rows: int, width: int, size: int) -> None:
        self.folder, self.rows, self.width, self.size = folder, rows, width, size
        self._map = lru_cache(maxsize=None)(self.part)

    def __len__(self) -> int:
        """How many parts there are, made or not."""
        return -(-self.rows // self.size)

    @property
    def nbytes(self) -> int:
        return 4 * self.rows * self.width

    def name(self, index: int) -> str:
        return f"part-{index:05d}.npy"

    def range_of(self, index: int) -> slice:
        return slice(index * self.size, min((index + 1) * self.size, self.rows))

    def part(self, index: int) -> Rows:
        """One part, mapped."""
        rows: Rows = np.load(self.folder / self.name(index), mmap_mode="r", allow_pickle=False)
        return rows

    def is_whole(self, index: int) -> bool:
        """Whether a part is there in full length; what was renamed into place is, short of damage
        to the disk.
        """
        try:
            part, rows = self.part(index), self.range_of(index)
        except (OSError, ValueError, EOFError):
            return False
        return part.shape == (rows.stop - rows.start, self.width) and part.dtype == np.float32

    def take(self, gids: NDArray[np.int64]) -> Rows:
        """The rows of ascending `gids`, copied; nothing else is read."""
        out = np.empty((len(gids), self.width), np.float32)
        bounds = np.searchsorted(gids, np.arange(len(self) + 1) * self.size)
        for index in np.flatnonzero(np.diff(bounds)):
            here = slice(bounds[index], bounds[index + 1])
            np.take(
                self._map(int(index)),
                gids[here] - index * self.size,
                axis=0,
                out=out[here],
                mode="clip",
            )  # other modes copy once more
        return out

    def write(self, index: int, chunks: Iterable[Rows]) -> None:
        """Make a part from chunks of its rows in order: flushed, then renamed into place, so that
        its name says that it is done.
        """
        rows = self.range_of(index)
        facts: dict[str, Any] = {
            "descr": "<f4",
            "fortran_order": False,
            "shape": (rows.stop - rows.start, self.width),
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        tmp = self.folder / f"{artifacts.TMP_PREFIX}{self.name(index)}-{uuid4().hex[:8]}"
        try:
            with tmp.open("wb") as file:
                np.lib.format.write_array_header_1_0(file, facts)
                for chunk in chunks:
                    file.write(np.ascontiguousarray(chunk, dtype="<f4").data)
                file.flush()
                os.fsync(file.fileno())
            tmp.replace(self.folder / self.name(index))
        finally:
            tmp.unlink(missing_ok=True)


def describe_parts(step: int, graph: str, files: RowFiles, facts: dict[str, Any]) -> dict[str, Any]:
    """The manifest: row r is in the part whose range holds it."""
    ranges = [files.range_of(index) for index in range(len(files))]
    return {
        "format": FORMAT,
        "rows": files.rows,
        "columns": files.width,
        "dtype": "float32",
        "step": step,
        "graph": graph,
        "parts": [
            {"file": files.name(index), "first_row": rows.start, "rows": rows.stop - rows.start}
            for index, rows in enumerate(ranges)
        ],
        "files": facts,
    }


def step_of(folder: Path) -> int | None:
    """Checkpoint step of the embeddings in a folder, or None when there are none (or they are
    damaged).
    """
    if not (folder / artifacts.MANIFEST).is_file():
        return None
    body = artifacts.read_json(folder / artifacts.MANIFEST, "the embedding manifest")
    total = sum(facts["bytes"] for facts in body["files"].values())
    return (
        None
        if artifacts.damaged_file(folder, body["files"], total <= _VERIFY_BYTES)
        else int(body["step"])
    )


def open_rows(folder: Path) -> RowFiles:
    """The embeddings in a folder, on disk until rows are asked for."""
    body = artifacts.read_json(folder / artifacts.MANIFEST, "the embedding manifest")
    return RowFiles(folder, body["rows"], body["columns"], body["parts"][0]["rows"])


def load_rows(folder: Path) -> Rows:
    """The embeddings in a folder as one matrix in memory, filled part by part."""
    files = open_rows(folder)
    z = np.empty((files.rows, files.width), np.float32)
    for index in range(len(files)):
        z[files.range_of(index)] = files.part(index)
    return z


def add_parquet(folder: Path, names: Any = None) -> None:
    """Beside every part a parquet file: `node` and `z` (fixed-size list of float32). `node` is the
    row number (int64), or the user's id of it where `names`, an arrow array, has them. The manifest
    lists the files in the end.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    files, manifest = open_rows(folder), folder / artifacts.MANIFEST
    body = artifacts.read_json(manifest, "the embedding manifest")
    nodes = np.load(folder / body["nodes"], allow_pickle=False) if "nodes" in body else None
    for index in range(len(files)):
        name, rows = files.name(index).replace(".npy", ".parquet"), files.range_of(index)
        if name not in body["files"]:
            ids = np.arange(rows.start, rows.stop) if nodes is None else nodes[rows]
            z = pa.FixedSizeListArray.from_arrays(
                pa.array(files.part(index).reshape(-1)), files.width
            )
            tmp = folder / f"{artifacts.TMP_PREFIX}{name}"
            shown = pa.array(ids) if names is None else names.take(pa.array(ids))
            pq.write_table(pa.table({"node": shown, "z": z}), tmp)
            tmp.replace(folder / name)
            body["files"] |= artifacts.describe_files(folder, [name])
    artifacts.write_json(manifest, body)
