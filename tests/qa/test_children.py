import os
import sys
import time
import types

import pytest

from tests.qa.children import in_children


def work(task):
    yield os.getpid()
    if task == "abort":
        os.write(2, b"why it died\n    @     0x7fb8 xla::Run()\n")
        os.abort()
    if task == "hang":
        time.sleep(60)
    if task == "raise":
        raise ValueError("a mistake in the work")
    yield task


def test_what_dies_or_hangs_takes_its_own_task_alone():
    tasks = ["abort", "a", "hang", "b", "raise", "c"]
    done = list(in_children(work, tasks, processes=2, limit=5))
    assert [one.task for one in done] == tasks
    deaths = {one.task: one.death for one in done}
    assert deaths == dict.fromkeys("abc") | {"abort": "SIGABRT", "hang": "no answer in 5 s", "raise": "exit code 1"}
    assert all(one.results[1:] == ([] if one.death else [one.task]) for one in done)
    said = {one.task: one.said for one in done}
    assert said["abort"].startswith("why it died") and "xla" not in said["abort"]
    assert "a mistake in the work" in said["raise"] and not said["c"]
    assert len({one.results[0] for one in done}) <= 5


def test_processes_go_on_with_other_tasks_and_end_with_their_parent(monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    done = in_children(work, iter(range(10**9)), processes=1, limit=60)
    first, second = next(done), next(done)
    assert (first.results[1], second.results[1]) == (0, 1) and first.results[0] == second.results[0]
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    done.close()
    with pytest.raises(ProcessLookupError):
        os.kill(first.results[0], 0)


def test_a_process_that_does_not_start_is_an_error(monkeypatch):
    absent = types.ModuleType("absent")
    exec("def work(task): pass", vars(absent))
    monkeypatch.setitem(sys.modules, "absent", absent)
    with pytest.raises(RuntimeError, match="with exit code 1 before it was ready for its first task"):
        list(in_children(absent.work, [1], processes=1, limit=60))
