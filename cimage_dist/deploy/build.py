"""Makes the generated files of k8s/ anew: `make k8s`. The rendered overlays, and the ConfigMap of the configs that their entrypoints name."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from cimage_dist.deploy import kustomize
from cimage_dist.deploy.documents import of_kind, write
from cimage_dist.deploy.render import config_entries

ROOT = Path(__file__).parents[2]
CONFIG_MAP = "cimage-configs"
HEADER = "# Made by `make k8s` from {source}; do not edit.\n"
JOB_HEADER = """\
# Two kinds of retry: spec.backoffLimit starts a new cluster and resumes from the last checkpoint; spec.submitterConfig.backoffLimit only restarts
# the pod that submits and follows. The sources explain every other choice.
"""


def sources(root: Path) -> list[Path]:
    """Every folder that is applied by itself."""
    return [*sorted((root / "k8s" / "setup").iterdir()), *sorted((root / "k8s" / "overlays").glob("*/ray*"))]


def generated(root: Path = ROOT) -> dict[Path, str]:
    """Path and content of every generated file under k8s/. The base's own come first: the rest is rendered from them."""
    base = root / "k8s" / "base"
    named = sorted(
        {path for leaf in (root / "k8s" / "overlays").glob("*/*/kustomization.yaml") for path in re.findall(r"configs/[\w/.-]+\.yaml", leaf.read_text())}
    )
    data, items = config_entries({path: (root / path).read_text() for path in named if (root / path).is_file()})
    header = HEADER.format(source="the configs that the overlays' entrypoints name")
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": CONFIG_MAP}, "data": data}
    volume = {"name": "configs", "configMap": {"name": CONFIG_MAP, "items": items}}
    mount = [{"op": "add", "path": "/spec/headGroupSpec/template/spec/volumes/-", "value": volume}]
    return {base / "configs.yaml": header + write([config_map]), base / "configs-mount.yaml": header + write([mount])}  # type: ignore[list-item]


def rendered(root: Path = ROOT) -> dict[Path, str]:
    files = {}
    for folder in sources(root):
        documents = kustomize.build(folder)
        header = HEADER.format(source=folder.relative_to(root)) + (JOB_HEADER if list(of_kind(documents, "RayJob")) else "")
        files[root / "k8s" / "rendered" / f"{folder.parent.name}-{folder.name}.yaml"] = header + write(documents)
    return files


def main() -> int:
    for make in (generated, rendered):
        for path, text in make().items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
