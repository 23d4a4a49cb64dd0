import re
import sys

import pytest

from experiments.bench import peers

pytestmark = pytest.mark.once


def test_without_their_libraries_there_are_no_peers_and_the_bench_says_so(monkeypatch, capsys):
    libraries = {"PyTorch": "torch", "Liger-Kernel": "liger_kernel", "QuACK": "quack", "tokamax": "tokamax"}
    libraries |= {"torchlogix": "torch"}  # which it imports first
    for peer, library in libraries.items():
        monkeypatch.setitem(sys.modules, library, None)
        monkeypatch.delitem(sys.modules, peers.PEERS[peer], raising=False)
    assert list(peers.installed()) == ["published automaton"]  # which is of JAX
    lines = [rf"{peer} is left out: .*{library}.*\n" for peer, library in libraries.items()]
    assert re.fullmatch("".join(lines), capsys.readouterr().out)


def test_a_run_without_the_peers_asked_for_goes_on(quickly, monkeypatch):
    monkeypatch.setattr(peers, "PEERS", {"Peer": "no_such_module"})
    code, report = quickly("--peers")
    assert code == 0 and all(row["peer"] is None for row in report["rows"])
