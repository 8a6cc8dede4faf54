"""Memory that the processes here may use."""

from __future__ import annotations

from fathoms.machine.memory import usable_memory


def test_the_limit_of_a_container_counts_where_it_is_below_the_machine(tmp_path):
    whole = usable_memory(tmp_path)
    assert whole > 2**28
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    for said, usable in (("max\n", whole), (f"{2**28}\n", 2**28), (f"{2**63}\n", whole)):
        (tmp_path / "sys/fs/cgroup/memory.max").write_text(said)
        assert usable_memory(tmp_path) == usable


def test_a_system_that_does_not_say_its_memory_has_none(tmp_path, monkeypatch):
    def refuse(name):
        raise ValueError(name)

    monkeypatch.setattr("os.sysconf", refuse)
    assert usable_memory(tmp_path) is None
