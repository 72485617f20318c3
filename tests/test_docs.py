"""What the documents say must be true: commands parse, samples run, tables match the result
files.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from cimage_dist.__main__ import FAMILIES, parse
from cimage_dist.cli.common import config_for, split_settings
from cimage_dist.cli.remote import job_line
from cimage_dist.config import Config
from cimage_dist.config_loading import known_keys
from cimage_dist.eval.controls import CONTROLS
from experiments.cell import read_result
from experiments.document import (
    BEGIN,
    END,
    FIGURE,
    HEADLINE_BEGIN,
    HEADLINE_END,
    document,
    headline,
)
from experiments.figure import gain_svg
from experiments.render import outdated
from experiments.spec import RULER, load_tables

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "Makefile",
    ROOT / "k8s" / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "configs").rglob("*.yaml")),
]

MADE_BY_THE_SITE = {"SETTINGS.md"}


def commands(documents: Sequence[Path] = DOCUMENTS) -> list[tuple[str, str]]:
    found = []
    for path in documents:
        for line in path.read_text().replace("\\\n", " ").splitlines():
            for part in re.split(
                r"&&|`| \| | > |: (?=cimage )|, or (?=cimage )", line.split("  #")[0]
            ):
                text = part.strip().lstrip("#").strip().removeprefix("$(BIN)/")
                if (
                    re.match(r"cimage [a-z0-9]+( |$)", text)
                    and "<" not in text
                    and "..." not in text
                ):
                    found.append((str(path.relative_to(ROOT)), text))
    return found


def check(command: str) -> Config | None:
    """It parses, a submitted line too, and its config loads; that config, where it names one. A
    verb alone may be a mention: it must exist.
    """
    words = shlex.split(command)[1:]
    if len(words) == 1:
        assert any(words[0] in family.VERBS for family in FAMILIES), command
        return None
    args = parse(words)
    if args.verb == "submit":
        _, args = job_line(args)
    paths, overrides = split_settings(getattr(args, "settings", None) or [])
    paths = [path for path in paths if path not in ("my_graph", "runs/mine")]  # the reader's own
    if not (paths or overrides):
        return None
    return config_for(getattr(args, "job", args.verb), paths, overrides)


@pytest.mark.parametrize(("where", "command"), commands(), ids=lambda v: str(v)[:60])
def test_every_command_parses_and_its_config_loads(where, command, monkeypatch):
    monkeypatch.chdir(ROOT)
    check(command)


def test_there_are_commands_to_check():
    assert len(commands()) > 20


def test_the_tree_names_what_exists():
    text = (ROOT / "docs/ARCHITECTURE.md").read_text().split("## What is where")[1].split("```")[1]
    for name in re.findall(r"^  ?(?:  )?([a-z_]+(?:\.py|/))", text, flags=re.M):
        assert (ROOT / name).exists() or (ROOT / "cimage_dist" / name).exists(), name


def test_results_document_matches_the_result_files(monkeypatch):
    monkeypatch.chdir(ROOT)
    tables, results = load_tables(Path("experiments/tables")), Path("experiments/results")
    shown = (ROOT / "docs" / "RESULTS.md").read_text().split(BEGIN)[1].split(END)[0].strip()
    assert shown == document(tables, results), "run: python -m experiments --render"
    text = Path("README.md").read_text().split(HEADLINE_BEGIN)[1].split(HEADLINE_END)[0].strip()
    assert text == headline(tables, results), "run: python -m experiments --render"


def test_the_figure_matches_the_result_files(monkeypatch):
    """Mark by mark: where letters are placed depends on the fonts of the machine that drew it."""
    monkeypatch.chdir(ROOT)
    made = gain_svg(load_tables(Path("experiments/tables")), Path("experiments/results"))
    shown = (ROOT / "docs" / FIGURE).read_text()
    marks, wanted = (re.findall(r'aria-label="(\w+: [^"]+)"', svg) for svg in (shown, made))
    assert len(wanted) > 50
    assert marks == wanted, "run: python -m experiments --render"


def test_results_were_made_with_the_configs_that_are_shipped(monkeypatch):
    monkeypatch.chdir(ROOT)
    results = Path("experiments/results")
    cells = [cell for table in load_tables(Path("experiments/tables")) for cell in table.cells()]
    # Results scored by an earlier ruler are outdated, and the document says so under their table.
    old = [cell for cell in cells if outdated(cell, results)]
    assert [
        cell.folder for cell in old if read_result(cell.path(results)).get("ruler", 1) == RULER
    ] == []
    used = {cell.path(results) for cell in cells}
    assert set(results.glob("*/*/*/seed-*.json")) <= used, "a result that no table shows"
    there = [cell for cell in cells if cell.path(results).is_file()]
    assert [
        cell.folder
        for cell in there
        if read_result(cell.path(results))["command"] != cell.command()
    ] == []


def test_every_cited_section_is_in_the_method():
    """`§n` in code, configs and documents means a heading of docs/METHOD.md."""
    method = (ROOT / "docs/METHOD.md").read_text()
    sections = set(re.findall(r"^##+ (\d+(?:\.\d+)*)\.? ", method, flags=re.M))
    places = [
        path
        for folder in ("cimage_dist", "configs", "experiments", "benchmarks", "docs", "tests")
        for path in (ROOT / folder).rglob("*")
    ]
    texts = {path: path.read_text() for path in places if path.suffix in (".py", ".md", ".yaml")}
    cited = [
        (path, number)
        for path, text in texts.items()
        for number in re.findall(r"§(\d+(?:\.\d+)*)", text)
    ]
    assert len(cited) > 100
    assert not [(str(path), number) for path, number in cited if number not in sections]


def test_links_resolve():
    """Relative links of the documents lead to files; tests/test_site.py builds the site."""
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "k8s/README.md"]:
        for target in re.findall(r"\]\(([^)#\s]+)", path.read_text()):
            if "://" not in target and target not in MADE_BY_THE_SITE:
                assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_the_front_page_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) < 150


def _definitions() -> dict[str, set[str]]:
    """Functions, classes, methods and capital constants of the package and the modules that define
    them.
    """
    found: dict[str, set[str]] = {}
    for path in [*(ROOT / "cimage_dist").rglob("*.py"), *(ROOT / "experiments").glob("*.py")]:
        where = str(path.relative_to(ROOT)).removeprefix("cimage_dist/")
        for node in ast.parse(path.read_text()).body:
            names = []
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names = [node.name]
            if isinstance(node, ast.ClassDef):
                inner = [item for item in node.body if isinstance(item, ast.FunctionDef)]
                names += [f"{node.name}.{item.name}" for item in inner]
            if isinstance(node, ast.Assign):
                names = [t.id for t in node.targets if isinstance(t, ast.Name) and t.id.isupper()]
            for name in names:
                found.setdefault(name, set()).add(where)
    return found


# Sections that describe, whose code other sections name.
WITHOUT_CODE = {"1.1", "1.3", "10.3", "11.4", "12.2", "13", "14"}


def test_every_section_of_the_method_names_its_code():
    """`Code:` lists the modules that define what a section names, no more and no fewer."""
    known = _definitions()
    parts = re.split(r"(?m)^#{2,3} ", (ROOT / "docs/METHOD.md").read_text())[1:]
    sections = {part.split(" ")[0].rstrip("."): part for part in parts}
    checked = 0
    for number, text in sections.items():
        has_parts = f"{number}.1" in sections
        listed = re.search(r"^Code: ([^.]*(?:\.py[^.]*)+)\.$", text, flags=re.M)
        if listed is None:
            assert number in WITHOUT_CODE or has_parts, f"§{number} names no module"
            continue
        modules = set(re.findall(r"`([^`]+)`", listed[1]))
        words = set(re.findall(r"`([A-Za-z_][\w.]*)`", text))
        named = {word: known[word] for word in words if word in known}
        lost = {name: places for name, places in named.items() if not places & modules}
        assert not lost, f"§{number}: {lost} not in {modules}"
        idle = modules - set().union(*named.values())
        assert not idle, f"§{number}: {idle} defines nothing that the section names"
        checked += 1
    assert checked > 40


def test_the_method_names_what_exists():
    """A name in code style is defined in the package, is a setting, or is in its help."""
    text = " ".join(f"{key} {item.type} {about}" for key, item, about in known_keys())
    results = {"ok", "pool"}  # of a partition, of a probe
    words = {*re.findall(r"\w+", text), *_definitions(), *CONTROLS, *results}
    named = set(re.findall(r"`([A-Za-z_]\w*)`", (ROOT / "docs/METHOD.md").read_text()))
    assert not named - words
