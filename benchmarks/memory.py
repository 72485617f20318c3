"""Peak memory of training, each case in a process of its own.

    python benchmarks/memory.py [cora] [sbm] [sparse] [sparse-sampled] [--steps 300]
    [--labels file|selfkmeans] [--out memory.json]

cora: the objective and sizes of configs/paper/node/cora.yaml with model.routing_grad=last and
cluster.init=selfkmeans, 10 steps,
      initial labels and one validation included, through the same code as `cimage pretrain`. Needs
      the dataset below CIMAGE_DATA_ROOT.
sbm:  a generated graph of 200,000 nodes in sampled mini-batches, three-term objective, for --steps
steps; resident memory is also
      read after 50 steps and at the end, to see whether it grows. With --labels file the planted
      blocks serve as initial labels; selfkmeans trains an encoder for --init-steps steps first and
      clusters all nodes.
sparse, sparse-sampled: a made-up folder of 20,000 nodes, 100,000 edges and 5,000 features of which
      0.8 % are not zero (counts, scipy npz), at width 256: the default objective on the whole graph
      for 20 epochs, or one pass of sampled mini-batches, through the same code as
      `cimage pretrain`. The size of the store's features is set against that of the npz.

Peak is ru_maxrss of the process: it counts mapped pages of the graph store that were touched.
Prints a table and JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LIMITS_GB = {"cora": 1.5, "sbm": 3.0, "sparse": 1.0, "sparse-sampled": 1.0}
ROOT = Path(__file__).parents[1]


def peak_gb() -> float:
    return (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        * (1 if sys.platform == "darwin" else 1024)
        / 1e9
    )


def resident_gb() -> float:
    import psutil

    return float(psutil.Process().memory_info().rss / 1e9)


def settings(args: argparse.Namespace) -> Any:
    from cimage_dist.config_loading import load_config

    if args.case == "cora":
        overrides = [
            f"data.store_dir={args.folder}/data",
            f"run.dir={args.folder}/run",
            "model.routing_grad=last",
            "cluster.init=selfkmeans",
            "train.epochs=10",
            "resources.threads=1",
        ]
        return load_config(ROOT / "configs" / "paper" / "node" / "cora.yaml", overrides=overrides)
    if args.case.startswith("sparse"):
        overrides = [
            "data.name=words",
            f"data.path={args.folder}/words",
            f"data.store_dir={args.folder}/data",
            f"run.dir={args.folder}/run-{args.case}",
            "model.num_factors=8",
            "model.factor_dim=32",
            "train.epochs=20",
            "resources.threads=1",
        ]
        if args.case == "sparse-sampled":
            overrides += ["sampler.fanouts=[10,10]", "sampler.batch_edges=4096", "train.epochs=1"]
        return load_config(overrides=overrides)
    overrides = [
        "data.name=sbm",
        f"data.sbm.num_nodes={args.nodes}",
        "data.sbm.avg_degree=20",
        "data.sbm.label_features=16",
        "data.sbm.nuisance_features=48",
        f"data.store_dir={args.folder}/data",
        "model.num_factors=16",
        "model.factor_dim=16",
        "model.dropout=0.2",
        "model.num_layers=2",
        "model.routing_iterations=3",
        "model.routing_grad=last",
        f"sampler.fanouts={args.fanouts}",
        f"sampler.batch_edges={args.batch_edges}",
        "loss.factor_weight=0.5",
        "loss.cluster_weight=0.1",
        "cluster.restarts=1",
        f"ci.every_steps={args.refresh_every}",
        f"ci.max_samples={args.max_samples}",
        "ci.diagnose_every=1",
        "optim.lr_max=0.001",
        "resources.threads=1",
    ]
    return load_config(overrides=overrides)


def write_words(folder: Path) -> None:
    """Communities whose nodes share words: edges.npy, features.npz (counts), labels.npy."""
    import numpy as np
    from scipy.sparse import csr_matrix, save_npz

    nodes, edges, features, words, groups = 20_000, 100_000, 5_000, 40, 10
    draw = np.random.default_rng(0)
    group = draw.integers(groups, size=nodes)
    by_group = [np.flatnonzero(group == g) for g in range(groups)]
    source = draw.integers(nodes, size=edges)
    near = np.array([draw.choice(by_group[group[v]]) for v in source])
    target = np.where(draw.random(edges) < 0.7, near, draw.integers(nodes, size=edges))
    row = np.repeat(np.arange(nodes), words)
    common = (features * draw.random(row.size) ** 3).astype(np.int64)
    own = group[row] * (features // groups) + draw.integers(features // groups, size=row.size)
    column = np.where(draw.random(row.size) < 0.3, own, common)
    x = csr_matrix((np.ones(row.size, np.float32), (row, column)), shape=(nodes, features))
    folder.mkdir(exist_ok=True)
    np.save(folder / "edges.npy", np.stack([source, target]))
    np.save(folder / "labels.npy", group)
    save_npz(folder / "features.npz", x)


def train_words(cfg: Any, args: argparse.Namespace) -> dict[str, Any]:
    from cimage_dist.data.ingest import open_graph
    from cimage_dist.pipeline import stages
    from cimage_dist.train.progress import Progress

    files = open_graph(cfg.data).manifest["files"]
    stored = sum(f["bytes"] for name, f in files.items() if name.startswith(("x", "feature")))
    given = (Path(cfg.data.path) / "features.npz").stat().st_size
    summary = stages.pretrain(cfg, Progress(quiet=True))
    return {
        "steps": summary["steps"],
        "feature_bytes": stored,
        "npz_bytes": given,
        "store_by_npz": round(stored / given, 2),
    }


def train_cora(cfg: Any, args: argparse.Namespace) -> dict[str, Any]:
    from cimage_dist.pipeline import stages
    from cimage_dist.train.progress import Progress

    summary = stages.pretrain(cfg, Progress(quiet=True))
    return {"steps": summary["steps"], "validation": summary["best"]}


def train_sbm(cfg: Any, args: argparse.Namespace) -> dict[str, Any]:
    """The loop of `cimage_dist.train.loop.worker`, cut off after a number of steps that does not
    fill an epoch.
    """
    import torch

    from cimage_dist.comm import Comm
    from cimage_dist.data.ingest import open_graph
    from cimage_dist.train.initial import labels_by_kmeans
    from cimage_dist.train.refresh import Refresher
    from cimage_dist.train.trainer import Trainer

    torch.set_num_threads(1)
    graph = open_graph(cfg.data)
    topology, comm = graph.topology(), Comm()
    facts: dict[str, Any] = {
        "nodes": graph.num_nodes,
        "edges": graph.num_edges // 2,
        "before_training_gb": resident_gb(),
    }
    trainer = Trainer(cfg, graph, topology, comm)
    began = time.perf_counter()
    if args.labels == "file":
        labels = graph.labels()
        assert labels is not None
        confidence = torch.ones(graph.num_nodes, dtype=torch.float64)
    else:
        edge_only = dataclasses.replace(cfg, loss=cfg.loss.edges_only())
        first = Trainer(edge_only, graph, topology, comm)
        for batch in itertools.islice(first.remaining(), args.init_steps):
            first.advance(batch)
        labels, confidence = labels_by_kmeans(
            first.model.encoder, first.embedder, graph.num_nodes, graph.num_classes, cfg, comm
        )
        facts["init_steps"] = args.init_steps
    facts |= {
        "label_seconds": round(time.perf_counter() - began, 1),
        "peak_after_labels_gb": peak_gb(),
    }
    trainer.refresher = Refresher(
        cfg, labels, confidence, trainer.embedder, comm, trainer.total_steps
    )
    began, refresh_seconds = time.perf_counter(), 0.0
    resident = []
    for batch in itertools.islice(trainer.remaining(), args.steps):
        before = time.perf_counter()
        trainer.refresh()
        refresh_seconds += time.perf_counter() - before
        terms = trainer.advance(batch)
        resident.append(resident_gb())
        if trainer.step == 50:
            facts["peak_after_50_steps_gb"] = peak_gb()
        if trainer.step in (1, 50, args.steps):
            print(
                f"step {trainer.step}: peak {peak_gb():.2f} GB, resident {resident[-1]:.2f} GB, "
                f"{time.perf_counter() - began:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    half = len(resident) // 2
    return facts | {
        "steps": trainer.step,
        "seconds_per_step": round(
            (time.perf_counter() - began - refresh_seconds) / max(trainer.step, 1), 3
        ),
        "refreshes": -(-trainer.step // args.refresh_every),
        "seconds_per_refresh": round(
            refresh_seconds / max(-(-trainer.step // args.refresh_every), 1), 2
        ),
        "rows_of_last_batch": batch.x.shape[0],
        "messages_of_last_batch": batch.edges.src.numel(),
        "resident_median_first_half_gb": round(sorted(resident[:half])[half // 2], 3)
        if half
        else None,
        "resident_median_second_half_gb": round(
            sorted(resident[half:])[(len(resident) - half) // 2], 3
        ),
        "last_terms": {name: round(float(value), 4) for name, value in terms.items()},
    }


def run_case(args: argparse.Namespace) -> None:
    """In the child: prepare the store, or train and print one JSON object."""
    from cimage_dist.config import fingerprint
    from cimage_dist.data.ingest import open_graph

    words = Path(args.folder or ".") / "words"
    if args.prepare and args.case.startswith("sparse") and not words.exists():
        write_words(words)
    cfg = settings(args)
    if args.prepare:
        open_graph(cfg.data)
        return
    began = time.perf_counter()
    train = {"cora": train_cora, "sbm": train_sbm}.get(args.case, train_words)
    facts = train(cfg, args)
    limit = LIMITS_GB[args.case]
    result = {
        "case": args.case,
        "peak_gb": round(peak_gb(), 3),
        "limit_gb": limit,
        "is_within": peak_gb() < limit,
        "fingerprint": fingerprint(cfg),
    }
    print(
        json.dumps(
            result
            | {"seconds": round(time.perf_counter() - began, 1)}
            | {k: round(v, 3) if isinstance(v, float) else v for k, v in facts.items()}
        )
    )


def machine() -> dict[str, Any]:
    from hardware import facts  # with compiled code, which must not count in what is measured

    return facts(1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "cases", nargs="*", metavar="case", help=f"{', '.join(LIMITS_GB)} (default: all)"
    )
    for name, default in (
        ("steps", 300),
        ("nodes", 200_000),
        ("batch-edges", 1024),
        ("refresh-every", 100),
        ("max-samples", 5000),
        ("init-steps", 20),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--fanouts", default="[10,10,5]")
    parser.add_argument("--labels", choices=("file", "selfkmeans"), default="file")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--prepare", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        run_case(args)
        return
    if unknown := set(args.cases) - set(LIMITS_GB):
        parser.error(f"unknown case {', '.join(unknown)}; known: {', '.join(LIMITS_GB)}")
    results = []
    facts = machine()
    print(
        f"{facts['date']}  {facts['cpu']}, {facts['cpu_count']} cores, load {facts['load']}; "
        f"Python {facts['python']}, {facts['packages']}"
    )
    with tempfile.TemporaryDirectory() as folder:
        for case in args.cases or LIMITS_GB:
            command = [sys.executable, __file__, *sys.argv[1:], "--case", case, "--folder", folder]
            subprocess.run(
                [*command, "--prepare"], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
            )
            child = subprocess.run(
                command,
                check=True,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
            results.append(json.loads(child.stdout.splitlines()[-1]))
            print(
                f"\n{case}: peak {results[-1]['peak_gb']:.2f} GB, limit "
                f"{results[-1]['limit_gb']} GB, "
                f"{'within' if results[-1]['is_within'] else 'EXCEEDED'}"
            )
            for name, value in results[-1].items():
                print(f"  {name:32} {value}")
    report = {"machine": facts, "results": results}
    print("\n" + json.dumps(report))
    if args.out:
        args.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
