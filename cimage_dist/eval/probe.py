"""Linear probe on frozen embeddings (§14). Shapes: N nodes, D embedding width, M classes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cimage_dist import keyed
from cimage_dist.config import EvalConfig
from cimage_dist.errors import UserError
from cimage_dist.types import NodeSplit

_T_0, _T_MULT = 50, 2  # cosine restarts of §14
_PREDICT_ROWS = 65_536


@dataclass(frozen=True)
class ProbeResult:
    """Accuracies in percent, None where the mask holds no labelled node (or the test labels were not to be read).

    `epoch` counts from 1; `pred` is the predicted class of every node, int64 [N], None when the test labels were not to be read.
    """

    val: float | None
    test: float | None
    epoch: int
    pred: Tensor | None


def linear_probe(z: Tensor, y: Tensor, split: NodeSplit, cfg: EvalConfig, seed: int, num_classes: int | None = None, read_test: bool = True) -> ProbeResult:
    """Softmax regression on row-normalised embeddings; test accuracy at the first best validation epoch (§14).

    logits = W z/max(‖z‖, 1e-12) + b, W Xavier-uniform, b = 0; Adam with cosine warm restarts between the two learning rates.
    Without validation nodes the last epoch counts. With `read_test=False` no test label is looked at, not even for the class count,
    so the validation score may steer pre-training. z [N, D] of any float type, y int64 [N] with -1 for unknown.
    The outcome is a function of the arguments; the global random state is neither read nor changed.
    """
    _check(z, y, split)
    z, y = z.detach(), y.to(z.device)
    # A caller may be inside no_grad or inference_mode, as embeddings usually come from there.
    with torch.inference_mode(False), torch.enable_grad():
        train, val = _labelled(split.train, y), _labelled(split.val, y)
        if train.numel() == 0:
            raise UserError(f"linear probe: none of the {int(split.train.sum())} training nodes has a label. Give a split whose training nodes are labelled.")
        x_train, y_train, x_val, y_val = _rows(z, train), y[train], _rows(z, val), y[val]
        if num_classes is None:
            num_classes = 1 + max(int(t.max()) for t in (y_train, y_val) if t.numel())
        epoch, hits, weight, bias = _fit(x_train, y_train, x_val, y_val, num_classes, cfg, seed)
    val_acc = 100.0 * hits / val.numel() if val.numel() else None
    if not read_test:
        return ProbeResult(val_acc, None, epoch, None)
    with torch.no_grad():
        parts = [F.linear(F.normalize(chunk.float(), dim=1, eps=1e-12), weight, bias).argmax(1) for chunk in z.split(_PREDICT_ROWS)]
    pred = torch.cat(parts)
    test = _labelled(split.test, y)
    test_acc = 100.0 * int((pred[test] == y[test]).sum()) / test.numel() if test.numel() else None
    return ProbeResult(val_acc, test_acc, epoch, pred)


def _fit(x: Tensor, y: Tensor, x_val: Tensor, y_val: Tensor, num_classes: int, cfg: EvalConfig, seed: int) -> tuple[int, int, Tensor, Tensor]:
    """(best epoch, validation hits there, W [M, D], b [M])."""
    dim = x.shape[1]
    bound = math.sqrt(6.0 / (dim + num_classes))
    draws = keyed.uniform(keyed.stream(seed, "probe", 0), torch.arange(num_classes * dim, device=x.device)).view(num_classes, dim)
    weight = ((2.0 * draws - 1.0) * bound).to(x.dtype).requires_grad_()
    bias = x.new_zeros(num_classes).requires_grad_()
    optimizer = torch.optim.Adam([weight, bias], lr=cfg.probe_lr_max, weight_decay=cfg.probe_weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=_T_0, T_mult=_T_MULT, eta_min=cfg.probe_lr_min)
    best_epoch, best_hits, best = cfg.probe_epochs, -1, (weight, bias)
    for epoch in range(1, cfg.probe_epochs + 1):
        for bids in _batches(x.shape[0], cfg.probe_batch, keyed.stream(seed, "probe", epoch), x.device):
            x_batch, y_batch = (x, y) if bids is None else (x[bids], y[bids])
            optimizer.zero_grad()
            F.cross_entropy(F.linear(x_batch, weight, bias), y_batch).backward()
            optimizer.step()
        schedule.step()
        if y_val.numel():
            with torch.no_grad():
                hits = int((F.linear(x_val, weight, bias).argmax(1) == y_val).sum())
            if hits > best_hits:
                best_epoch, best_hits, best = epoch, hits, (weight.detach().clone(), bias.detach().clone())
    return best_epoch, best_hits, best[0].detach(), best[1].detach()


def _batches(num_rows: int, size: int, key: int, device: torch.device) -> list[Tensor | None]:
    """Row positions of each batch of one epoch; a single None stands for all rows in their own order."""
    if num_rows <= size:
        return [None]
    return list(keyed.bits(key, torch.arange(num_rows, device=device)).argsort().split(size))


def _labelled(mask: Tensor, y: Tensor) -> Tensor:
    """Nodes inside the mask whose label is known; only labels under the mask are read."""
    gids = mask.to(y.device).nonzero().squeeze(1)
    return gids[y[gids] >= 0]


def _rows(z: Tensor, gids: Tensor) -> Tensor:
    return F.normalize(z[gids].float(), dim=1, eps=1e-12)


def _check(z: Tensor, y: Tensor, split: NodeSplit) -> None:
    if z.dim() != 2:
        raise UserError(f"linear probe: embeddings must be a matrix [nodes, width]; got shape {list(z.shape)}.")
    sizes = {"labels": y, "training mask": split.train, "validation mask": split.val, "test mask": split.test}
    for name, entries in sizes.items():
        if entries.numel() != z.shape[0]:
            raise UserError(f"linear probe: {name}: {entries.numel()} entries for {z.shape[0]} embedding rows. Row i must belong to node i in both.")
