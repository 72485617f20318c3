"""A loss term of one's own: keep the mean of every channel near zero."""

from __future__ import annotations

from torch import Tensor

from cimage_dist import LossInputs, Pretrainer, load_config, open_graph, register_loss


def centred(seen: LossInputs) -> Tensor:
    """‖mean over nodes of z‖², a share per rank: the shares of all ranks add up to it."""
    rows = seen.z.flatten(1)
    weighted = rows if seen.weight is None else rows * seen.weight[:, None]
    mean = seen.comm.grad_sum(weighted.sum(0)) / seen.total
    return mean.square().sum() / seen.comm.world


def main(epochs: int = 5) -> None:
    register_loss("centred", centred)
    settings = ["data.name=forum", "loss.extra.centred=0.1", f"train.epochs={epochs}"]
    cfg = load_config(overrides=settings)
    model = Pretrainer(cfg).fit(open_graph(cfg.data))
    print(model)


if __name__ == "__main__":
    main()
