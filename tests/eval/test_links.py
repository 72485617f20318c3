"""Link scores against scikit-learn."""

from __future__ import annotations

import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score

from cimage_dist.errors import UserError
from cimage_dist.eval.score import dot_score, link_scores, pick_score, row_scores
from cimage_dist.types import LinkSplit, Topology


def test_scores_match_sklearn_in_any_chunking() -> None:
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(50, 8, generator=generator)
    pos, neg = (
        torch.randint(0, 50, (31, 2), generator=generator),
        torch.randint(0, 50, (44, 2), generator=generator),
    )
    pairs = torch.cat([pos, neg])
    logits = (z @ z.T)[pairs[:, 0], pairs[:, 1]].numpy()
    truth = [1] * 31 + [0] * 44
    for chunk in (1, 10, 1000):
        scores = link_scores(dot_score(z), pos, neg, chunk=chunk)
        assert scores["auc"] == pytest.approx(100 * roc_auc_score(truth, logits), abs=1e-6)
        assert scores["ap"] == pytest.approx(100 * average_precision_score(truth, logits), abs=1e-6)


def test_extremes() -> None:
    pairs = torch.tensor([[0, 1], [2, 3]])
    perfect = link_scores(lambda p: (p[:, 0] == 0).float(), pairs[:1], pairs[1:])
    assert perfect == {"auc": 100.0, "ap": 100.0}
    constant = link_scores(lambda p: torch.zeros(len(p), 1), pairs[:1], pairs[1:])
    assert constant == {"auc": 50.0, "ap": 50.0}


def test_half_precision_embeddings_are_scored_in_single() -> None:
    z = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16)
    score = dot_score(z)(torch.tensor([[0, 1]]))
    assert score.dtype == torch.float32 and score.tolist() == [11.0]


def test_bad_input_is_explained() -> None:
    pairs = torch.tensor([[0, 1]])
    with pytest.raises(UserError, match="got 1 and 0"):
        link_scores(dot_score(torch.ones(2, 2)), pairs, pairs[:0])
    with pytest.raises(UserError, match="2 of 2 pair scores are NaN"):
        link_scores(dot_score(torch.full((2, 2), float("nan"))), pairs, pairs)


def test_the_score_is_chosen_on_validation_edges_alone() -> None:
    """Rows of which only the centred cosine ranks the validation edges; test edges say the
    opposite.
    """
    z = torch.tensor([[10.0, 1.0], [10.0, 1.1], [10.0, -1.0], [30.0, -1.1]])
    pos, neg = torch.tensor([[0, 1]]), torch.tensor([[0, 3]])
    links = LinkSplit(Topology(torch.zeros(5, dtype=torch.int64), pos[:0, 0]), pos, neg, neg, pos)
    name, found = pick_score(row_scores(z), links)
    assert name != "dot product" and found["auc"] == 100.0
    assert pick_score({"dot product": dot_score(z)}, links)[1]["auc"] == 0.0
