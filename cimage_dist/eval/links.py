"""Ranking scores of link prediction (§9.5)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from cimage_dist.errors import UserError
from cimage_dist.types import LinkSplit

PairScore = Callable[[Tensor], Tensor]


@torch.no_grad()
def link_scores(score: PairScore, pos: Tensor, neg: Tensor, chunk: int = 262_144) -> dict[str, float]:
    """Area under the ROC curve and average precision, in percent, of edges `pos` against non-edges `neg` (§9.5).

    `score` maps int64 pairs [n, 2] to n logits, higher for likelier edges; pos, neg int64 [n, 2].
    """
    from sklearn.metrics import average_precision_score, roc_auc_score

    if pos.shape[0] == 0 or neg.shape[0] == 0:
        raise UserError(f"link scores need edges and non-edges; got {pos.shape[0]} and {neg.shape[0]}. Hold out a larger share of the edges.")
    logits = torch.cat([score(part).reshape(-1).float() for pairs in (pos, neg) for part in pairs.split(chunk)]).cpu()
    if not bool(logits.isfinite().all()):
        raise UserError(
            f"link scores: {int((~logits.isfinite()).sum())} of {logits.numel()} pair scores are NaN or infinite. The model or the embeddings diverged."
        )
    truth = torch.cat([torch.ones(pos.shape[0]), torch.zeros(neg.shape[0])])
    return {
        "auc": 100.0 * float(roc_auc_score(truth.numpy(), logits.numpy())),
        "ap": 100.0 * float(average_precision_score(truth.numpy(), logits.numpy())),
    }


def row_scores(z: Tensor) -> dict[str, PairScore]:
    """The scores that any embedding z [N, D] offers: of rows as they are, of unit rows, and of
    unit rows after their mean is taken off.
    """
    z = z.float()
    return {
        "dot product": dot_score(z),
        "cosine": dot_score(F.normalize(z, dim=1)),
        "centred cosine": dot_score(F.normalize(z - z.mean(0), dim=1)),
    }


def pick_score(scores: Mapping[str, PairScore], links: LinkSplit) -> tuple[str, dict[str, float]]:
    """(name, validation AUC and AP) of the score that ranks the validation edges best."""
    found = {name: link_scores(score, links.val_pos, links.val_neg) for name, score in scores.items()}
    name = max(found, key=lambda name: found[name]["auc"])
    return name, found[name]


def dot_score(z: Tensor) -> PairScore:
    """Pairs [n, 2] -> z_u·z_v, for embeddings that come without a decoder. z [N, D]."""

    def score(pairs: Tensor) -> Tensor:
        pairs = pairs.to(z.device)
        return (z[pairs[:, 0]].float() * z[pairs[:, 1]].float()).sum(1)

    return score
