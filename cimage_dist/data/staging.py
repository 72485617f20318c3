"""A node's own copy of a graph store: from a shared folder or object storage into a local cache,
once for all processes of the node.

<cache>/<fingerprint>/             the store, committed whole
<cache>/.tmp-<fingerprint>/        a copy under way; the next process continues with what a killed
one left <cache>/.lock-<fingerprint>
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import Any, Literal

from cimage_dist.data.store import check_manifest, fingerprint_of, should_verify
from cimage_dist.errors import UNWRITABLE, UserError
from cimage_dist.io import artifacts
from cimage_dist.io.storage import open_storage

_BLOCK = 1 << 22
_ADVICE = "Make it again with `cimage ingest` and copy the whole folder to its place."


def stage(
    source: str,
    cache: Path,
    note: Callable[[str], None] = lambda text: None,
    verify: Literal["auto", "always", "never"] = "auto",
) -> Path:
    """The folder of the local copy of the store at `source`, a path or a URL that fsspec or pyarrow
    can read.

    Every file is compared with the manifest's checksum while it is copied; `verify` says how a
    copy that is there already is looked at, as in Graph.open. Files of a broken-off or damaged copy
    that are right stay; a file copied in part is continued.
    """
    storage, folder = open_storage(source)
    manifest_bytes, manifest = _read_manifest(storage, folder, source)
    files = manifest["files"]
    final = cache / fingerprint_of(manifest)
    partial = cache / f"{artifacts.TMP_PREFIX}{final.name}"
    try:
        with artifacts.locked(
            cache / f".lock-{final.name}",
            lambda: note(f"another process is copying {source}; waiting for it"),
        ):
            if final.is_dir():
                damage = _why_unusable(final, files, should_verify(files, verify))
                if damage is None:
                    return final
                note(f"{damage}; what is wrong is copied again")
                shutil.rmtree(partial, ignore_errors=True)
                final.rename(partial)
            _copy(storage, folder, source, files, partial, note)
            artifacts.write_bytes(partial / artifacts.MANIFEST, manifest_bytes)
            artifacts.replace_dir(partial, final)
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        raise UserError(
            f"Cannot copy graph store {source} to {cache}: {error.strerror} "
            f"({error.filename or cache}). "
            "Make room or get access there, or choose another data.stage_dir; what is copied is "
            "kept."
        ) from None
    return final


def _read_manifest(storage: Any, folder: str, source: str) -> tuple[bytes, dict[str, Any]]:
    try:
        content: bytes = storage.cat_file(f"{folder}/{artifacts.MANIFEST}")
        manifest = json.loads(content)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"No graph store at {source}: it has no {artifacts.MANIFEST}. {_ADVICE}"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(
            f"Graph store {source} is damaged: its {artifacts.MANIFEST} is not valid JSON "
            f"({error}). {_ADVICE}"
        ) from None
    # every kind of storage has exceptions of its own for a missing bucket, credentials or network
    except Exception as error:
        raise UserError(
            f"Graph store {source} cannot be read ({type(error).__name__}: {error}). Check the "
            "address and this node's access to it."
        ) from error
    check_manifest(manifest, source, _ADVICE)
    if strange := [name for name in manifest["files"] if PurePath(name).name != name]:
        raise UserError(
            f"Graph store {source} is damaged: its {artifacts.MANIFEST} names the file "
            f"{strange[0]!r}. {_ADVICE}"
        )
    return content, manifest


def _why_unusable(folder: Path, files: dict[str, Any], verify_content: bool) -> str | None:
    try:
        known = json.loads((folder / artifacts.MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{folder / artifacts.MANIFEST} cannot be read ({error})"
    # The fingerprint leaves feature moments out: all nodes must have those of the source, to the
    # bit.
    return (
        f"{folder} is of another build of the store"
        if known != files
        else artifacts.damaged_file(folder, files, verify_content)
    )


def _copy(
    storage: Any,
    folder: str,
    source: str,
    files: dict[str, Any],
    partial: Path,
    note: Callable[[str], None],
) -> None:
    partial.mkdir(exist_ok=True)
    there = {path.name: path.stat().st_size for path in partial.iterdir() if path.name in files}
    missing = sum(
        facts["bytes"] - min(there.get(name, 0), facts["bytes"]) for name, facts in files.items()
    )
    free = shutil.disk_usage(partial).free
    if missing > free:
        raise UserError(
            f"Graph store {source} needs {missing / 1e9:,.2f} GB more below {partial.parent}, "
            f"where {free / 1e9:,.2f} GB are free. Make room, or choose another data.stage_dir."
        )
    note(
        f"copying graph store {source} to {partial.parent}: {missing / 1e9:,.2f} GB"
        + (f" ({sum(there.values()) / 1e9:,.2f} GB are there)" if there else "")
    )
    for name, facts in files.items():
        _fetch(storage, f"{folder}/{name}", partial / name, facts, f"{source}/{name}")


def _fetch(storage: Any, place: str, target: Path, facts: dict[str, Any], shown: str) -> None:
    """Copy one file, from where an earlier copy broke off. A beginning that was not that of this
    file is found by the checksum.
    """
    for is_fresh in (not target.exists(), True):
        if is_fresh or target.stat().st_size > facts["bytes"]:
            target.unlink(missing_ok=True)
        digest = hashlib.blake2b(digest_size=16)
        with target.open("a+b") as local:
            local.seek(0)
            while block := local.read(_BLOCK):
                digest.update(block)
            if local.tell() < facts["bytes"]:
                for block in _blocks(storage, place, local.tell(), shown):
                    digest.update(block)
                    local.write(block)
            local.flush()
            os.fsync(local.fileno())
        if target.stat().st_size == facts["bytes"] and digest.hexdigest() == facts["blake2b"]:
            return
    target.unlink()
    raise UserError(
        f"Graph store file {shown} is damaged: its content does not have the checksum its "
        f"manifest states. {_ADVICE}"
    )


def _blocks(storage: Any, place: str, begin: int, shown: str) -> Iterator[bytes]:
    """The file from a position on."""
    try:
        with storage.open(place, "rb") as remote:
            remote.seek(begin)
            while block := remote.read(_BLOCK):
                yield block
    except FileNotFoundError:
        raise UserError(
            f"Graph store file {shown} is missing, though its manifest lists it. {_ADVICE}"
        ) from None
    except Exception as error:  # see _read_manifest
        raise UserError(
            f"Copying {shown} broke off ({type(error).__name__}: {error}). What is copied is "
            "kept: start again to continue."
        ) from error
