"""The same few configs are loaded by hundreds of checks: each is read and checked once."""

from __future__ import annotations

from pathlib import Path

import pytest

from cimage_dist.deploy import entrypoint


@pytest.fixture(scope="session", autouse=True)
def configs_loaded_once():
    load, known = entrypoint.config_for, {}

    def config_for(verb, paths, overrides):
        texts = tuple(Path(path).read_text() for path in paths if Path(path).is_file())
        key = (verb, len(paths), texts, tuple(overrides))
        if key not in known or len(texts) < len(paths):
            known[key] = load(verb, paths, overrides)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entrypoint, "config_for", config_for)
        yield
