"""Copy a folder of an object store: python -m cimage_dist.deploy.fetch s3://bucket/raw data/raw

Any address fsspec or pyarrow knows (s3://, gs://, hdfs://, file://); its keys come from the
environment. Files that are there already with the same size are left alone; each is renamed
when complete.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

from cimage_dist.errors import UserError
from cimage_dist.io.artifacts import TMP_PREFIX
from cimage_dist.io.storage import open_storage


def fetch(address: str, folder: Path) -> int:
    """Number of files copied now."""
    try:
        store, root = open_storage(address)
        entries = store.find(root, detail=True)
        if not entries:
            raise FileNotFoundError(f"no file at {root}")
    # every kind of storage has exceptions of its own for a missing bucket, credentials or network
    except Exception as error:
        raise UserError(
            f"{address} cannot be listed: {error} Give a folder such as s3://bucket/raw, and its "
            "keys through the environment."
        ) from None
    copied = 0
    for place, facts in entries.items():
        target = folder / Path(place).relative_to(root)
        if target.is_file() and target.stat().st_size == facts["size"]:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{TMP_PREFIX}{target.name}-{uuid4().hex[:8]}")
        try:
            store.get_file(place, str(part))
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
        copied += 1
    return copied


def main(argv: Sequence[str]) -> int:
    if len(argv) != 2:
        print("usage: python -m cimage_dist.deploy.fetch ADDRESS FOLDER", file=sys.stderr)
        return 2
    try:
        print(f"{fetch(argv[0], Path(argv[1]))} files copied to {argv[1]}")
    except UserError as error:
        print(f"fetch: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
