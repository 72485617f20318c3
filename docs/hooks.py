"""What the site adds to the documents: pages that live elsewhere, the table of settings, formulas.

MkDocs calls the functions by their names. The documents are written for a reader of the repository
too, so what only the site needs is done here.
"""

from __future__ import annotations

import dataclasses
import html
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from cimage_dist.config_loading import known_keys

ROOT = Path(__file__).parents[1]
ELSEWHERE = {
    "index.md": "README.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "KUBERNETES.md": "k8s/README.md",
}
_FENCE = re.compile(r"^```.*?^```", flags=re.M | re.S)
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', flags=re.S)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, source in ELSEWHERE.items():
        text = (ROOT / source).read_text().replace("](docs/", "](")
        files.append(File.generated(config, name, content=text))
    files.append(File.generated(config, "SETTINGS.md", content=settings()))
    return files


def settings() -> str:
    """Every setting with its default and meaning, a table for each section."""
    lines = ["# Settings", "", "Given as `key=value`, or as sections of a yaml file."]
    section = ""
    for key, field, about in known_keys():
        if (found := key.partition(".")[0]) != section:
            section = found
            lines += ["", f"## {section}", "", "| key | default | meaning |", "|---|---|---|"]
        default = field.default if field.default is not dataclasses.MISSING else _made(field)
        lines.append(f"| `{key}` | `{default}` | {html.escape(about).replace('|', '&#124;')} |")
    return "\n".join(lines)


def _made(field: dataclasses.Field[Any]) -> Any:
    assert field.default_factory is not dataclasses.MISSING
    return field.default_factory()


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Blank lines where Python's Markdown needs them and GitHub's does not: around displayed
    formulas, and before lists.
    """
    code = _FENCE.findall(markdown)
    parts = [_with_blank_lines(text) for text in _FENCE.split(markdown)]
    return "".join(part + fence for part, fence in zip(parts, [*code, ""], strict=True))


def _with_blank_lines(text: str) -> str:
    text = re.sub(r"^(\$\$.+?\$\$)$", r"\n\1\n", text, flags=re.M | re.S)
    return re.sub(r"^(?![-*|#]|\d+\. | )(.+)\n(?=- |\d+\. )", r"\1\n\n", text, flags=re.M)


def on_page_content(content: str, **_: Any) -> str:
    """Formulas as MathML, which browsers draw without a script."""
    return _FORMULA.sub(
        lambda found: convert(
            html.unescape(found[2]), display="block" if found[1] == "div" else "inline"
        ),
        content,
    )
