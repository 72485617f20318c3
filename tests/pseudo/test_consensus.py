"""Several clusterings made into one."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from cimage_dist.pseudo.rdgae import consensus


def blurred(
    labels: torch.Tensor, num_clusters: int, share_wrong: float, generator: torch.Generator
) -> torch.Tensor:
    """Soft assignments with some nodes put elsewhere and the clusters numbered at random."""
    wrong = torch.rand(labels.numel(), generator=generator) < share_wrong
    noisy = torch.where(
        wrong, torch.randint(0, num_clusters, labels.shape, generator=generator), labels
    )
    numbers = torch.randperm(num_clusters, generator=generator)
    return 0.8 * F.one_hot(numbers[noisy], num_clusters).double() + 0.2 / num_clusters


def accuracy(q: torch.Tensor, labels: torch.Tensor) -> float:
    from cimage_dist.pseudo import contingency, matched_accuracy

    return matched_accuracy(contingency(q.argmax(1), labels, q.shape[1], q.shape[1]))


def test_errors_of_members_cancel_whatever_their_numbering():
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 5, (2000,), generator=generator)
    members = [blurred(labels, 5, 0.4, generator) for _ in range(5)]
    single = [accuracy(q, labels) for q in members]
    found = consensus(members)
    assert max(single) < 0.75 and accuracy(found, labels) > 0.88
    torch.testing.assert_close(found.sum(1), torch.ones(2000, dtype=torch.float64))
    for reference in range(5):
        assert accuracy(consensus(members, reference), labels) > 0.88


def test_a_member_that_found_nothing_has_no_say():
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 3, (500,), generator=generator)
    good = blurred(labels, 3, 0.0, generator)
    nothing = torch.full_like(good, 1 / 3) + 0.01 * torch.rand(good.shape, generator=generator)
    assert accuracy(consensus([good, nothing / nothing.sum(1, keepdim=True)]), labels) == 1.0


def test_one_member_stays_as_it_is():
    q = torch.rand(10, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(consensus([q]), q)
