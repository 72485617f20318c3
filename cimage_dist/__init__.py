"""cimage_dist: node embeddings from large unlabelled graphs by conditional-independence masked
auto-encoding.

Public names load on first use, so that `import cimage_dist` and `cimage --help` stay fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "Config": "cimage_dist.config",
    "load_config": "cimage_dist.config_loading",
    "Graph": "cimage_dist.data.store",
    "open_graph": "cimage_dist.data.ingest",
    "Pretrainer": "cimage_dist.api",
    "evaluate": "cimage_dist.api",
    "export": "cimage_dist.pipeline.neighbors",
    "neighbors": "cimage_dist.pipeline.neighbors",
    "report": "cimage_dist.reporting.run",
    "compare": "cimage_dist.comparison",
    "RoutingConv": "cimage_dist.nn.routing",
    "UserError": "cimage_dist.errors",
    "Clusterer": "cimage_dist.registry",
    "LossInputs": "cimage_dist.registry",
    "register_clusterer": "cimage_dist.registry",
    "register_loss": "cimage_dist.registry",
}

if TYPE_CHECKING:
    from cimage_dist.api import Pretrainer, evaluate
    from cimage_dist.comparison import compare
    from cimage_dist.config import Config
    from cimage_dist.config_loading import load_config
    from cimage_dist.data.ingest import open_graph
    from cimage_dist.data.store import Graph
    from cimage_dist.errors import UserError
    from cimage_dist.nn.routing import RoutingConv
    from cimage_dist.pipeline.neighbors import export, neighbors
    from cimage_dist.registry import Clusterer, LossInputs, register_clusterer, register_loss
    from cimage_dist.reporting.run import report

__all__ = [
    "Clusterer",
    "Config",
    "Graph",
    "LossInputs",
    "Pretrainer",
    "RoutingConv",
    "UserError",
    "__version__",
    "compare",
    "evaluate",
    "export",
    "load_config",
    "neighbors",
    "open_graph",
    "register_clusterer",
    "register_loss",
    "report",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'cimage_dist' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
