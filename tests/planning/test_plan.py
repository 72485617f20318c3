"""The dry run: what it counts is what real ranks do, what it scales up is what larger batches keep,
and bad plans are refused by name.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from scipy.sparse import random as random_matrix
from scipy.sparse import save_npz

from cimage_dist.__main__ import main
from cimage_dist.comm import Comm
from cimage_dist.config import Config
from cimage_dist.config_loading import load_config
from cimage_dist.data.ingest import open_graph
from cimage_dist.data.store import Graph
from cimage_dist.nn.model import build_model
from cimage_dist.planning import make_plan, print_plan, summarise
from cimage_dist.planning.memory import Memory, Part
from cimage_dist.planning.play import Call, FakeComm, batch_tensors, call_of, play, rows_of
from cimage_dist.planning.sizes import (
    PUBLISHED,
    graph_size,
    neighbourhood,
    rows_per_step,
    training_edges,
)
from cimage_dist.train.loop import worker
from cimage_dist.train.refresh import random_scores
from cimage_dist.train.sink import MemorySink
from cimage_dist.train.trainer import Trainer
from tests.conftest import small_sbm_settings
from tests.procs import run_ranks
from tests.settings import ROUTING

ROOT = Path(__file__).parents[2]
SAMPLED = [
    *ROUTING,
    "model.num_factors=4",
    "model.factor_dim=3",
    "model.num_layers=2",
    "sampler.fanouts=[3,3,2]",
    "sampler.batch_edges=24",
    "loss.factor_weight=0.5",
]


def on_digits(store_dir: Path, *overrides: str) -> Config:
    return load_config(
        ROOT / "tests/digits.yaml", overrides=[f"data.store_dir={store_dir}", *overrides]
    )


def sampled(store_dir: Path, *overrides: str) -> Config:
    return load_config(overrides=[*small_sbm_settings(store_dir), *SAMPLED, *overrides])


class CuttingSink(MemorySink):
    """Keeps what was called between the ends of two steps."""

    def __init__(self, calls: list[Call]) -> None:
        super().__init__()
        self.calls, self.cuts = calls, list[list[Call]]()

    def tick(
        self, step: int, total: int, metrics: dict[str, float], stage: str = "pretrain"
    ) -> None:
        self.cuts.append(list(self.calls))
        self.calls.clear()


def count_real_calls(comm: Comm, store_dir: Path) -> list[Call]:
    """Collectives of the third step of the digits run, seen where they enter torch, and the
    gradient buckets of another step.
    """
    cfg = on_digits(store_dir, "train.epochs=3", "ci.partition=random")
    graph = open_graph(cfg.data)
    calls: list[Call] = []
    for name, position in (("all_reduce", 0), ("all_gather", 1), ("broadcast", 0)):
        original = getattr(dist, name)

        def counted(
            *args: Any,
            _name: str = name,
            _at: int = position,
            _original: Any = original,
            **options: Any,
        ) -> Any:
            calls.append(call_of(_name, args[_at]))
            return _original(*args, **options)

        setattr(dist, name, counted)
    sink = CuttingSink(calls)
    worker(cfg, comm, sink, graph)
    trainer = Trainer(cfg, graph, graph.topology(), comm)
    trainer.scores = random_scores(cfg.model.num_factors, 0)
    buckets: list[Call] = []

    def reduced(bucket: Any) -> Any:
        buckets.append(call_of("all_reduce", bucket.buffer()))
        return (
            dist.all_reduce(bucket.buffer().div_(comm.world), async_op=True)
            .get_future()
            .then(lambda done: done.value()[0])
        )

    trainer.wrapped.register_comm_hook(None, lambda state, bucket: reduced(bucket))
    batches = trainer.remaining()
    trainer.advance(next(batches))
    buckets.clear()
    trainer.advance(next(batches))
    return [*sink.cuts[2], *buckets]


@pytest.fixture(scope="module")
def digits_plan(store_dir: Path, digits: Graph) -> dict[str, Any]:
    return make_plan(on_digits(store_dir, "resources.num_workers=2"))


def test_collectives_of_a_step_are_those_of_two_real_ranks(store_dir, digits, digits_plan):
    for real in run_ranks(count_real_calls, 2, store_dir):
        assert digits_plan["step_collectives"] == summarise([Call(*call) for call in real], 2)
    assert digits_plan["step_collectives"]["bytes_reduced"] > 4 * digits_plan["model"]["parameters"]


def test_the_plan_states_the_run(store_dir, digits, digits_plan):
    model = build_model(digits.num_features, on_digits(store_dir))
    parameters = sum(p.numel() for p in model.parameters())
    assert digits_plan["model"]["parameters"] == parameters
    sizes = {part["name"]: part["size"] for part in digits_plan["memory"]["parts"]}
    assert (sizes["gradients"], sizes["Adam's two moments"]) == (4 * parameters, 8 * parameters)
    assert (
        digits_plan["graph"]["nodes"] == 1797
        and digits_plan["graph"]["training_edges"] < digits_plan["graph"]["undirected_edges"]
    )
    assert digits_plan["steps"]["total_steps"] == 60 and digits_plan["steps"]["refreshes"] == 6
    # D² + D + 2 doubles of the HSIC statistics are among what a refresh reduces (§7.4)
    assert digits_plan["refresh"]["bytes_reduced"] > 8 * (256**2 + 256 + 2)
    json.dumps(digits_plan)


def test_one_worker_sends_nothing(store_dir, small_sbm):
    plan = make_plan(sampled(store_dir))
    assert (
        plan["step_collectives"]["number"] == 0
        and plan["refresh"]["collectives"] == 0
        and plan["refresh"]["bytes_gathered"] == 0
    )
    assert "gradient buckets" not in {part["name"] for part in plan["memory"]["parts"]}


def test_a_second_view_is_planned(store_dir, small_sbm, digits, capsys):
    plain, two = (
        make_plan(sampled(store_dir, "ci.partition=random", f"loss.redundancy_weight={weight}"))
        for weight in (0, 1)
    )
    sizes = [
        {part["name"]: part["size"] for part in plan["memory"]["parts"]} for plan in (plain, two)
    ]
    assert plain["redundancy"] is None
    # 24 seed edges, 12 channels: 48 rows; a product per view and pass
    assert two["redundancy"] == {
        "views_encoded": 2,
        "rows_per_worker": 48,
        "channels": 12,
        "flops_per_worker": 8 * 48 * 144,
    }
    for name in (
        "activations kept for backward",
        "batch: features, messages, pairs",
        "prefetched batches",
    ):
        assert 1.3 * sizes[0][name] < sizes[1][name] < 2.5 * sizes[0][name], name
    print_plan(two)
    assert "two views encoded" in capsys.readouterr().out
    whole = make_plan(on_digits(store_dir, "loss.redundancy_weight=1", "resources.num_workers=2"))
    assert whole["redundancy"]["rows_per_worker"] == 899 and whole["steps"]["refreshes"] > 0


@pytest.mark.parametrize("more", [[], ["loss.redundancy_weight=1"]])
def test_bytes_kept_scale_to_a_real_batch_of_another_size(store_dir, small_sbm, more):
    """The played batch is on another graph and smaller; scaled by rows it gives what a real step
    keeps.
    """
    cfg = sampled(store_dir, "ci.partition=random", *more)
    trainer = Trainer(cfg, small_sbm, small_sbm.topology(), Comm())
    trainer.scores = random_scores(cfg.model.num_factors, 0)
    batch = next(trainer.remaining())[0]
    kept: dict[int, torch.Tensor] = {}  # held, so that no other tensor gets the same place

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        trainer.advance([batch])
    own = batch_tensors(batch)
    for tensor in [*trainer.model.parameters(), *trainer.model.buffers(), *own]:
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    rows = rows_of(batch)
    played = play(cfg, small_sbm.num_features, 3, rows)
    # With two views the played batch is so small that more kinds of rows have the same length; the
    # larger one is taken.
    near = 0.05 if more else 0.02
    assert played.kept.at(rows) == pytest.approx(
        sum(t.untyped_storage().nbytes() for t in kept.values()), rel=near
    )
    assert played.batch.at(rows) == pytest.approx(
        sum(t.untyped_storage().nbytes() for t in own), rel=near
    )
    assert 0 < played.kept.widest_at(rows) < played.kept.at(rows)


def test_sizes_come_from_the_store_or_from_what_is_published(
    store_dir, digits, small_sbm, tmp_path
):
    nodes, edges, features, classes = PUBLISHED["digits"]
    assert (digits.num_nodes, digits.num_edges, digits.num_features, digits.num_classes) == (
        nodes,
        edges,
        features,
        classes,
    )
    here, elsewhere = (
        graph_size(load_config(overrides=[f"data.store_dir={folder}"]).data)
        for folder in (store_dir, tmp_path)
    )
    assert here.store is not None and elsewhere.store is None
    assert (here.nodes, here.edges) == (elsewhere.nodes, elsewhere.edges)
    # the files' headers, and no masks: this graph came without a split
    assert elsewhere.store_bytes - 3 * nodes == pytest.approx(here.store_bytes, rel=0.01)
    made = load_config(overrides=[*small_sbm_settings(tmp_path)]).data
    assert (
        graph_size(made).nodes == small_sbm.num_nodes
        and graph_size(made).edges >= small_sbm.num_edges
    )


def test_batches_are_sampled_from_the_store_and_lie_below_the_bound(store_dir, small_sbm, tmp_path):
    cfg = sampled(store_dir)
    away = replace(cfg, data=replace(cfg.data, store_dir=str(tmp_path)))
    (real, how), (bound, other) = (
        rows_per_step(c, graph_size(c.data), training_edges(graph_size(c.data), c.data), 1)
        for c in (cfg, away)
    )
    assert "store" in how and "bound" in other
    assert real.keys() == bound.keys()
    for kind in real:
        assert 0 < real[kind] <= 1.05 * bound[kind], kind


def test_a_neighbourhood_is_a_tree_on_a_huge_graph_and_never_more_than_the_graph():
    nodes, messages = neighbourhood(100, [10, 5], 10**12, 10**13)
    assert [round(n) for n in nodes] == [100, 1000, 5000] and [round(n) for n in messages] == [
        1000,
        5000,
    ]
    nodes, _ = neighbourhood(10_000, [10, 10, 10], 1000, 20_000)
    assert sum(nodes) == pytest.approx(1000)


def test_a_fake_rank_shares_rows_and_gets_its_own():
    comm = FakeComm(3, 8)
    assert comm.share_rows(torch.zeros(3, 2), 25).shape == (25, 2)
    assert comm.scatter_rows(torch.zeros(24, 2), 24).shape == (3, 2)
    assert [call.operation for call in comm.calls] == ["broadcast"] * 8 + ["send"] * 7


def test_fake_ranks_all_hold_the_same():
    comm = FakeComm(3, 8)
    x = torch.arange(6.0).view(3, 2).requires_grad_()
    assert torch.equal(comm.sum(x), 8 * x.detach())
    assert comm.gather_rows(x).shape == (24, 2) and comm.broadcast(x).shape == x.shape
    comm.grad_sum(x).sum().backward()
    assert torch.equal(x.grad, torch.full((3, 2), 8.0))
    assert comm.slice_of(9) == (3, 4)
    assert [call.operation for call in comm.calls] == [
        "all_reduce",
        "all_gather",
        "all_gather",
        "broadcast",
        "all_reduce",
        "all_reduce",
    ]
    assert {call.size for call in comm.calls} == {24, 8}


def test_phases_of_memory_follow_one_another():
    memory = Memory(
        [
            Part("a", "device", "always", 1),
            Part("b", "device", "step", 10),
            Part("c", "host", "refresh", 30),
            Part("d", "host", "set-up", 5),
        ]
    )
    assert memory.total("device") == 11 and memory.total("host") == 30 and memory.total() == 31


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["sampler.batch_edges=7", "resources.num_workers=8"], "sampler.batch_edges"),
        (["sampler.batch_edges=10000"], "sampler.batch_edges"),
        (["sampler.fanouts=[3,3]"], "sampler.fanouts"),
        (["sampler.fanouts=[3,3,3,3]"], "sampler.fanouts"),
        (
            ["sampler.loader_processes=2", "resources.cpus_per_worker=2"],
            "resources.cpus_per_worker",
        ),
        (["resources.num_workers=5000", "sampler.batch_edges=5000"], "resources.num_workers"),
        (["ci.block_classes=3"], "ci.block_classes"),
        (["cluster.num_clusters=30", "ci.max_samples=40"], "ci.max_samples"),
        (["resources.num_workers=2", "resources.min_workers=3"], "resources.min_workers"),
        (
            ["sampler.fanouts=[]", "train.batch_edges=2", "resources.num_workers=3"],
            "train.batch_edges",
        ),
    ],
)
def test_bad_plans_are_refused_by_name(overrides, key, store_dir, small_sbm, capsys):
    assert main(["show", "--plan", *small_sbm_settings(store_dir), *SAMPLED, *overrides]) == 2
    assert key in capsys.readouterr().err


def test_a_worker_that_does_not_fit_is_refused(store_dir, small_sbm, capsys):
    assert (
        main(
            [
                "show",
                "--plan",
                *small_sbm_settings(store_dir),
                *SAMPLED,
                "ci.partition=random",
                "--memory",
                "0.1",
            ]
        )
        == 2
    )
    assert "--memory 0.1" in capsys.readouterr().err


def test_a_plan_can_be_read(digits_plan, capsys):
    print_plan(digits_plan)
    shown = capsys.readouterr().out
    assert all(
        text in shown
        for text in (
            "1,797 nodes",
            "activations kept for backward",
            "all_reduce",
            digits_plan["verdict"],
        )
    )


def test_an_own_graph_must_be_ingested_first(tmp_path, capsys):
    (tmp_path / "edges.csv").write_text("0,1\n1,2\n")
    assert (
        main(
            [
                "show",
                "--plan",
                "data.name=mine",
                f"data.path={tmp_path}",
                f"data.store_dir={tmp_path / 'stores'}",
            ]
        )
        == 2
    )
    assert "cimage ingest" in capsys.readouterr().err


def test_a_thousand_gpus_on_papers100m_are_planned_without_data(tmp_path):
    files = [
        ROOT / "configs" / name for name in ("large/papers100m.yaml", "resources/cluster.yaml")
    ]
    plan = make_plan(
        load_config(*files, overrides=["resources.num_workers=1024", f"data.store_dir={tmp_path}"])
    )
    assert plan["graph"]["nodes"] == 111_059_956 and plan["resources"]["gpus"] == 1024
    assert plan["steps"]["edges_per_worker"] == [8, 8] and plan["steps"]["batches_per_epoch"] == -(
        -1_615_685_872 // 8192
    )
    # modularity's D + 1 doubles (§5.4) and every gradient once
    sizes = [call["bytes_each"] for call in plan["step_collectives"]["calls"]]
    assert (
        8 * (256 + 1) in sizes
        and plan["step_collectives"]["bytes_reduced"] >= 4 * plan["model"]["parameters"]
    )
    assert 40e9 < plan["graph"]["store_bytes"] < 50e9


def test_the_scaling_document_shows_what_the_model_says(monkeypatch):
    spec = importlib.util.spec_from_file_location(
        "scaling_model", ROOT / "benchmarks" / "scaling_model.py"
    )
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(
        sys.modules, "scaling_model", script
    )  # its dataclasses look themselves up there
    spec.loader.exec_module(script)
    shown = script.DOCUMENT.read_text().split(script.BEGIN)[1].split(script.END)[0].strip()
    assert shown == script.tables(json.loads(script.CONSTANTS.read_text())), (
        "run: python benchmarks/scaling_model.py render"
    )


@pytest.mark.slow
@pytest.mark.parametrize("resources", ["laptop", "gpu8", "cluster"])
@pytest.mark.parametrize(
    "config", ["large/papers100m", "large/products", "demo", "node/cora", "node/arxiv"]
)
def test_shipped_configs_pass(config, resources, tmp_path):
    files = [ROOT / "configs" / f"{name}.yaml" for name in (config, f"resources/{resources}")]
    plan = make_plan(load_config(*files, overrides=[f"data.store_dir={tmp_path}"]))
    assert plan["memory"]["limiting_bytes"] > 0


def test_sparse_features_are_planned_by_their_entries(tmp_path: Path) -> None:
    """What a played batch keeps of sparse features is scaled by entries, not by columns."""
    nodes, features = 2000, 1500
    folder = tmp_path / "words"
    folder.mkdir()
    x = random_matrix(nodes, features, 0.01, format="csr", random_state=0, dtype="float32")
    save_npz(folder / "features.npz", x)
    ring = torch.arange(nodes)
    edges = torch.cat([torch.stack([ring, (ring + k) % nodes]) for k in (1, 7)], dim=1)
    np.save(folder / "edges.npy", edges.numpy())
    common = ["data.name=words", f"data.path={folder}", f"data.store_dir={tmp_path / 'stores'}"]
    common += ["model.num_factors=4", "model.factor_dim=4", "cluster.num_clusters=3"]
    cfg = load_config(overrides=common)
    open_graph(cfg.data)
    size = graph_size(cfg.data)
    assert size.entries == x.nnz and size.store_bytes < 2_000_000
    for mode in ([], ["sampler.fanouts=[3,3]", "sampler.batch_edges=64"]):
        plan = make_plan(load_config(overrides=[*common, *mode]))
        parts = {part["name"]: part["size"] for part in plan["memory"]["parts"]}
        rows = plan["batch"]["rows"]
        assert rows["entries"] == pytest.approx(plan["batch"]["nodes"] * x.nnz / nodes, rel=0.01)
        dense = 4 * plan["batch"]["nodes"] * features
        assert parts["batch: features, messages, pairs"] < dense / 2
        assert parts.get("feature rows being read", 0) < dense / 2
