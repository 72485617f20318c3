"""Embeddings in parts on disk: equal to the whole graph in memory, whoever makes the parts, and
after a kill too.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cimage_dist.config import Config
from cimage_dist.data.splits import training_graph
from cimage_dist.data.store import Graph
from cimage_dist.errors import UserError
from cimage_dist.io import artifacts
from cimage_dist.io.artifacts import RunDir
from cimage_dist.io.checkpoint import load_rows, open_rows
from cimage_dist.nn.inference import embed_graph
from cimage_dist.nn.model import CimageModel
from cimage_dist.pipeline import embedding, stages
from cimage_dist.pipeline.embedding import (
    Bench,
    Facts,
    Task,
    here,
    make_embeddings,
    part_size,
    read_nodes,
)
from cimage_dist.train.progress import Progress
from tests.settings import ROUTING, changed, small_sbm_config

MODEL = [
    *ROUTING,
    "model.num_factors=3",
    "model.factor_dim=4",
    "model.num_layers=2",
    "model.routing_iterations=2",
    "resources.threads=1",
]


def model_of(cfg: Config, graph: Graph) -> CimageModel:
    """Untrained, with running moments that matter."""
    model = stages.untrained_model(cfg, graph)
    generator = torch.Generator().manual_seed(5)
    for name, value in model.encoder.norm.state_dict().items():
        if name.startswith("running"):
            value.copy_(torch.rand(value.shape, generator=generator) + 0.5)
    return model


def whole(cfg: Config, model: CimageModel, graph: Graph) -> np.ndarray:
    return embed_graph(
        model.encoder, graph.features(), training_graph(graph, cfg.data, cfg.run.seed)[0]
    ).numpy()


def make(cfg: Config, graph: Graph, final: Path, **options: Any) -> CimageModel:
    model = model_of(cfg, graph)
    options.setdefault("execute", here(cfg, graph))
    make_embeddings(cfg, model, 7, graph, final, **options)
    return model


@pytest.mark.parametrize(
    ("part_rows", "chunk_floats"), [(29, 500), (100, 24), (299, 3000), (300, 1 << 24)]
)
def test_parts_equal_the_whole_graph(part_rows, chunk_floats, store_dir, small_sbm, tmp_path):
    """Sizes that divide the 300 rows or not, chunks of one row and of all; a chunk of 24 floats
    holds two messages.
    """
    cfg, final = small_sbm_config(store_dir, *MODEL), tmp_path / "embeddings"
    model = make(cfg, small_sbm, final, part_rows=part_rows, chunk_floats=chunk_floats)
    np.testing.assert_allclose(load_rows(final), whole(cfg, model, small_sbm), rtol=0, atol=1e-6)
    manifest = json.loads((final / "manifest.json").read_text())
    parts = manifest["parts"]
    assert (
        [part["file"] for part in parts]
        == sorted(manifest["files"])
        == [f"part-{i:05d}.npy" for i in range(-(-300 // part_rows))]
    )
    assert [part["first_row"] for part in parts] == list(range(0, 300, part_rows)) and sum(
        part["rows"] for part in parts
    ) == 300
    assert {path.name for path in tmp_path.iterdir()} == {"embeddings", ".lock-embeddings"}


@pytest.mark.parametrize(
    "settings",
    [
        ["model.tail=false"],
        ["model.norm=moments"],
        ["model.norm=layer", "model.routing_final_norm=true", "model.routing_init=self"],
        ["model.routing_backend=reference"],
        ["data.holdout_edges=link"],
    ],
    ids=lambda s: s[0],
)
def test_every_kind_of_encoder(settings, store_dir, small_sbm, tmp_path):
    cfg = small_sbm_config(store_dir, *MODEL, *settings)
    model = make(cfg, small_sbm, tmp_path / "z", part_rows=77, chunk_floats=400)
    np.testing.assert_allclose(
        load_rows(tmp_path / "z"), whole(cfg, model, small_sbm), rtol=0, atol=1e-6
    )


def test_digits_in_half_precision_features(store_dir, digits, tmp_path):
    """Features stay as stored until a chunk is read."""
    half = Graph(
        "half", digits.indptr, digits.indices, np.asarray(digits.x, dtype=np.float16), digits.y
    )
    cfg = changed([f"data.store_dir={store_dir}"], *MODEL)
    model = make(cfg, half, tmp_path / "z", part_rows=500, chunk_floats=1 << 14)
    np.testing.assert_allclose(
        load_rows(tmp_path / "z"), whole(cfg, model, half), rtol=0, atol=1e-5
    )


def test_isolated_nodes_are_embedded(store_dir, small_sbm, tmp_path):
    """The last 150 nodes lose all edges; their part has no message at all."""
    indptr = np.asarray(small_sbm.indptr)
    first = np.asarray(small_sbm.indices)[: indptr[150]]
    kept = first < 150
    counts = np.concatenate([[0], np.cumsum(kept)])[indptr[:151]]
    graph = Graph(
        "half empty",
        np.concatenate([counts, np.full(150, counts[-1])]),
        first[kept],
        np.asarray(small_sbm.x),
    )
    cfg = small_sbm_config(store_dir, *MODEL)
    model = make(cfg, graph, tmp_path / "z", part_rows=50)
    np.testing.assert_allclose(
        load_rows(tmp_path / "z"), whole(cfg, model, graph), rtol=0, atol=1e-6
    )


bench = functools.lru_cache(Bench)


def make_in_process(root: Path, task: Task) -> tuple[Task, Facts]:
    return task, bench(root).make(*task)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("count", [2, 3])
def test_the_number_of_workers_does_not_change_a_bit(count, store_dir, small_sbm, tmp_path):
    """Each process opens the graph and the work folder for itself; parts are asked for from the
    last to the first.
    """
    cfg = small_sbm_config(store_dir, *MODEL)
    make(cfg, small_sbm, tmp_path / "one", part_rows=64)
    with multiprocessing.get_context("fork").Pool(count) as pool:
        make(
            cfg,
            small_sbm,
            tmp_path / "many",
            part_rows=64,
            execute=lambda root, tasks: pool.starmap(
                make_in_process, [(root, task) for task in tasks[::-1]], 1
            ),
        )
    assert content(tmp_path / "one") == content(tmp_path / "many")


class Counter:
    """Counts the parts made; stops, as a kill would, after some of them."""

    def __init__(self, cfg: Config, graph: Graph, stop_after: int | None = None) -> None:
        self.cfg, self.graph, self.stop_after, self.made = cfg, graph, stop_after, list[Task]()

    def __call__(self, root: Path, tasks: Sequence[Task]) -> Iterator[tuple[Task, Facts]]:
        for done in here(self.cfg, self.graph)(root, tasks):
            if len(self.made) == self.stop_after:
                raise KeyboardInterrupt
            self.made.append(done[0])
            yield done


@pytest.mark.parametrize("stop_after", [3, 9, 19])
def test_a_stopped_run_goes_on(stop_after, store_dir, small_sbm, tmp_path):
    """Four passes of five parts. The part at which it stops is on disk, but not yet counted."""
    cfg = small_sbm_config(store_dir, *MODEL)
    make(cfg, small_sbm, tmp_path / "straight", part_rows=64)
    first, second = Counter(cfg, small_sbm, stop_after), Counter(cfg, small_sbm)
    with pytest.raises(KeyboardInterrupt):
        make(cfg, small_sbm, tmp_path / "z", part_rows=64, execute=first)
    assert not (tmp_path / "z").exists()
    assert len(list((tmp_path / "z-work").glob("pass-*"))) <= 2  # never more than two buffers
    notes, ticks = list[str](), list[tuple[int, int]]()
    make(
        cfg,
        small_sbm,
        tmp_path / "z",
        part_rows=64,
        execute=second,
        note=notes.append,
        tick=lambda *t: ticks.append(t),
    )
    repeated = set(first.made) & set(second.made)
    assert all(stage == 3 for stage, _ in repeated), (
        "only the last pass is looked at again, for its checksums"
    )
    assert len(set(first.made) | set(second.made)) == 20 - (stop_after < 15)
    assert ticks[-1] == (20, 20)
    assert content(tmp_path / "z") == content(tmp_path / "straight")


def test_a_run_killed_while_it_writes_a_part_goes_on(store_dir, small_sbm, tmp_path, monkeypatch):
    cfg = small_sbm_config(store_dir, *MODEL)
    make(cfg, small_sbm, tmp_path / "straight", part_rows=64, chunk_floats=200)
    monkeypatch.setattr(embedding, "encode_rows", killing(embedding.encode_rows, after=130))
    child = multiprocessing.get_context("fork").Process(
        target=make,
        args=(cfg, small_sbm, tmp_path / "z"),
        kwargs={"part_rows": 64, "chunk_floats": 200},
    )
    child.start()
    child.join()
    monkeypatch.undo()
    assert child.exitcode == -signal.SIGKILL
    torn, *others = (tmp_path / "z-work").glob("pass-*/.tmp-*")
    assert not others
    finished = {path: path.stat().st_mtime_ns for path in torn.parent.glob("part-*")}
    assert finished
    make(
        cfg,
        small_sbm,
        tmp_path / "z",
        part_rows=64,
        chunk_floats=200,
        execute=Kept(cfg, small_sbm, finished),
    )
    assert content(tmp_path / "z") == content(tmp_path / "straight")


class Kept:
    """Checks at the start that finished parts are those of before."""

    def __init__(self, cfg: Config, graph: Graph, finished: dict[Path, int]) -> None:
        self.cfg, self.graph, self.finished = cfg, graph, finished

    def __call__(self, root: Path, tasks: Sequence[Task]) -> Iterator[tuple[Task, Facts]]:
        for done in here(self.cfg, self.graph)(root, tasks):
            if done[0][0] == int(next(iter(self.finished)).parent.name.removeprefix("pass-")):
                assert all(path.stat().st_mtime_ns == when for path, when in self.finished.items())
            yield done


def killing(function: Any, after: int) -> Any:
    seen = 0

    def wrapped(*args: Any) -> Iterator[Any]:
        nonlocal seen
        for chunk in function(*args):
            seen += 1
            if seen == after:
                os.kill(os.getpid(), signal.SIGKILL)
            yield chunk

    return wrapped


def test_work_of_other_weights_is_not_used(store_dir, small_sbm, tmp_path):
    cfg = small_sbm_config(store_dir, *MODEL)
    with pytest.raises(KeyboardInterrupt):
        make(cfg, small_sbm, tmp_path / "z", part_rows=64, execute=Counter(cfg, small_sbm, 8))
    other = model_of(cfg, small_sbm)
    with torch.no_grad():
        other.encoder.linear.weight.mul_(-1)
    make_embeddings(cfg, other, 7, small_sbm, tmp_path / "z", here(cfg, small_sbm), part_rows=64)
    np.testing.assert_allclose(
        load_rows(tmp_path / "z"), whole(cfg, other, small_sbm), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("stage", [0, 1])
def test_a_truncated_part_is_made_again(stage, store_dir, small_sbm, tmp_path):
    """Of the pass under way that part alone; of its input, which cannot be made again alone,
    everything.
    """
    cfg = small_sbm_config(store_dir, *MODEL)
    with pytest.raises(KeyboardInterrupt):
        make(cfg, small_sbm, tmp_path / "z", part_rows=64, execute=Counter(cfg, small_sbm, 8))
    with (tmp_path / "z-work" / f"pass-{stage}" / "part-00001.npy").open("r+b") as file:
        file.truncate(1000)
    counter = Counter(cfg, small_sbm)
    model = make(cfg, small_sbm, tmp_path / "z", part_rows=64, execute=counter)
    assert counter.made[0] == ((0, 0) if stage == 0 else (1, 1))
    np.testing.assert_allclose(
        load_rows(tmp_path / "z"), whole(cfg, model, small_sbm), rtol=0, atol=1e-6
    )


def test_a_disk_too_small_is_told_before_work_begins(store_dir, small_sbm, tmp_path, monkeypatch):
    monkeypatch.setattr(
        embedding.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})()
    )
    cfg = small_sbm_config(store_dir, *MODEL)
    counter = Counter(cfg, small_sbm)
    with pytest.raises(UserError, match=r"needs .* GB more"):
        make(cfg, small_sbm, tmp_path / "z", execute=counter)
    assert not counter.made


def test_parts_are_few_enough_to_keep_open():
    assert part_size(1_000) == part_size(512 * 65_536) == 65_536
    assert part_size(111_059_956) == 262_144  # papers100M: 424 parts
    assert part_size(100, 7) == 7


def test_rows_of_several_parts_are_read_where_they_lie(store_dir, small_sbm, tmp_path):
    make(small_sbm_config(store_dir, *MODEL), small_sbm, tmp_path / "z", part_rows=64)
    files, z = open_rows(tmp_path / "z"), load_rows(tmp_path / "z")
    gids = np.array([0, 63, 64, 200, 200, 299])
    assert np.array_equal(files.take(gids), z[gids]) and files.take(gids[:0]).shape == (0, 12)
    assert isinstance(files.part(1), np.memmap) and np.array_equal(files.part(1), z[64:128])


@pytest.fixture(scope="module")
def trained(store_dir: Path, small_sbm: Graph, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A run of two steps."""
    root = tmp_path_factory.mktemp("embedded") / "run"
    cfg = small_sbm_config(
        store_dir,
        *MODEL,
        "train.epochs=2",
        "run.tensorboard=False",
        "eval.probe_epochs=5",
        "eval.kmeans_restarts=1",
        f"run.dir={root}",
    )
    stages.pretrain(cfg, Progress(quiet=True), small_sbm)
    return cfg


def test_the_stage_in_one_part_and_in_several(trained, small_sbm):
    """The fast path in memory, then parts on disk in its place; evaluation reads either."""
    run = RunDir(str(trained.run.dir))
    assert stages.embed(trained, small_sbm) == run.embeddings
    fast = stages.load_embeddings(run)
    assert [path.name for path in sorted(run.embeddings.iterdir())] == [
        "manifest.json",
        "part-00000.npy",
    ]
    (run.embeddings / "part-00000.npy").write_bytes(b"damaged")
    assert stages.embedded_step(run) is None
    stages.embed(trained, small_sbm, part_rows=128, parquet=True)
    names = {
        "manifest.json",
        *[f"part-0000{i}.{kind}" for i in range(3) for kind in ("npy", "parquet")],
    }
    assert {path.name for path in run.embeddings.iterdir()} == names
    torch.testing.assert_close(stages.load_embeddings(run), fast, rtol=0, atol=1e-6)
    assert stages.embedded_step(run) == 2

    import pyarrow.parquet as pq

    table = pq.read_table(run.embeddings / "part-00002.parquet")
    assert table.column("node").to_pylist() == list(range(256, 300))
    assert np.array_equal(
        np.array(table.column("z").to_pylist(), dtype=np.float32),
        stages.load_embeddings(run)[256:].numpy(),
    )

    from cimage_dist.pipeline.evaluation import evaluate_run

    several = evaluate_run(trained, graph=small_sbm)
    assert several["step"] == 2 and several["node"]["test"] > 0


def test_chosen_nodes(trained, small_sbm, tmp_path):
    """Without fan-outs a chosen node has its exact embedding; rows come in the order of the file,
    repeats included.
    """
    exact = stages.load_embeddings(RunDir(stages.embed(trained, small_sbm).parent)).numpy()
    nodes = np.array([250, 3, 3, 0, 299])
    np.save(tmp_path / "nodes.npy", nodes)
    folder = stages.embed(
        trained, small_sbm, nodes=tmp_path / "nodes.npy", part_rows=2, parquet=True
    )
    np.testing.assert_allclose(load_rows(folder), exact[nodes], rtol=0, atol=1e-5)
    assert np.array_equal(np.load(folder / "nodes.npy"), nodes)
    assert len(json.loads((folder / artifacts.MANIFEST).read_text())["parts"]) == 3
    (tmp_path / "nodes.txt").write_text("250\n3\n3\n0\n299\n")
    notes = list[str]()
    assert (
        stages.embed(trained, small_sbm, nodes=tmp_path / "nodes.txt", note=notes.append) == folder
        and "there already" in notes[0]
    )


def test_chosen_nodes_of_a_sampled_run(store_dir, small_sbm, tmp_path):
    """Fan-outs are those of the config, draws those of the node: the same whichever parts are
    cut.
    """
    cfg = small_sbm_config(store_dir, *MODEL, "sampler.fanouts=[2,2,2]", "sampler.backend=csr")
    nodes = np.arange(0, 300, 3)
    make(cfg, small_sbm, tmp_path / "one", nodes=nodes)
    model = make(cfg, small_sbm, tmp_path / "many", nodes=nodes, part_rows=17)
    one, many = load_rows(tmp_path / "one"), load_rows(tmp_path / "many")
    np.testing.assert_allclose(one, many, rtol=0, atol=1e-6)
    exact = whole(cfg, model, small_sbm)[nodes]
    assert (
        not np.allclose(one, exact, atol=1e-3)
        and np.corrcoef(one.ravel(), exact.ravel())[0, 1] > 0.3
    )  # two neighbours say little


def test_bad_node_files(tmp_path):
    with pytest.raises(UserError, match="not found"):
        read_nodes(tmp_path / "absent.npy", 10)
    for text, reason in (
        ("1\ntwo\n", "cannot be read"),
        ("", "list of node ids"),
        ("1\n12\n-1\n", "2 of 3 ids are outside the graph of 10 nodes, the first is 12"),
    ):
        (tmp_path / "nodes.txt").write_text(text)
        with pytest.raises(UserError, match=reason):
            read_nodes(tmp_path / "nodes.txt", 10)
    np.save(tmp_path / "nodes.npy", np.ones(3))
    with pytest.raises(UserError, match="float64"):
        read_nodes(tmp_path / "nodes.npy", 10)
