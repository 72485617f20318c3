"""Embeddings of a graph of any size: one pass over all rows for each layer, from one set of part
files to the next.

A work folder beside the result holds the plan, the weights and two buffers, the input and the
output of the pass under way (with model.teleport the first pass too):

    embeddings-work/  plan.json  config.yaml  model/  [nodes.npy]  pass-1/part-00000.npy ...
    pass-2/part-00000.npy ...

A part is made by one process from rows of the pass before, and renamed into place when it is on
disk: a killed run continues with the parts that are missing. Parts, and how one is cut while it is
made, do not depend on who makes them or on how many do.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cimage_dist.config import Config, fingerprint
from cimage_dist.config_loading import load_config, to_yaml
from cimage_dist.data.ids import NodeIds
from cimage_dist.data.ingest import open_graph
from cimage_dist.data.sparse import rows_at
from cimage_dist.data.splits import training_graph
from cimage_dist.data.store import Graph
from cimage_dist.errors import UserError
from cimage_dist.io import artifacts
from cimage_dist.io.checkpoint import RowFiles, Rows, describe_parts, step_of
from cimage_dist.nn.inference import MAX_FLOATS, encode_rows, num_stages, reach
from cimage_dist.nn.model import CimageModel, model_from_weights
from cimage_dist.train.refresh import SampledEmbedder
from cimage_dist.train.trainer import pick_device
from cimage_dist.types import Features

PART_ROWS = 65_536
MAX_PARTS = 512  # a process keeps a part open for each

Task = tuple[int, int]  # (pass, part)
Facts = dict[str, Any]  # size and checksum of a part of the last pass; empty for others
Execute = Callable[[Path, Sequence[Task]], Iterable[tuple[Task, Facts]]]
Tick = Callable[[int, int], None]


def part_size(rows: int, size: int = PART_ROWS) -> int:
    """Rows of a part: `size`, doubled until there are at most MAX_PARTS."""
    while -(-rows // size) > MAX_PARTS:
        size *= 2
    return size


@dataclass(frozen=True)
class Plan:
    """What is made, and all that decides its content: a work folder with another plan is of no use.

    passes: 1 where chosen nodes are embedded with their sampled neighbourhoods, else the stages of
    the encoder. keeps_start: every layer reads the first pass again (model.teleport), so it stays
    to the end.
    """

    rows: int
    width: int
    part_rows: int
    passes: int
    keeps_start: bool
    chunk_floats: int
    step: int
    weights: str
    graph: str
    settings: str
    seed: int
    nodes: str | None

    def files(self, root: Path, stage: int) -> RowFiles:
        return RowFiles(root / f"pass-{stage}", self.rows, self.width, self.part_rows)


def make_plan(
    cfg: Config,
    model: CimageModel,
    step: int,
    graph: Graph,
    nodes: NDArray[np.int64] | None,
    part_rows: int,
    chunk_floats: int,
) -> Plan:
    digest = hashlib.blake2b(digest_size=16)
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode() + value.cpu().contiguous().numpy().tobytes())
    rows = graph.num_nodes if nodes is None else len(nodes)
    return Plan(
        rows=rows,
        width=model.encoder.cfg.num_factors * model.encoder.cfg.factor_dim,
        part_rows=part_size(rows, part_rows),
        passes=num_stages(model.encoder.cfg) if nodes is None else 1,
        keeps_start=nodes is None and model.encoder.alpha > 0,
        chunk_floats=chunk_floats,
        step=step,
        weights=digest.hexdigest(),
        graph=graph.fingerprint,
        settings=fingerprint(cfg),
        seed=cfg.run.seed,
        nodes=None if nodes is None else nodes_digest(nodes),
    )


class Bench:
    """What a process needs to make parts; the work folder has all of it, and says where the graph
    is.
    """

    def __init__(self, root: Path, cfg: Config | None = None, graph: Graph | None = None) -> None:
        self.root = root
        self.plan = Plan(**artifacts.read_json(root / "plan.json", "the plan of the embedding"))
        self.cfg = cfg or load_config(root / "config.yaml")
        weights = artifacts.read_tensors(root / "model")
        if weights is None:
            raise UserError(
                f"The weights in {root / 'model'} are damaged. Delete {root} and embed again."
            )
        self.device = pick_device(self.cfg)
        self.encoder = model_from_weights(self.cfg, weights).to(self.device).encoder
        self.graph = graph or open_graph(self.cfg.data)
        self.topology, _ = training_graph(self.graph, self.cfg.data, self.cfg.run.seed)
        self._open: dict[int, RowFiles] = {}

    def make(self, stage: int, index: int) -> Facts:
        """Make a part of a pass unless it is there."""
        files, plan = self.plan.files(self.root, stage), self.plan
        if not files.is_whole(index):
            rows = files.range_of(index)
            files.write(index, self._sampled(rows) if plan.nodes else self._exact(stage, rows))
        is_last = stage == plan.passes - 1
        return artifacts.describe_files(files.folder, [files.name(index)]) if is_last else {}

    def _exact(self, stage: int, rows: slice) -> Iterator[Rows]:
        read = self._features if stage == 0 else self._rows_of(stage - 1)
        start = self._rows_of(0) if self.plan.keeps_start and stage else None
        for chunk in encode_rows(
            self.encoder, stage, rows, self.topology, read, start, self.plan.chunk_floats
        ):
            yield chunk.numpy()

    def _features(self, gids: Tensor) -> Features:
        return rows_at(self.graph.x, gids.numpy())

    def _rows_of(self, stage: int) -> Callable[[Tensor], Tensor]:
        # No reader of a pass before: an open map would keep a buffer on disk after its removal.
        self._open = {at: files for at, files in self._open.items() if at in (0, stage)}
        files = self._open.setdefault(stage, self.plan.files(self.root, stage))
        return lambda gids: torch.from_numpy(files.take(gids.numpy()))

    def _sampled(self, rows: slice) -> Iterator[Rows]:
        gids = np.load(self.root / "nodes.npy", mmap_mode="r", allow_pickle=False)[rows]
        # Without fan-outs all neighbours are taken, as far as the encoder sees: exact. Training may
        # propagate over fewer hops than the encoder has; here the last fan-out serves the others.
        hops = reach(self.encoder.cfg)
        given = self.cfg.sampler.fanouts or [-1]
        fanouts = given + given[-1:] * (hops - len(given))
        cfg = replace(self.cfg, sampler=replace(self.cfg.sampler, fanouts=fanouts))
        embedder = SampledEmbedder(self.graph.x, self.topology, cfg, self.device)
        for part in np.array_split(gids, -(-len(gids) // 2048)):
            yield (
                embedder(self.encoder, torch.from_numpy(np.array(part)), self.plan.step)
                .z.flatten(1)
                .float()
                .cpu()
                .numpy()
            )


def here(cfg: Config, graph: Graph) -> Execute:
    """Make parts one after the other in this process."""

    bench: Bench | None = None

    def execute(root: Path, tasks: Sequence[Task]) -> Iterator[tuple[Task, Facts]]:
        nonlocal bench
        bench = bench or Bench(root, cfg, graph)  # of one work folder; every pass asks
        for task in tasks:
            yield task, bench.make(*task)

    return execute


def make_embeddings(
    cfg: Config,
    model: CimageModel,
    step: int,
    graph: Graph,
    final: Path,
    execute: Execute,
    note: Callable[[str], None] = lambda text: None,
    tick: Tick = lambda done, total: None,
    nodes: NDArray[np.int64] | None = None,
    part_rows: int = PART_ROWS,
    chunk_floats: int = MAX_FLOATS,
) -> None:
    """Write the folder `final` with all rows in node order, or those of `nodes` in their order;
    continues where a killed run stopped.
    """
    plan = make_plan(cfg, model, step, graph, nodes, part_rows, chunk_floats)
    root = final.parent / f"{final.name}-work"
    with artifacts.locked(
        final.parent / f".lock-{final.name}",
        lambda: note(f"another process is making {final}; waiting for it"),
    ):
        if step_of(final) == step:
            return
        first = _begin(root, plan, cfg, model, nodes)
        _check_room(root, plan, first)
        found: Facts = {}
        for stage in range(first, plan.passes):
            files = plan.files(root, stage)
            files.folder.mkdir(exist_ok=True)
            is_last = stage == plan.passes - 1
            tasks = [
                (stage, index)
                for index in range(len(files))
                if is_last or not files.is_whole(index)
            ]
            if len(tasks) < len(files):
                note(
                    f"pass {stage + 1} of {plan.passes}: {len(files) - len(tasks)} of "
                    f"{len(files)} parts are there already"
                )
            done = len(files) * (stage + 1) - len(tasks)
            for count, (_, facts) in enumerate(execute(root, tasks) if tasks else (), done + 1):
                found |= facts
                tick(count, len(files) * plan.passes)
            if stage > plan.keeps_start:
                shutil.rmtree(plan.files(root, stage - 1).folder, ignore_errors=True)
        _commit(root, plan, found, final)


def _begin(
    root: Path, plan: Plan, cfg: Config, model: CimageModel, nodes: NDArray[np.int64] | None
) -> int:
    """Make the work folder ready, and find the pass to continue with."""
    is_same = (root / "plan.json").is_file() and artifacts.read_json(
        root / "plan.json", "the plan of the embedding"
    ) == asdict(plan)
    if is_same:
        stages = [stage for stage in range(plan.passes) if (root / f"pass-{stage}").is_dir()]
        newest = max(stages, default=0)
        if (
            newest == 0
            or _is_whole(plan.files(root, newest))
            or _is_whole(plan.files(root, newest - 1))
        ):
            artifacts.write_text(
                root / "config.yaml", to_yaml(cfg)
            )  # paths and machines may have changed
            return newest
    shutil.rmtree(root, ignore_errors=True)
    artifacts.write_text(root / "config.yaml", to_yaml(cfg))
    artifacts.write_tensors(
        root / "model",
        {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()},
    )
    if nodes is not None:
        np.save(root / "nodes.npy", nodes, allow_pickle=False)
    artifacts.write_json(
        root / "plan.json", asdict(plan)
    )  # last: a folder without it is made again
    return 0


def _is_whole(files: RowFiles) -> bool:
    return all(files.is_whole(index) for index in range(len(files)))


def _check_room(root: Path, plan: Plan, first: int) -> None:
    files = plan.files(root, first)
    there = sum(path.stat().st_size for path in root.rglob("part-*.npy"))
    wanted, free = (
        files.nbytes * min(2 + plan.keeps_start, plan.passes) - there,
        shutil.disk_usage(root).free,
    )
    if wanted > free:
        raise UserError(
            f"The embedding needs {wanted / 1e9:,.1f} GB more in {root.parent}, where "
            f"{free / 1e9:,.1f} GB are free. Make room, or use another run.dir."
        )


def _commit(root: Path, plan: Plan, found: Facts, final: Path) -> None:
    """The last pass becomes the result."""
    files = plan.files(root, plan.passes - 1)
    for path in files.folder.glob(f"{artifacts.TMP_PREFIX}*"):  # of killed workers
        path.unlink()
    body = describe_parts(
        plan.step,
        plan.graph,
        files,
        {files.name(index): found[files.name(index)] for index in range(len(files))},
    )
    if plan.nodes:
        shutil.copyfile(root / "nodes.npy", files.folder / "nodes.npy")
        body |= {
            "nodes": "nodes.npy",
            "files": body["files"] | artifacts.describe_files(files.folder, ["nodes.npy"]),
        }
    artifacts.write_json(files.folder / artifacts.MANIFEST, body)
    artifacts.replace_dir(files.folder, final)
    shutil.rmtree(root, ignore_errors=True)


def nodes_digest(nodes: NDArray[np.int64]) -> str:
    return hashlib.blake2b(nodes.tobytes(), digest_size=6).hexdigest()


def read_nodes(path: Path, num_nodes: int, known: NodeIds | None = None) -> NDArray[np.int64]:
    """Rows of the nodes in a .npy or a text file with one id on each line, in their order; repeats
    are allowed. Ids are those the user gave, where the graph has them, else row numbers.
    """
    try:
        if path.suffix == ".npy":
            ids = np.load(path, allow_pickle=False)
        elif known is not None:
            ids = np.array([line for line in path.read_text().splitlines() if line.strip()])
        else:
            ids = np.array([int(line) for line in path.read_text().split()], dtype=np.int64)
    except FileNotFoundError:
        raise UserError(
            f"Node file not found: {path}. Give a .npy of integers, or a text file with one "
            "node id on each line."
        ) from None
    except (ValueError, OSError, EOFError) as error:
        raise UserError(
            f"Node file {path} cannot be read: {error}. Give a .npy of integers, or a text file "
            "with one node id on each line."
        ) from None
    return find_nodes(ids, num_nodes, known, f"Node file {path}")


def find_nodes(
    ids: NDArray[Any], num_nodes: int, known: NodeIds | None, where: str
) -> NDArray[np.int64]:
    """int64 [n]: the rows of nodes by their ids, which are row numbers where `known` is None."""
    if known is not None and ids.ndim == 1 and ids.size:
        return known.rows_of(ids, where)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or not ids.size:
        raise UserError(
            f"{where} must hold a list of node ids; got {ids.dtype} of shape {ids.shape}."
        )
    bad = np.flatnonzero((ids < 0) | (ids >= num_nodes))
    if bad.size:
        raise UserError(
            f"{where}: {bad.size:,} of {ids.size:,} ids are outside the graph of "
            f"{num_nodes:,} nodes, the first is {ids[bad[0]]} (entry {bad[0]})."
        )
    return ids.astype(np.int64)
