"""Every command that the manifests, the launch files and the documents name parses with the real command line, and its config loads."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from cimage_dist.cli.common import split_settings
from cimage_dist.cli.jobs import job_line
from cimage_dist.cli.main import build_parser, parse
from cimage_dist.deploy import entrypoint
from cimage_dist.deploy.documents import of_kind, read
from cimage_dist.errors import UserError
from tests.k8s.checkers import ROOT

TEXTS = [
    path
    for pattern in ("README.md", "docs/*.md", "k8s/**/*", "launch/**/*", "Dockerfile")
    for path in sorted(ROOT.glob(pattern))
    if path.is_file() and "rendered" not in path.parts and path.suffix != ".pyc"
]
# Places for the reader to fill in, or for the shell.
NOT_LITERAL = re.compile(r"[<$\[{]|\.\.\.")


def commands_in(text: str) -> list[str]:
    """Commands that begin with `cimage`, alone on a line or after what usually stands before them."""
    found = []
    for line in text.splitlines():
        for part in re.split(r"&&|`|\||;|: (?=cimage )|, or (?=cimage )|-- (?=cimage )|value: \"", line.split("  #")[0]):
            words = part.strip().lstrip("#").strip()
            words = re.split(r'"\}|"$| > ', words)[0].strip()
            if re.match(r"cimage [a-z0-9]+( |$)", words) and not NOT_LITERAL.search(words):
                found.append(words)
    return found


def entrypoints() -> dict[str, list[str]]:
    """Each command, and the files that name it."""
    found = [(str(path.relative_to(ROOT)), command) for path in TEXTS for command in commands_in(path.read_text())]
    for path in sorted((ROOT / "k8s" / "rendered").glob("*.yaml")):
        for job in of_kind(read(path), "RayJob"):
            found.append((str(path.relative_to(ROOT)), job["spec"]["entrypoint"]))
    return {command: sorted({where for where, same in found if same == command}) for _, command in found}


def check(command: str) -> None:
    if re.fullmatch(r"cimage( [a-z0-9]+)+", command):  # named in a sentence, without settings: the verb must be there
        assert command.split()[1] in build_parser()._subparsers._group_actions[0].choices
        return None
    args = parse(shlex.split(command)[1:])
    verb = args.verb
    if verb == "submit":  # the job's own words are a command as well
        return check("cimage " + shlex.join(job_line(args)[0]))
    if verb == "k8s":
        verb = args.job
    is_folder = verb == "report" and len(args.settings) == 1 and Path(args.settings[0]).is_dir()  # of a run, a sweep or tables
    if getattr(args, "settings", None) and not is_folder:
        entrypoint.config_for(verb, *split_settings(args.settings))
    return None


@pytest.mark.parametrize(("command", "places"), entrypoints().items(), ids=lambda value: value[:80] if isinstance(value, str) else value[0])
def test_it_parses_and_its_config_loads(command, places, monkeypatch):
    monkeypatch.chdir(ROOT)
    check(command)


def test_the_collector_finds_what_is_there():
    places = {where for found in entrypoints().values() for where in found}
    assert {"README.md", "k8s/README.md", "k8s/overlays/gpu/rayjob-pretrain/kustomization.yaml", "k8s/rendered/gpu-rayjob-pretrain.yaml"} <= places
    assert any(where.startswith("launch/") for where in places)
    text = (
        'ray job submit -- cimage embed a.yaml\n#   cimage doctor && cimage show x.yaml  # why\nvalue: "cimage pretrain a.yaml --on ray"}\ncimage submit <verb>'
    )
    assert commands_in(text) == ["cimage embed a.yaml", "cimage doctor", "cimage show x.yaml", "cimage pretrain a.yaml --on ray"]


@pytest.mark.parametrize(
    "command", ["cimage pretrian configs/demo.yaml", "cimage pretrain configs/demo.yaml a.b=1", "cimage submit pretrain configs/gone.yaml"]
)
def test_a_wrong_command_would_be_found(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError):
        check(command)
