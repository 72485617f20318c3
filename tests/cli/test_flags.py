"""Flags of all verbs, help, what is printed where."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from cimage_dist import __version__
from cimage_dist.__main__ import main, parse
from cimage_dist.cli import runs
from cimage_dist.cli.common import command_of, split_settings
from cimage_dist.config_loading import known_keys
from tests.cli.conftest import Cli, as_json, command, environment, ok, process


def test_quiet_says_nothing_on_standard_error(tiny: list[str], tmp_path: Path) -> None:
    """In a real process, with everything loaded that could warn: TensorBoard, and validation by
    scikit-learn.
    """
    settings = [
        *tiny,
        f"run.dir={tmp_path / 'run'}",
        "run.tensorboard=true",
        "data.holdout_edges=link",
        "train.validate_every=2",
    ]
    got = process("pretrain", "--quiet", *settings)
    assert got == (0, "", "")
    assert list((tmp_path / "run" / "tb").iterdir())


def test_quiet_and_json_of_every_verb(cli: Cli, tiny: list[str], trained: Path) -> None:
    for verb in ("ingest", "pretrain", "embed", "evaluate", "report", "show"):
        for flags in (["--quiet"], ["--json"], ["--json", "--quiet"]):
            got = cli(verb, *flags, *tiny, f"run.dir={trained}")
            assert (got.code, got.err) == (0, ""), verb
            if "--json" in flags:
                assert isinstance(json.loads(got.out), dict)


def test_flags_and_settings_in_any_order(tmp_path: Path) -> None:
    orders = [
        ["evaluate", "a.yaml", "--json", "b.yaml", "x=1", "--embedding", "z.npy", "y=2"],
        ["evaluate", "--embedding", "z.npy", "a.yaml", "b.yaml", "x=1", "--json", "y=2"],
        ["evaluate", "--json", "--embedding=z.npy", "a.yaml", "b.yaml", "x=1", "y=2"],
        ["evaluate", "a.yaml", "b.yaml", "x=1", "y=2", "--json", "--embedding", "z.npy"],
    ]
    parsed = [parse(argv) for argv in orders]
    assert all(args == parsed[0] for args in parsed)
    assert (
        parsed[0].settings == ["a.yaml", "b.yaml", "x=1", "y=2"]
        and parsed[0].embedding == Path("z.npy")
        and not parsed[0].quiet
    )
    assert split_settings(["a.yaml", "x=1", "p/a=b.yaml", "data.path=a/b"]) == (
        ["a.yaml", "p/a=b.yaml"],
        ["x=1", "data.path=a/b"],
    )
    args = parse(["pretrain", "my graph.yaml", "--on", "ray", "sampler.fanouts=[5, 5]"])
    assert (
        command_of(args, "pretrain")
        == "cimage pretrain 'my graph.yaml' 'sampler.fanouts=[5, 5]' --on ray"
    )
    assert command_of(args, "embed") == "cimage embed 'my graph.yaml' 'sampler.fanouts=[5, 5]'"


def test_show_keys(cli: Cli) -> None:
    rows = as_json(cli, "show", "--keys")["keys"]
    assert [row["key"] for row in rows] == [key for key, _, _ in known_keys()] and all(
        row["meaning"] for row in rows
    )
    daily = (
        "data.name",
        "model.num_factors",
        "model.factor_dim",
        "loss.factor_weight",
        "loss.cluster_weight",
        "train.epochs",
        "sampler.fanouts",
    )
    out = ok(cli, "show", "--keys")
    for key in (*daily, "run.seed", "run.dir"):
        assert key in out
    assert next(row for row in rows if row["key"] == "sampler.fanouts")["default"] == []


def test_doctor(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CIMAGE_DATA_ROOT", "no/such/folder")
    facts = as_json(cli, "doctor")
    assert (
        facts["healthy"] is True
        and facts["packages"]["cimage-dist"] == __version__
        and facts["data_root_exists"] is False
    )
    assert {item["name"] for item in facts["optional"]} >= {
        "pyg-lib",
        "torch-sparse",
        "ogb",
    } and all(item["install"] for item in facts["optional"])
    out = ok(cli, "doctor")
    assert (
        "ready" in out
        and "no/such/folder (does not exist)" in out
        and f"torch {torch.__version__}" in out
    )
    from cimage_dist.io import storage as module

    monkeypatch.setattr(module, "PACKAGES", (*module.PACKAGES, "no-such-package"))
    assert as_json(cli, "doctor")["healthy"] is False
    assert "not ready: install no-such-package" in ok(cli, "doctor")


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--help"], ["pretrain", "--help"], ["--version"]):
        with pytest.raises(SystemExit) as stop:
            main(argv)
        assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "examples:" in out and "--on {local,ray}" in out and __version__ in out


def test_reader_that_leaves_early() -> None:
    """`cimage show --keys | head -1` ends without a complaint."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        command("show", "--keys"),
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_with_json_standard_output_holds_the_object_alone(monkeypatch, capsys) -> None:
    def noisy(args: object) -> dict[str, int]:
        print("what a library says")
        return {"answer": 1}

    monkeypatch.setattr(runs, "do_doctor", noisy)
    assert main(["doctor", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == {"answer": 1} and "what a library says" in said.err
