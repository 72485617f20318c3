"""What a job takes along: the uploaded files, its environment, its command line."""

from __future__ import annotations

import re
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from cimage_dist.__main__ import FAMILIES, main, parse
from cimage_dist.cli import remote as verbs
from cimage_dist.cli.common import config_of
from cimage_dist.config import run_dir
from cimage_dist.config_loading import load_config
from cimage_dist.distributed import jobs
from cimage_dist.errors import UserError
from tests.launch.conftest import ROOT, FakeClient, FakeJob


def test_what_is_uploaded(tmp_path):
    """The real packer and excludes: code and configs travel, data, runs and secrets stay."""
    from ray._private.runtime_env.packaging import create_package

    kept = [
        "cimage_dist/__main__.py",
        "configs/demo.yaml",
        "configs/data/mine.yaml",
        "launch/bin/cimage",
        "cimage_dist/runs/x.py",
    ]
    left = [
        "data/raw/a.csv",
        "runs/digits/config.yaml",
        "x.npy",
        "w/best.safetensors",
        ".git/config",
        ".venv/bin/python",
        "tests/a.py",
        ".env",
        "my.key",
        "auth_token",
        "cimage_dist/__pycache__/a.pyc",
    ]
    for name in kept + left:
        (tmp_path / "w" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "w" / name).write_text("x")
    (tmp_path / "w" / "launch/bin/cimage").chmod(0o755)
    env = jobs.runtime_env(ROOT / jobs.RUNTIME_ENV, tmp_path / "w", "/shared")
    assert (
        env["working_dir"] == str(tmp_path / "w") and env["env_vars"]["CIMAGE_STORAGE"] == "/shared"
    )
    create_package(
        env["working_dir"], tmp_path / "out.zip", include_gitignore=True, excludes=env["excludes"]
    )
    with zipfile.ZipFile(tmp_path / "out.zip") as packed:
        assert {name for name in packed.namelist() if not name.endswith("/")} == set(kept)
        assert packed.getinfo("launch/bin/cimage").external_attr >> 16 & 0o111


def test_the_repository_is_a_small_upload(tmp_path):
    from ray._private.runtime_env.packaging import create_package

    env = jobs.runtime_env(None, ROOT, None)
    create_package(
        str(ROOT), tmp_path / "out.zip", include_gitignore=True, excludes=env["excludes"]
    )
    with zipfile.ZipFile(tmp_path / "out.zip") as packed:
        names = packed.namelist()
    assert (tmp_path / "out.zip").stat().st_size < 5_000_000
    assert {"cimage_dist/__main__.py", "configs/demo.yaml", "launch/bin/cimage"} <= set(names)
    assert not [name for name in names if name.startswith(("data/", "runs/", "tests/", ".git/"))]


def test_runtime_environments(tmp_path):
    plain, with_pip = (
        yaml.safe_load((ROOT / "launch" / name).read_text())
        for name in ("runtime_env.yaml", "runtime_env_pip.yaml")
    )
    assert set(plain) == {"excludes", "env_vars"}
    assert {key: with_pip[key] for key in plain} == plain, (
        "runtime_env_pip.yaml repeats runtime_env.yaml"
    )
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    pins["torch"] = (ROOT / "Makefile").read_text().split("TORCH ?= torch==")[1].split()[0]
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.split(r"[\[>=]", text)[0] for text in needed} - {"ray"}
    assert sorted(with_pip["pip"]["packages"], key=str.lower) == sorted(
        (f"{name}=={pins[name]}" for name in names), key=str.lower
    )
    assert f"Ray {pins['ray']}" in (ROOT / "launch" / "runtime_env.yaml").read_text()
    (tmp_path / "bad.yaml").write_text("exclude: [data]")
    with pytest.raises(UserError, match="not a runtime environment"):
        jobs.runtime_env(tmp_path / "bad.yaml", tmp_path, None)


def line_of(*argv: str) -> list[str]:
    return verbs.job_line(parse(["submit", *argv]))[0]


def test_the_job_is_the_line_that_runs_on_a_laptop():
    wanted = ["pretrain", "configs/demo.yaml", "train.epochs=2", "--on", "ray"]
    assert line_of("pretrain", "configs/demo.yaml", "train.epochs=2") == wanted
    assert (
        line_of(
            "--detach",
            "--address",
            "http://a:1",
            "pretrain",
            "configs/demo.yaml",
            "--name",
            "n",
            "train.epochs=2",
            "--json",
        )
        == wanted
    )
    assert line_of("pretrain", "configs/demo.yaml", "--on", "local") == [
        "pretrain",
        "configs/demo.yaml",
        "--on",
        "local",
    ]
    args = parse(
        [
            "submit",
            "--quiet",
            "evaluate",
            "configs/demo.yaml",
            "--embedding",
            "z.npy",
            "--token-file",
            "t",
        ]
    )
    assert verbs.job_line(args)[0][:4] == ["evaluate", "configs/demo.yaml", "--embedding", "z.npy"]
    assert args.token_file == Path("t") and args.quiet and not args.json


def test_no_verb_has_a_flag_that_submit_would_take_away():
    import argparse

    own = argparse.ArgumentParser(add_help=False)
    verbs._add_flags(own, is_submit=True)
    for family in FAMILIES:
        for name in set(family.VERBS) - family.WITHOUT_SETTINGS - verbs.NOT_JOBS:
            other = argparse.ArgumentParser(add_help=False)
            family.add_arguments(name, other)
            assert not set(own._option_string_actions) & set(other._option_string_actions), name


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["pretrain", "configs/demo.yaml", "train.epoch=2"], "train.epoch"),
        (["pretrain", "configs/absent.yaml"], "absent.yaml"),
        (["pretrain", "configs/demo.yaml", "train.epochs=-1"], "train.epochs"),
        (["pretrian", "configs/demo.yaml"], "pretrian"),
        (["pretrain", "configs/demo.yaml", "--frob"], "--frob"),
        (["doctor"], "cannot run as a job"),
        (["jobs", "list"], "cannot run as a job"),
        (["k8s", "render", "pretrain", "configs/demo.yaml"], "cannot run as a job"),
        (["pretrain", str(ROOT / "configs/demo.yaml")], "would not be found by the job"),
        (["pretrain", "configs/demo.yaml", "--runtime-env", "absent.yaml"], "absent.yaml"),
    ],
)
def test_mistakes_are_told_before_anything_is_sent(monkeypatch, capsys, argv, message):
    def connect(*args: object) -> None:
        raise AssertionError("nothing may be sent")

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(jobs, "connect", connect)
    assert main(["submit", *argv]) == 2
    assert message in capsys.readouterr().err


def test_submit_and_jobs_as_commands(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(jobs, "RETRY_S", 0.0)

    class Failing(FakeClient):
        def get_job_info(self, job_id):
            return FakeJob(job_id, "FAILED", 7)

        def get_address(self):
            return "http://127.0.0.1:1"

    client = Failing(streams=[["hello\n"]], log="hello\n")
    monkeypatch.setattr(jobs, "connect", lambda *args: client)
    argv = [
        "submit",
        "pretrain",
        "configs/demo.yaml",
        "--address",
        "http://127.0.0.1:1",
        "--token-file",
        "my-token",
        "--name",
        "first",
    ]
    assert main(argv) == 7, "the job's own exit code"
    out, err = capsys.readouterr()
    assert out == "hello\n"
    (sent,) = client.submitted
    assert sent["entrypoint"] == "cimage pretrain configs/demo.yaml --on ray" and sent[
        "metadata"
    ] == {"job_name": "first"}
    assert f"http://127.0.0.1:1/#/jobs/{sent['submission_id']}" in err and "exit code 7" in err
    resume = (
        "cimage submit --address http://127.0.0.1:1 --token-file my-token --name first "
        "pretrain configs/demo.yaml --on ray"
    )
    assert f"resume: {resume}" in err
    again, _ = verbs.job_line(parse(resume.split()[1:]))
    assert again == sent["entrypoint"].split()[1:]

    assert main(["jobs", "stop", sent["submission_id"]]) == 0 and client.stopped == [
        sent["submission_id"]
    ]
    assert main(["jobs", "list"]) == 0 and "cimage show" in capsys.readouterr().out
    assert main(["jobs", "logs"]) == 2 and "Which job?" in capsys.readouterr().err


def test_relative_paths_lie_below_the_storage_folder(monkeypatch, tmp_path):
    args = parse(
        [
            "pretrain",
            "data.path=graph",
            "data.name=mine",
            "cluster.labels_path=/abs.npy",
            "cluster.init=file",
        ]
    )
    usual = config_of(args)
    assert usual == load_config(overrides=args.settings)
    monkeypatch.setenv("CIMAGE_STORAGE", str(tmp_path))
    cfg = config_of(args)
    assert (
        cfg.data.path == str(tmp_path / "graph")
        and cfg.data.store_dir == str(tmp_path / "data")
        and cfg.data.root is None
    )
    assert cfg.cluster.labels_path == "/abs.npy"
    assert run_dir(cfg) == tmp_path / run_dir(usual)


def test_a_run_directory_in_rays_copy_is_refused(tmp_path):
    from cimage_dist.distributed.session import check_storage

    with pytest.raises(UserError, match="CIMAGE_STORAGE"):
        check_storage(f"{tmp_path}/runtime_resources/working_dir_files/_ray_pkg_1/runs")
    assert not list(tmp_path.iterdir())
