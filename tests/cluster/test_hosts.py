"""Where processes run: what is asked of whoever has not installed Ray, and what a process is told."""

from __future__ import annotations

import sys

import pytest

from isthmus.cluster.hosts import LocalHosts, hosts_of, trouble_of, with_ray
from isthmus.config import Config
from isthmus.errors import ConfigError


def test_nodes_are_on_this_machine_unless_it_is_said() -> None:
    assert isinstance(hosts_of(Config()), LocalHosts)


def test_without_ray_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "isthmus.cluster.ray_hosts", raising=False)
    monkeypatch.delattr("isthmus.cluster.ray_hosts", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError) as caught:
        hosts_of(Config(placement="ray"))
    said = "placement: ray needs Ray, which is not installed: pip install 'isthmus[ray]'"
    assert str(caught.value) == said
    with pytest.raises(ConfigError, match=r"^--ray needs Ray"):
        with_ray("--ray")


@pytest.mark.parametrize(
    ("output", "code", "said"),
    [
        (b'noise\n{"error":"no model"}\n', 3, "no model"),
        (b"", 1, "exit status 1"),
        (b"noise", -9, "exit status -9 (killed; is there enough memory?)"),
    ],
)
def test_why_a_node_ended(output: bytes, code: int, said: str) -> None:
    assert trouble_of(output, code) == said
