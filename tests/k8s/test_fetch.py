"""Raw files from an object store (here a folder): copied once, whole or not at all."""

from __future__ import annotations

import pytest

from cimage_dist.__main__ import main as cimage
from cimage_dist.deploy import main


@pytest.fixture
def store(tmp_path):
    (tmp_path / "store" / "OGB" / "raw").mkdir(parents=True)
    (tmp_path / "store" / "OGB" / "raw" / "edge.csv").write_text("0,1\n")
    (tmp_path / "store" / "a.txt").write_text("a")
    return tmp_path / "store"


def test_files_arrive_and_are_not_copied_twice(store, tmp_path, capsys):
    target = tmp_path / "data" / "raw"
    assert main([store.as_uri(), str(target)]) == 0
    assert (target / "OGB" / "raw" / "edge.csv").read_text() == "0,1\n"
    assert not list(target.rglob(".tmp-*"))
    (store / "a.txt").write_text("longer")
    assert main([store.as_uri(), str(target)]) == 0
    assert (target / "a.txt").read_text() == "longer"
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["2", "1"]


@pytest.mark.parametrize("address", ["file:///no/such/folder", "nonsense://x/y", "not an address"])
def test_a_wrong_address_is_reported(address, tmp_path, capsys):
    assert main([address, str(tmp_path)]) == 2
    assert "cannot be listed" in capsys.readouterr().err


def test_usage(capsys):
    assert main(["one"]) == 2
    assert "usage" in capsys.readouterr().err


def test_where_ingest_is_another_jobs_task_an_absent_graph_is_an_error(
    monkeypatch, tmp_path, capsys
):
    line = ["data.name=sbm", "data.sbm.num_nodes=50", f"data.store_dir={tmp_path}"]
    monkeypatch.setenv("CIMAGE_INGEST", "never")
    assert cimage(["ingest", *line]) == 2
    assert "cimage k8s render ingest" in capsys.readouterr().err
    monkeypatch.delenv("CIMAGE_INGEST")
    assert cimage(["ingest", *line]) == 0
    monkeypatch.setenv("CIMAGE_INGEST", "never")
    assert cimage(["ingest", *line]) == 0, "it is there"
