"""What an embedding is worth when labels are few: ours beside controls."""

from __future__ import annotations

from typing import Any

from cimage_dist import Pretrainer, evaluate, load_config, open_graph


def main(epochs: int = 30) -> dict[str, Any]:
    settings = ["data.name=forum", "eval.few_labels=[5]", f"train.epochs={epochs}"]
    cfg = load_config(overrides=settings)
    graph = open_graph(cfg.data)
    scores = evaluate(Pretrainer(cfg).fit(graph).embed(graph), graph, cfg)
    print(f"trained, five labels a class: {scores['few_labels']['5']['mean']:.1f} %")
    for name, control in (scores.get("controls") or {}).items():
        print(f"{name:10s} {control['few_labels']['5']['mean']:.1f} %")
    return scores


if __name__ == "__main__":
    main()
