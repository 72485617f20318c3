"""From a name or a path to an open graph store; the store is built on first use, once, and
committed whole.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cimage_dist.config import DataConfig, is_url
from cimage_dist.data.sources import SOURCES, own
from cimage_dist.data.sources.raw import Source
from cimage_dist.data.staging import stage
from cimage_dist.data.store import FORMAT_VERSION, Graph, read_manifest
from cimage_dist.data.writing import write_store
from cimage_dist.errors import UNWRITABLE, UserError
from cimage_dist.io import artifacts

_LOG = logging.getLogger("cimage")


def open_graph(data: DataConfig | str | Path) -> Graph:
    """A registered name, a store folder, a folder with edges.* files, or a data section: an open
    graph, built if need be.
    """
    if isinstance(data, str | Path):
        data = data_of(data)
    place = store_place(data)
    if data.stage_dir is None and is_url(place):
        raise UserError(
            f"data.path is the URL {place}, and graphs are mapped from a local disk. Set "
            "data.stage_dir to a local folder for its copy."
        )
    if not is_url(place) and not _is_store(Path(place)):
        ingest(data)
        for warning in read_manifest(Path(place))["notes"].get("warnings", []):
            _LOG.warning("%s", warning)
    if data.stage_dir is None:
        return Graph.open(place, data.verify)
    return Graph.open(stage(place, Path(data.stage_dir), _LOG.info, data.verify), "never")


def ingest(data: DataConfig, progress: Callable[[str], None] | None = None) -> tuple[Path, bool]:
    """(path of the store, whether it was built now). A store that is already there and whole is
    left alone.
    """
    progress = progress or (lambda message: None)
    if data.path and is_url(data.path):
        raise UserError(
            f"data.path is the URL {data.path}: a store there is copied when it is used. To "
            "make one, ingest from a local folder and upload the result."
        )
    if data.path and _is_store(Path(data.path)):
        Graph.open(data.path, data.verify)
        return Path(data.path), False
    source, options, path = _source(data), _options(data), store_path(data)
    try:
        with artifacts.locked(path.parent / f".lock-{data.name}"):
            if _is_store(path):
                try:
                    Graph.open(path, data.verify)
                    return path, False
                except UserError as error:
                    _LOG.warning("%s Building it again.", error)
            if os.environ.get("CIMAGE_INGEST") == "never":
                raise UserError(
                    f"The graph {data.name} is not prepared: there is no store {path}. "
                    "Here it must be made before (CIMAGE_INGEST=never), by the job that "
                    "`cimage k8s render ingest` prints with the same config."
                )
            _remove_leftovers(path.parent, data.name)
            progress(f"reading {data.name}")
            raw = source.load(data)
            with artifacts.committed_dir(path) as tmp:
                write_store(raw, data, options, tmp, progress)
    except OSError as error:
        if error.errno in UNWRITABLE:
            raise UserError(
                f"Cannot write the graph store below {path.parent}: {error.strerror} "
                f"({error.filename or path.parent}). "
                "Choose another folder with data.store_dir, or make room."
            ) from None
        raise
    progress(f"committed {path}")
    return path, True


def store_place(data: DataConfig) -> str:
    """Where the store is or will be: data.path where that names one (a URL does), else below
    data.store_dir.
    """
    return (
        data.path
        if data.path and (is_url(data.path) or _is_store(Path(data.path)))
        else str(store_path(data))
    )


def store_path(data: DataConfig) -> Path:
    """`<store_dir>/<name>-<8 hex of everything that decides the content>`."""
    digest = hashlib.blake2b(
        json.dumps(_options(data), sort_keys=True).encode(), digest_size=4
    ).hexdigest()
    return Path(data.store_dir) / f"{data.name}-{digest}"


def _options(data: DataConfig) -> dict[str, Any]:
    """The settings that decide what the store holds; for an own graph also which files, of which
    size and age.
    """
    source = _source(data)
    options: dict[str, Any] = {
        "version": FORMAT_VERSION,
        "source": "own" if data.path else data.name,
        "features": data.features,
        "made_features": data.made_features if data.features in ("hash", "laplacian") else None,
        "feature_dtype": data.feature_dtype,
        "normalize": "none"
        if data.features != "given"
        else source.normalize
        if data.normalize == "source"
        else data.normalize,
    }
    if source.revision:
        options["revision"] = source.revision
    if data.path:
        options |= {
            key: value
            for key, value in {
                "revision": own.revision_of(Path(data.path)),
                "columns": data.columns,
                "header": data.header,
            }.items()
            if value
        }
        options["path"] = str(Path(data.path).resolve())
        options["files"] = [
            [path.name, path.stat().st_size, path.stat().st_mtime_ns]
            for path in own.find_files(Path(data.path)).values()
        ]
    elif data.name == "sbm":
        options["sbm"] = dataclasses.asdict(data.sbm)
    return options


def _source(data: DataConfig) -> Source:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", data.name):
        raise UserError(
            "data.name must be letters, digits, '.', '_' or '-' (it names folders); got "
            f"{data.name!r}."
        )
    if data.path:
        if data.name in SOURCES:
            raise UserError(
                f"data.path is set, but data.name={data.name!r} is a built-in dataset. Give "
                "your graph a name of its own, e.g. data.name=mygraph."
            )
        return own.SOURCE
    if data.name in SOURCES:
        return SOURCES[data.name]
    near = difflib.get_close_matches(data.name.lower(), list(SOURCES), n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise UserError(
        f"Unknown dataset {data.name!r}.{hint} Known: {', '.join(SOURCES)}. For your own graph "
        "set data.path to a folder with edges.* files."
    )


def data_of(text: str | Path) -> DataConfig:
    """The data section for a registered name, a store folder or a folder with edges.* files."""
    path = Path(text)
    if isinstance(text, str) and text in SOURCES:
        return DataConfig(name=text)
    if path.exists():
        if (path / "indptr.npy").is_file():
            read_manifest(path)  # a store, or what is left of one
        stem = (
            re.sub(
                r"[^A-Za-z0-9._-]+",
                "-",
                path.resolve().name if path.is_dir() else path.resolve().parent.name,
            ).strip("-._")
            or "graph"
        )
        return DataConfig(name=f"own-{stem}" if stem in SOURCES else stem, path=str(path))
    if isinstance(text, Path) or "/" in text:
        raise UserError(
            f"{path} does not exist. Give a registered name ({', '.join(SOURCES)}), a graph "
            "store, or a folder with edges.* files."
        )
    _source(DataConfig(name=text))
    raise AssertionError("an unknown name raises")


def _is_store(path: Path) -> bool:
    return (path / artifacts.MANIFEST).is_file()


def _remove_leftovers(folder: Path, name: str) -> None:
    """Temporary folders of killed ingests of this name, whatever their options were."""
    prefix, store = re.escape(artifacts.TMP_PREFIX), rf"{re.escape(name)}-[0-9a-f]{{8}}"
    pattern = re.compile(rf"{prefix}(?:old-)?({store})-[0-9a-f]{{8}}")
    for path in list(folder.iterdir()):
        if match := pattern.fullmatch(path.name):
            artifacts.remove_leftovers(folder, match[1])
