"""Bad input to runs that are there: damaged files, wrong settings, folders of others."""

from __future__ import annotations

import fcntl
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.cli.conftest import Cli, Outcome, assert_complaint, own_graph, process


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "corrupted": (flip, "x.npy", "corrupted"),
    "truncated": (cut, "indices.npy", "truncated"),
    "missing": (Path.unlink, "indptr.npy", "missing"),
    "no json": (cut, "manifest.json", "not valid JSON"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_graph_store(cli: Cli, tmp_path: Path, kind: str) -> None:
    settings = own_graph(tmp_path / "mine")
    assert cli("ingest", *settings).code == 0
    damage, name, word = DAMAGE[kind]
    (store,) = (tmp_path / "stores").glob("mine-*")
    damage(store / name)
    assert_complaint(cli("pretrain", *settings), [str(store / name), word])


@pytest.mark.parametrize("verb", ["embed", "evaluate", "report"])
def test_before_pretrain(cli: Cli, tiny: list[str], verb: str) -> None:
    assert_complaint(cli(verb, *tiny, "run.dir=none-yet"), ["none-yet", "cimage pretrain"])


def test_directory_of_another_experiment(cli: Cli, tiny: list[str], trained: Path) -> None:
    here = f"run.dir={trained}"
    for change, key in [
        ("model.num_layers=1", "model.num_layers"),
        ("run.seed=1", "run.seed"),
        ("train.epochs=2", "train.epochs"),
    ]:
        got = cli("pretrain", *tiny, here, change, "run.log_every=7", "data.verify=always")
        assert_complaint(got, [str(trained), f"(different: {key})", "another run.dir"])


@pytest.mark.parametrize("verb", ["embed", "evaluate"])
def test_other_settings_than_the_training(
    cli: Cli, tiny: list[str], trained: Path, verb: str
) -> None:
    """Above all: a run that saw all edges never gets link scores."""
    got = cli(verb, *tiny, f"run.dir={trained}", "data.holdout_edges=link")
    assert_complaint(
        got, [str(trained), "(different: data.holdout_edges)", str(trained / "config.yaml")]
    )
    assert not (trained / "eval.json").exists()


def test_graph_that_changed_after_training(cli: Cli, tmp_path: Path) -> None:
    settings = [*own_graph(tmp_path / "mine"), "run.dir=run"]
    assert cli("pretrain", *settings).code == 0
    np.save(tmp_path / "mine" / "features.npy", np.ones((120, 5)))
    for verb in ("pretrain", "embed", "evaluate"):
        assert_complaint(
            cli(verb, *settings),
            ["run was trained on another version of graph 'mine'", "delete the run"],
        )


def test_run_dir_is_a_file(cli: Cli, tiny: list[str], tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert_complaint(cli("pretrain", *tiny, "run.dir=notes.txt"), ["notes.txt", "another run.dir"])
    assert_complaint(
        cli("pretrain", *tiny, "run.dir=notes.txt/run"), ["notes.txt/run", "another run.dir"]
    )


def test_directory_in_use(cli: Cli, tiny: list[str], trained: Path) -> None:
    with (trained / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert_complaint(
            cli("pretrain", *tiny, f"run.dir={trained}"),
            ["Another process", str(trained), "another run.dir"],
        )


class Bomb:
    """Leaves a file behind where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path("exploded").touch, ()


def npy_bytes(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


EMBEDDINGS: list[tuple[str, Callable[[Path], object], list[str]]] = [
    ("absent", lambda p: None, ["not found", "numpy.save"]),
    (
        "wrong rows",
        lambda p: np.save(p, np.zeros((7, 4))),
        ["7 rows", "300 nodes", "Row i must be node i"],
    ),
    (
        "not finite",
        lambda p: np.save(p, np.full((300, 2), np.nan)),
        ["NaN", "300 rows", "first: [0, 1, 2, 3, 4]"],
    ),
    ("one column of numbers", lambda p: np.save(p, np.zeros(300)), ["matrix of floats", "[300]"]),
    (
        "integers",
        lambda p: np.save(p, np.zeros((300, 2), dtype=int)),
        ["matrix of floats", "int64"],
    ),
    ("words", lambda p: np.save(p, np.full((300, 2), "a")), ["matrix of floats", "<U1"]),
    (
        "not npy",
        lambda p: p.write_text("0.5 0.5\n"),
        ["cannot be read as a .npy matrix", "numpy.save"],
    ),
    (
        "an archive",
        lambda p: p.write_bytes(b"PK\x03\x04" + bytes(40)),
        ["cannot be read as a .npy matrix", "numpy.save"],
    ),
    (
        "truncated",
        lambda p: p.write_bytes(npy_bytes(np.zeros((300, 4)))[:-10]),
        ["cannot be read as a .npy matrix"],
    ),
    (
        "pickle inside",
        lambda p: np.save(p, np.array([Bomb()] * 300)),
        ["cannot be read as a .npy matrix", "no object arrays"],
    ),
    ("a folder", lambda p: p.mkdir(), ["cannot be read as a .npy matrix"]),
]


@pytest.mark.parametrize(
    ("write", "words"), [row[1:] for row in EMBEDDINGS], ids=[row[0] for row in EMBEDDINGS]
)
def test_embedding_file(
    cli: Cli, tiny: list[str], tmp_path: Path, write: Callable[[Path], object], words: list[str]
) -> None:
    path = tmp_path / "z.npy"
    write(path)
    assert_complaint(cli("evaluate", *tiny, "--embedding", str(path)), [str(path), *words])
    assert not (tmp_path / "exploded").exists()


LABELS: list[tuple[str, Callable[[Path], object], list[str]]] = [
    ("absent", lambda p: None, ["not found", "cluster.labels_path"]),
    ("wrong length", lambda p: np.save(p, np.zeros(7, dtype=int)), ["(7,)", "300 nodes"]),
    ("fractions", lambda p: np.save(p, np.zeros(300)), ["float64", "not integers"]),
    ("one cluster", lambda p: np.save(p, np.zeros(300, dtype=int)), ["at least two clusters"]),
    (
        "pickle inside",
        lambda p: np.save(p, np.array([Bomb()] * 300)),
        ["cannot be read", "Expected integers"],
    ),
]


@pytest.mark.parametrize(
    ("write", "words"), [row[1:] for row in LABELS], ids=[row[0] for row in LABELS]
)
def test_label_file(
    cli: Cli, tiny: list[str], tmp_path: Path, write: Callable[[Path], object], words: list[str]
) -> None:
    path = tmp_path / "labels.npy"
    write(path)
    got = cli(
        "pretrain",
        *tiny,
        "loss.factor_weight=1",
        "cluster.init=file",
        f"cluster.labels_path={path}",
        "run.dir=run",
    )
    assert_complaint(got, [str(path), *words])
    assert not (tmp_path / "exploded").exists()


def test_label_file_not_given(cli: Cli, tiny: list[str]) -> None:
    assert_complaint(
        cli("pretrain", *tiny, "cluster.init=file"), ["cluster.labels_path", "must be set"]
    )


def test_no_cuda(cli: Cli, tiny: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert_complaint(
        cli("pretrain", *tiny, "resources.device=cuda"),
        ["resources.device", "CUDA", "resources.device=cpu", "cimage doctor"],
    )


@pytest.mark.parametrize(
    ("backend", "module"), [("torch-sparse", "torch_sparse"), ("pyg-lib", "pyg_lib")]
)
def test_sampler_not_installed(
    cli: Cli, tiny: list[str], monkeypatch: pytest.MonkeyPatch, backend: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    got = cli("pretrain", *tiny, "sampler.fanouts=[3,3]", f"sampler.backend={backend}")
    assert_complaint(got, ["sampler.backend", backend, "Install", "sampler.backend=csr"])


def test_validation_by_links_without_held_out_edges(cli: Cli, tiny: list[str]) -> None:
    got = cli("pretrain", *tiny, "train.validate_every=2", "train.validate_by=link")
    assert_complaint(got, ["train.validate_by", "data.holdout_edges=link"])


@pytest.mark.parametrize("verb", ["embed", "evaluate"])
def test_only_checkpoint_damaged(cli: Cli, tiny: list[str], trained: Path, verb: str) -> None:
    cut(trained / "ckpt" / "step-00000004" / "state.safetensors")
    assert_complaint(
        cli(verb, *tiny, f"run.dir={trained}"),
        [str(trained / "ckpt"), "No usable checkpoint", "cimage pretrain"],
    )


def test_damaged_records_of_a_run(cli: Cli, tiny: list[str], trained: Path) -> None:
    for name in ("metrics.jsonl", "summary.json", "env.json"):
        whole = (trained / name).read_text()
        (trained / name).write_text("{broken}\n")
        assert_complaint(
            cli("report", f"run.dir={trained}"), [str(trained / name), "not valid JSON"]
        )
        (trained / name).write_text(whole)
    assert cli("report", f"run.dir={trained}").code == 0


def test_a_failed_start_does_not_claim_the_directory(
    cli: Cli, tiny: list[str], trained: Path, tmp_path: Path
) -> None:
    """The second try with fixed settings runs, and equals a run in a fresh directory."""
    wrong = ["loss.factor_weight=1", "cluster.init=file", "cluster.labels_path=absent.npy"]
    assert cli("pretrain", *tiny, "run.dir=run", *wrong).code == 2
    assert cli("pretrain", *tiny, "run.dir=run").code == 0
    a, b = (
        [path.read_bytes() for path in root.rglob("state.safetensors")]
        for root in (trained, tmp_path / "run")
    )
    assert a == b and len(a) == 1
    assert not (tmp_path / "run" / "pseudo-labels").exists()


def test_a_failed_start_spares_the_run_of_another_process(
    cli: Cli, tiny: list[str], tmp_path: Path
) -> None:
    """Two processes begin at once; the one that finds the directory locked must not tidy up the
    other's files.
    """
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert_complaint(cli("pretrain", *tiny, "run.dir=run"), ["Another process", "run"])
    assert {"config.yaml", "env.json", "splits"} <= {
        path.name for path in (tmp_path / "run").iterdir()
    }


def test_a_failure_after_the_first_checkpoint_keeps_the_run(
    cli: Cli, tiny: list[str], trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert (
        cli("pretrain", *tiny, f"run.dir={trained}", "train.epochs=9", "resources.device=cuda").code
        == 2
    )
    assert (trained / "config.yaml").is_file() and (trained / "splits").is_dir()
    assert cli("embed", *tiny, f"run.dir={trained}").code == 0


def test_full_disk(cli: Cli, tiny: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*args: Any) -> None:
        raise OSError(28, "No space left on device", "run/ckpt")

    monkeypatch.setattr("cimage_dist.pipeline.stages.pretrain", no_room)
    assert_complaint(cli("pretrain", *tiny), ["No space left on device", "run/ckpt", "run.dir"])


def test_internal_errors_are_reported_as_such(
    cli: Cli, tiny: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cimage_dist.pipeline.stages.pretrain", lambda *args: 1 / 0)
    got = cli("pretrain", *tiny, "--json")
    assert got.code == 1 and got.out == ""
    assert (
        "ZeroDivisionError" in got.err
        and "internal error" in got.err
        and "cimage doctor --json" in got.err
    )


def test_real_processes(tiny: list[str], trained: Path) -> None:
    """Exit codes as a shell sees them. Warnings (here of the damaged checkpoint) may stand above
    the message, one line each.
    """
    assert_complaint(process("pretrian"), ["pretrian"])
    assert_complaint(process("evaluate", "train.epochs=many"), ["train.epochs"])
    flip(trained / "ckpt" / "step-00000004" / "state.safetensors")
    got = process("embed", *tiny, f"run.dir={trained}")
    first, last = got.err.splitlines()
    assert_complaint(
        Outcome(got.code, got.out, last + "\n"), [str(trained / "ckpt"), "cimage pretrain"]
    )
    assert first.startswith("WARNING: ") and "state.safetensors" in first and "corrupted" in first
