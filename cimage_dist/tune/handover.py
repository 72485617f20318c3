"""A run that starts from another run's weights with settings of its own: what population-based
training needs.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

from cimage_dist.config import OptimConfig
from cimage_dist.io import artifacts, checkpoint
from cimage_dist.io.artifacts import RunDir


def hand_over(source: Path, target: Path, optim: OptimConfig) -> None:
    """Copy the newest checkpoint of `source`, the best one, its pseudo-labels and its records into
    `target`; once.

    The checkpoint carries the optimiser's settings, so they are replaced by those of `optim`.
    """
    old, new, done = RunDir(source), RunDir(target), target / "handover.json"
    if done.is_file():
        return
    saved = checkpoint.load_selected(old.checkpoints, "last")
    best = checkpoint.load_selected(old.checkpoints, "val")
    for folder in sorted(source.iterdir()):
        if folder.is_dir() and (folder / artifacts.MANIFEST).is_file() and folder != old.embeddings:
            with artifacts.committed_dir(target / folder.name) as tmp:
                shutil.copytree(folder, tmp, dirs_exist_ok=True)
    if old.metrics.is_file():
        artifacts.write_bytes(new.metrics, old.metrics.read_bytes())
    checkpoint.save(new.checkpoints, best.step, best.tensors, best.meta)
    checkpoint.point(new.checkpoints, "BEST", best.step)
    checkpoint.save(new.checkpoints, saved.step, saved.tensors, _with_settings(saved.meta, optim))
    artifacts.write_json(done, {"from": source.name, "step": saved.step})


def _with_settings(meta: dict[str, Any], optim: OptimConfig) -> dict[str, Any]:
    """The cosine's place in its period stays; its ends are the new ones.

    Without restarts the rate is a function of the step, which training sets when it continues.
    """
    count = len(meta["scheduler"]["base_lrs"])
    schedule = meta["scheduler"] | {"base_lrs": [optim.lr_max] * count}
    fixed = {"initial_lr": optim.lr_max, "weight_decay": optim.weight_decay}
    if optim.schedule == "cosine":
        return meta | {
            "scheduler": schedule,
            "optimizer": [group | fixed for group in meta["optimizer"]],
        }
    schedule["eta_min"] = optim.lr_min
    share = (1 + math.cos(math.pi * schedule["T_cur"] / schedule["T_i"])) / 2
    now = optim.lr_min + (optim.lr_max - optim.lr_min) * share
    groups = [group | fixed | {"lr": now} for group in meta["optimizer"]]
    return meta | {"scheduler": schedule | {"_last_lr": [now] * len(groups)}, "optimizer": groups}
