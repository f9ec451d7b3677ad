"""What may stay in memory: a quarter of what there is, or of a limit below it."""

import resource

from towers.datasets import memory_share


def test_a_quarter_of_the_memory_fits_and_one_byte_more_does_not(monkeypatch):
    monkeypatch.setattr(memory_share, "usable_memory", lambda: 4000)
    assert memory_share.fits(1000) and not memory_share.fits(1001)


def test_a_limit_of_the_process_or_its_container_counts(monkeypatch, tmp_path):
    machine = memory_share.usable_memory()
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory_share, "_CGROUP", limit)
    limit.write_text("max\n")
    assert memory_share.usable_memory() == machine > 2**20
    limit.write_text(f"{2**20}\n")
    assert memory_share.usable_memory() == 2**20
    limits = {resource.RLIMIT_AS: (resource.RLIM_INFINITY,) * 2, resource.RLIMIT_DATA: (999, 9999)}
    monkeypatch.setattr(resource, "getrlimit", limits.get)
    assert memory_share.usable_memory() == 999
