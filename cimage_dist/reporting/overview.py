"""`cimage show` and `cimage doctor`: look before running."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

from cimage_dist.config import Config, fingerprint
from cimage_dist.config_loading import accepted_values, known_keys, to_yaml
from cimage_dist.io import artifacts, environment
from cimage_dist.io.mirror import open_run


def show_keys(is_printed: bool) -> list[dict[str, Any]]:
    """Every config key with default, accepted values and meaning; one line each in a pipe."""
    rows: list[dict[str, Any]] = []
    for (key, item, about), (_, values) in zip(known_keys(), accepted_values(), strict=True):
        default = (
            item.default_factory()
            if item.default is dataclasses.MISSING and callable(item.default_factory)
            else item.default
        )
        rows.append(
            {"key": key, "default": default, "type": str(item.type)}
            | {"accepted": values, "meaning": about}
        )
    if not is_printed:
        return rows
    names = ("key", "default", "accepted", "meaning")
    cells = [[row["key"], _yaml(row["default"]), row["accepted"], row["meaning"]] for row in rows]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        table = Table(*names, box=None, pad_edge=False)
        for row in cells:
            table.add_row(*map(escape, row))
        Console().print(table)
    else:
        widths = [max(len(row[i]) for row in [*cells, names]) for i in range(3)] + [0]
        for row in [list(names), *cells]:
            line = "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True))
            print(line.rstrip())
    return rows


def _yaml(value: Any) -> str:
    """A value as it is written in a setting."""
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else str(value)


def show_config(cfg: Config, is_printed: bool) -> dict[str, Any]:
    """The resolved config, its fingerprint, and which artifacts exist."""
    from cimage_dist.data.ingest import store_place
    from cimage_dist.io import checkpoint

    run = open_run(cfg)
    store = store_place(cfg.data)
    steps = checkpoint.steps(run.checkpoints)
    places: dict[str, tuple[Any, bool]] = {
        "graph store": (store, (Path(store) / artifacts.MANIFEST).is_file()),
        "run": (run.root, run.config.is_file()),
        "checkpoints": (run.checkpoints, bool(steps)),
        "embeddings": (run.embeddings, (run.embeddings / artifacts.MANIFEST).is_file()),
        "scores": (run.evaluation, run.evaluation.is_file()),
    }
    exists: dict[str, dict[str, Any]] = {
        name: {"path": str(path), "exists": is_there} for name, (path, is_there) in places.items()
    }
    exists["checkpoints"]["steps"] = steps
    if is_printed:
        print(to_yaml(cfg))
        print(f"fingerprint: {fingerprint(cfg)}")
        for name, facts in exists.items():
            print(f"{'present' if facts['exists'] else 'absent ':8} {name}: {facts['path']}")
    return {"config": dataclasses.asdict(cfg), "fingerprint": fingerprint(cfg), "exists": exists}


def doctor(is_printed: bool) -> dict[str, Any]:
    """Versions, devices, optional packages, and the data root."""
    facts = environment.describe()
    optional = environment.optional_packages()
    root = os.environ.get("CIMAGE_DATA_ROOT")
    facts |= {"optional": optional, "data_root": root}
    facts["data_root_exists"] = bool(root and Path(root).is_dir())
    missing = [name for name, version in facts["packages"].items() if version is None]
    facts["healthy"] = not missing
    if is_printed:
        print(
            f"python {facts['python']} on {facts['platform']}, {facts['cpu_count']} CPUs, torch "
            f"uses {facts['torch_threads']} threads"
        )
        print(f"devices: {', '.join(facts['cuda']) or 'CPU only (no CUDA device seen)'}")
        for name, version in facts["packages"].items():
            print(f"  {'ok     ' if version else 'MISSING'} {name} {version or ''}")
        for item in optional:
            state = f"absent  {item['name']}: would add {item['adds']}; {item['install']}"
            if item["present"]:
                state = f"ok      {item['name']} {item['version'] or ''}"
            print(f"  {state}")
        unset = "not set (CIMAGE_DATA_ROOT); raw files are looked for under <data.store_dir>/raw"
        is_lost = root and not facts["data_root_exists"]
        print(f"data root: {root or unset}{' (does not exist)' if is_lost else ''}")
        print("ready" if facts["healthy"] else f"not ready: install {', '.join(missing)}")
    return facts
