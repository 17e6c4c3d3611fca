"""`make audit` names the pins that have published advisories, by a file where there is no network."""

import json
import zipfile

import pytest

from testing import audit

PINNED = {"torch": {"2.13.0+cu130"}, "ruamel-yaml": {"0.18.6"}}


def record(name, ecosystem="PyPI", versions=(), events=(), **more):
    ranges = [{"type": "ECOSYSTEM", "events": [dict([event]) for event in events]}]
    package = {"name": name, "ecosystem": ecosystem}
    return {"id": "PYSEC-1", "affected": [{"package": package, "versions": list(versions), "ranges": ranges}]} | more


@pytest.mark.parametrize("one, says", [
    (record("torch", versions=["2.12.0", "2.13.0"]), ["torch 2.13.0+cu130: PYSEC-1"]),
    (record("Torch", events=[("introduced", "0"), ("fixed", "2.13.1")]), ["(fixed in 2.13.1)"]),
    (record("torch", events=[("introduced", "2.2"), ("last_affected", "2.13.1")]), ["no version is known"]),
    (record("torch", events=[("introduced", "0"), ("last_affected", "2.13.0")]), ["torch 2.13.0+cu130"]),
    (record("torch", events=[("introduced", "0"), ("last_affected", "2.12")]), []),
    (record("torch", versions=["2.13"]), ["torch 2.13.0+cu130"]),
    (record("torch", versions=["2.13.0rc1", "of long ago"]), []),
    (record("ruamel.yaml", events=[("introduced", "0")]), ["ruamel-yaml 0.18.6"]),
    (record("torch", events=[("introduced", "0"), ("fixed", "2.13.0")]), []),
    (record("torch", events=[("introduced", "2.14")]), []),
    (record("torch", events=[("fixed", "2.9"), ("introduced", "0"), ("introduced", "2.10")]), ["torch"]),
    (record("torch", events=[("introduced", "0"), ("last_affected", "2.9")]), []),
    (record("torch", ecosystem="npm", versions=["2.13.0"]), []),
    (record("torch", versions=["2.13.0"], withdrawn="2026-01-01T00:00:00Z"), []),
    (record("torchvision", versions=["2.13.0"]), []),
])  # fmt: skip
def test_an_advisory_means_the_versions_that_it_names(one, says, tmp_path):
    texts = {"one.json": json.dumps(one), "lines.json": f"{json.dumps(one)}\n{json.dumps(record('x'))}\n"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        _, lines = audit.found(tmp_path / name, PINNED)
        assert len(lines) == len(says) and all(part in line for part, line in zip(says, lines, strict=True))
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("PYSEC-1.json", json.dumps(one))
    assert audit.found(tmp_path / "all.zip", PINNED) == (1, lines)


def test_the_pins_of_every_file_are_looked_for_and_nothing_read_is_no_pass(tmp_path, capsys):
    pinned = audit.pins()
    assert set(pinned) >= {"torch", "pytest", "skypilot"}
    (tmp_path / "torch.json").write_text(json.dumps(record("torch", versions=sorted(pinned["torch"]))))
    assert audit.main([str(tmp_path / "torch.json")]) == 1
    assert f"{len(pinned['torch'])} affected" in capsys.readouterr().out
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:  # an advisory for each pin
        for name, versions in pinned.items():
            archive.writestr(f"{name}.json", json.dumps(record(name, versions=sorted(versions), id=f"PYSEC-{name}")))
    assert audit.main([str(tmp_path / "all.zip")]) == 1
    said = capsys.readouterr().out.splitlines()
    assert {line.partition(": PYSEC-")[0] for line in said[:-1]} == {
        f"{name} {version}" for name, versions in pinned.items() for version in versions
    }
    (tmp_path / "other.json").write_text(json.dumps(record("nobody")))
    assert audit.main([str(tmp_path / "other.json")]) == 0
    for text in ("", "[]", "<html>", '{"message": "not found"}'):
        (tmp_path / "bad").write_text(text)
        assert audit.main([str(tmp_path / "bad")]) == 2, text
    assert audit.main([]) == audit.main([str(tmp_path / "nowhere")]) == 2
    assert "advisories" in capsys.readouterr().err
