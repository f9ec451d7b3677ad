"""What may stay in memory: a quarter of what there is, or of a limit below it."""

import pytest

from towers.app.datasets import dataset


def test_a_quarter_of_the_memory_fits_and_one_byte_more_does_not(monkeypatch):
    monkeypatch.setattr(dataset, "usable_memory", lambda: 4000)
    assert dataset.fits(1000) and not dataset.fits(1001)


@pytest.mark.parametrize(("groups", "file"), [
    ("0::/mine\n", "mine/memory.max"),
    ("3:cpu:/\n2:memory:/mine\n", "memory/mine/memory.limit_in_bytes"),
])
def test_the_limit_of_the_processs_control_group_counts(groups, file, monkeypatch, tmp_path):
    machine = dataset.usable_memory()
    (tmp_path / "groups").write_text(groups)
    monkeypatch.setattr(dataset, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(dataset, "MOUNTED", tmp_path)
    assert dataset.usable_memory() == machine > 2**20
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text("max\n")
    assert dataset.usable_memory() == machine
    (tmp_path / file).write_text(f"{2**20}\n")
    assert dataset.usable_memory() == 2**20
