"""What launch/, README and docs ask people to run: every line parses with the real command line
and its config loads; scripts are linted.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cimage_dist.errors import UserError
from tests.launch.conftest import BIN, ROOT, clean_environment
from tests.test_docs import DOCUMENTS, check, commands

LAUNCH = sorted(path for path in (ROOT / "launch").rglob("*") if path.is_file())
SCRIPTS = [
    path for path in LAUNCH if path.read_text().startswith(("#!/usr/bin/env bash", "#!/bin/sh"))
]
# `cimage ...` that another command carries: ray job submit ... -- cimage, sbatch
# launch/slurm.sbatch cimage
CARRIED = re.compile(r"(?:ray job submit .*? -- |slurm\.sbatch )(cimage [a-z].*)")


def carried() -> list[tuple[str, str]]:
    found = []
    for path in [*DOCUMENTS, *LAUNCH]:
        for line in path.read_text().replace("\\\n", " ").splitlines():
            if match := CARRIED.search(line.split("  #")[0]):
                text = match[1].split("`")[0].strip()
                if "..." not in text and "<" not in text:
                    found.append((str(path.relative_to(ROOT)), text))
    return found


ALL = [*carried(), *commands(LAUNCH)]


@pytest.mark.parametrize(("where", "command"), ALL, ids=lambda value: str(value)[:70])
def test_every_entrypoint_parses_and_its_config_loads(where, command, monkeypatch):
    monkeypatch.chdir(ROOT)
    check(command)


def test_documented_workers_share_the_work(monkeypatch):
    """No example asks for several workers that would each encode the whole graph."""
    monkeypatch.chdir(ROOT)
    tutorials = sorted((ROOT / "docs/tutorials").glob("*.md"))
    examples = [*ALL, *commands([*DOCUMENTS, *tutorials])]
    loaded = {text: check(text) for _, text in examples if "pretrain configs/" in text}
    several = {text: cfg for text, cfg in loaded.items() if cfg and cfg.resources.num_workers > 1}
    assert len(several) >= 10
    assert [text for text, cfg in several.items() if cfg.unshared_work()] == []


def test_each_place_has_entrypoints():
    assert {"launch/slurm.sbatch", "launch/runtime_env.yaml", "docs/LAUNCH.md"} <= {
        where for where, _ in ALL
    }
    assert any("--on ray" in command for where, command in ALL if where == "launch/slurm.sbatch")
    assert any(command.startswith("cimage submit pretrain ") for _, command in commands())


@pytest.mark.parametrize(
    "line", ["sbatch -N 2 launch/slurm.sbatch {}", "ray job submit --working-dir . -- {}"]
)
@pytest.mark.parametrize(
    "bad",
    [
        "cimage pretrian configs/demo.yaml",
        "cimage pretrain configs/absent.yaml",
        "cimage pretrain configs/demo.yaml train.epoch=1",
    ],
)
def test_a_wrong_entrypoint_is_found(monkeypatch, line, bad):
    monkeypatch.chdir(ROOT)
    found = CARRIED.search(line.format(bad))
    assert found is not None
    with pytest.raises(UserError):
        check(found[1])


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_shell_scripts_are_clean(path: Path):
    shellcheck = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(BIN))
    if shellcheck is None:
        pytest.skip("shellcheck is not installed (pip install 'cimage-dist[dev]')")
    done = subprocess.run([shellcheck, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_scripts_are_executable_and_there_are_some():
    assert {path.name for path in SCRIPTS} >= {"local_cluster.sh", "slurm.sbatch", "cimage"}
    assert all(path.stat().st_mode & 0o111 for path in SCRIPTS if path.suffix != ".sbatch")


def test_the_stand_in_for_the_command_runs():
    done = subprocess.run(
        [str(ROOT / "launch" / "bin" / "cimage"), "--version"],
        cwd=ROOT,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


@pytest.mark.parametrize(
    "argv",
    [
        ["begin"],
        ["start", "--nodes", "0"],
        ["start", "--nodes"],
        ["start", "--frob", "1"],
        ["start", "--dir", "/tmp/" + "x" * 40],
        [],
    ],
)
def test_local_cluster_refuses_bad_arguments(argv):
    done = subprocess.run(
        [str(ROOT / "launch" / "local_cluster.sh"), *argv],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "local_cluster.sh:" in done.stderr


def test_local_cluster_tells_when_nothing_runs(tmp_path):
    for action, code in (("status", 1), ("env", 1), ("stop", 0)):
        done = subprocess.run(
            [str(ROOT / "launch" / "local_cluster.sh"), action, "--dir", "/tmp/cim-none"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code and "no cluster is running in /tmp/cim-none" in done.stderr
