"""The renderer: what it does not understand it refuses; JSON patches do what RFC 6902 says."""

from __future__ import annotations

import pytest

from cimage_dist.deploy import jsonpatch, kustomize
from cimage_dist.deploy.quantities import number
from cimage_dist.errors import UserError

MAP = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\ndata: {x: '1'}\n"


def folder(tmp_path, text):
    (tmp_path / "map.yaml").write_text(MAP)
    (tmp_path / "kustomization.yaml").write_text(f"apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources: [map.yaml]\n{text}")
    return tmp_path


def test_patches_and_replacements(tmp_path):
    made = kustomize.build(
        folder(
            tmp_path,
            """
namespace: n
patches:
  - {target: {kind: ConfigMap}, patch: "[{op: add, path: /data/y~1z, value: '2'}]"}
replacements:
  - {source: {kind: ConfigMap, fieldPath: data.x}, targets: [{select: {kind: ConfigMap}, fieldPaths: [data.w], options: {create: true}}]}
""",
        )
    )
    assert made == [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a", "namespace": "n"}, "data": {"x": "1", "y/z": "2", "w": "1"}}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("namePrefix: x-", "namePrefix not supported"),
        ("images: [{name: a, newTag: b}]", "images not supported"),
        ("patches: [{patch: 'kind: ConfigMap'}]", "only JSON patches with a target"),
        ("patches: [{target: {labelSelector: a}, patch: '[]'}]", "labelSelector not supported"),
        ("patches: [{target: {kind: ConfigMap}, patch: '[{op: test, path: /data}]'}]", "operation 'test' is not supported"),
        ("patches: [{target: {kind: ConfigMap}, patch: '[{op: replace, path: /data/q, value: 1}]'}]", "cannot replace /data/q"),
        ("patches: [{target: {kind: ConfigMap}, patch: '[{op: replace, path: /metadata/name, value: b}]'}]", "allowNameChange"),
        ("replacements: [{source: {kind: Secret, fieldPath: data}, targets: []}]", "0 documents match"),
        ("replacements: [{source: {kind: ConfigMap, fieldPath: data.x}, targets: [{select: {kind: ConfigMap}, fieldPaths: [data.v]}]}]", "create: true"),
        (
            "replacements: [{source: {kind: ConfigMap, fieldPath: data.x}, targets: [{select: {kind: ConfigMap}, fieldPaths: [data.x], reject: []}]}]",
            "reject not",
        ),
        ("components: [gone]", "has no kustomization.yaml"),
    ],
)
def test_what_it_does_not_know_is_refused(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        kustomize.build(folder(tmp_path, text))


@pytest.mark.parametrize(
    ("operation", "result"),
    [
        ({"op": "add", "path": "/a/1", "value": 9}, [1, 9, 2]),
        ({"op": "add", "path": "/a/-", "value": 9}, [1, 2, 9]),
        ({"op": "replace", "path": "/a/0", "value": 9}, [9, 2]),
        ({"op": "remove", "path": "/a/1"}, [1]),
    ],
)
def test_patches_of_lists(operation, result):
    document = {"a": [1, 2]}
    jsonpatch.apply(document, [operation], "here")
    assert document == {"a": result}


@pytest.mark.parametrize("path", ["/a/2", "/a/-1", "/a/x", "/b/c", "/a/0/c"])
def test_a_patch_of_nothing_is_an_error(path):
    with pytest.raises(UserError, match=r"here: cannot replace .* no such place"):
        jsonpatch.apply({"a": [1, 2]}, [{"op": "replace", "path": path, "value": 0}], "here")


def test_quantities():
    assert [number(text) for text in ("500m", "8", 2, "1.5", "4Gi", "2k")] == [0.5, 8, 2, 1.5, 2**32, 2000]
    with pytest.raises(UserError, match="not a Kubernetes quantity"):
        number("4 GB")
