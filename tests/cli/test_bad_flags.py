"""Flags, values and names that cannot be: exit code 2, one message that names them and the fix, and
no traceback. Every verb has some.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.cli.bad_files import TEXT, write
from tests.cli.conftest import Cli

# The command line (RUN: a trained run, g: the folder of a graph), and words of the message.
CASES: list[tuple[str, list[str]]] = [
    ("pretrian g", ["'pretrian'", "Did you mean 'pretrain'?", "cimage --help"]),
    ("neighbours g", ["Did you mean 'neighbors'?"]),
    ("pretrain g --epochs 3", ["--epochs", "without dashes", "train.epochs=50"]),
    ("pretrain g -k 3", ["-k", "cimage pretrain --help"]),
    ("pretrain g --on", ["--on", "one argument"]),
    ("pretrain g --on cloud", ["'cloud'", "local", "ray"]),
    ("pretrain g --quiet=3", ["--quiet", "'3'"]),
    ("pretrain g --json=yes", ["--json", "'yes'"]),
    ("pretrain", ["Which graph?", "cimage pretrain my_graph/"]),
    ("pretrain nowhere/", ["no file or folder nowhere", "folder of a graph"]),
    ("pretrain nowhere.yaml", ["Config file not found: nowhere.yaml"]),
    ("pretrain g/edges.csv", ["g/edges.csv is not a config", "g/"]),
    ("pretrain list.yaml", ["list.yaml", "mapping of sections"]),
    ("pretrain g =3", ["'=3'", "key=value"]),
    ("pretrain g train.steps=", ["'train.steps='", "no value", "null"]),
    ("pretrain g train.steps=0", ["train.steps", "at least 1", "0"]),
    ("pretrain g train.steps=1e99", ["train.steps", "Integer"]),
    ("pretrain g train.epochs=1.5", ["train.epochs", "'1.5'", "Integer"]),
    ("pretrain g train=3", ["train", "is a section"]),
    ("pretrain g run.seed=abc", ["run.seed", "'abc'"]),
    ("pretrain g model.num_factors=0", ["model.num_factors", "at least 1"]),
    ("pretrain g model.teleport=2", ["model.teleport", "[0, 1)"]),
    ("pretrain g sampler.fanouts=10", ["sampler.fanouts", "in brackets", "[10,10]"]),
    ("pretrain g sampler.fanouts=[0,5]", ["sampler.fanouts", "at least 1"]),
    ("pretrain g resources.threads=-2", ["resources.threads", "negative"]),
    ("pretrain g resources.device=tpu", ["resources.device", "'tpu'", "cuda"]),
    ("pretrain g data.normalize=maybe", ["data.normalize", "'maybe'", "unit"]),
    ("pretrain g cluster.init=magic", ["cluster.init", "'magic'", "propagated"]),
    ("pretrain g cluster.num_clusters=1", ["cluster.num_clusters", "at least 2"]),
    ("pretrain g optim.lr_max=nan", ["optim.lr_max", "positive", "nan"]),
    ("pretrain g data.path=nowhere", ["nowhere", "does not exist"]),
    ("ingest", ["Which graph?", "cimage ingest my_graph/"]),
    ("ingest list.txt", ["list.txt", "not a config"]),
    ("ingest g data.columns.source=from", ["data.columns.target"]),
    ("embed RUN --nodes", ["--nodes", "one argument"]),
    ("embed RUN --nodes none.txt", ["Node file not found: none.txt"]),
    ("embed RUN --on nowhere", ["'nowhere'", "local"]),
    ("evaluate RUN --embeding z.npy", ["--embeding", "Did you mean '--embedding'?"]),
    ("evaluate RUN --embedding none.npy", ["Embedding file not found: none.npy"]),
    ("evaluate RUN --embedding list.txt", ["list.txt", "numpy.save"]),
    ("evaluate RUN eval.few_labels=[0]", ["eval.few_labels", "at least 1"]),
    ("evaluate nowhere", ["no file or folder nowhere"]),
    ("report RUN --points 2", ["--points", "at least 3"]),
    ("report RUN --points many", ["--points", "'many'"]),
    ("report RUN --figures list.txt", ["--figures list.txt", "is a file"]),
    ("neighbors RUN", ["--id"]),
    ("neighbors RUN --id 12000", ["12000", "outside the graph of 300 nodes"]),
    ("neighbors RUN --id nobody", ["nobody", "299"]),
    ("neighbors RUN --id 1 -k 0", ["-k", "at least 1", "0"]),
    ("neighbors RUN --id 1 -k -3", ["-k", "at least 1", "-3"]),
    ("neighbors RUN --id 1 -k ten", ["-k", "'ten'"]),
    ("export RUN --to", ["--to", "one argument"]),
    ("export RUN --to z.xls", ["z.xls", ".parquet", ".csv"]),
    ("export RUN --to z", ["z does not say", ".npy"]),
    ("export RUN --to taken.csv", ["taken.csv is a folder"]),
    ("new", ["folder", "cimage new --help"]),
    ("new taken.csv", ["taken.csv", "no edges file", "edges.csv"]),
    ("new g --out list.yaml", ["list.yaml exists already", "--out"]),
    ("new g h", ["h", "cimage new --help"]),
    ("show g --plan --memory lots", ["--memory", "'lots'"]),
    ("show g --plan --memory -1", ["--memory", "positive", "-1"]),
    ("show g --memory 4", ["--memory", "--plan"]),
    ("doctor g", ["g", "cimage doctor --help"]),
    ("doctor --verbose", ["--verbose", "cimage doctor --help"]),
    ("compare g --methods magic", ["'magic'", "cimage", "gae"]),
    ("compare g --methods cimage --seeds 0", ["seeds", "at least 1"]),
    ("compare g --methods gae --set gae.epochs", ["gae.epochs", "METHOD.KEY=VALUE"]),
    ("compare g --methods gae --set nobody.epochs=3", ["'nobody'", "Known"]),
    ("cluster g --methods magic", ["'magic'", "rdgae"]),
    ("cluster g --seeds -1", ["--seeds", "at least 1"]),
    ("sweep", ["space:", "configs/sweeps/"]),
    ("sweep none.yaml", ["none.yaml", "sweep file"]),
    ("submit", ["<verb>", "cimage submit --help"]),
    ("submit dance", ["'dance'", "pretrain"]),
    ("jobs", ["action", "cimage jobs --help"]),
    ("jobs dance", ["'dance'", "list", "logs"]),
    ("k8s render", ["cimage k8s --help"]),
    ("k8s dance", ["'dance'", "render"]),
]


@pytest.mark.parametrize(("line", "words"), CASES, ids=[line for line, _ in CASES])
def test_is_refused_with_the_name_and_the_fix(
    cli: Cli, tmp_path: Path, trained_once: Path, line: str, words: list[str]
) -> None:
    write(tmp_path / "g", TEXT)
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "list.txt").write_text("hello\n")
    (tmp_path / "taken.csv").mkdir()
    got = cli(*shlex.split(line.replace("RUN", str(trained_once))))
    assert got.code == 2 and got.out == "" and "Traceback" not in got.err
    assert got.err.startswith(("cimage", "reading g"))
    for word in words:
        assert word in got.err, got.err
