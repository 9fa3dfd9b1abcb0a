from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from isthmus.core.errors import StartError
from isthmus.live.gateway.server import connections_within


def test_connections_leave_descriptors_for_nodes() -> None:
    assert connections_within(1024, 2, None) == 1024 - 256 - 16
    assert connections_within(65_536, 2, None) == 16_384
    assert connections_within(65_536, 2, 20_000) == 20_000
    assert connections_within(1024, 2, 10) == 10


@pytest.mark.parametrize(("descriptors", "asked"), [(1024, 753), (280, None)])
def test_what_does_not_fit_is_said(descriptors: int, asked: int | None) -> None:
    with pytest.raises(StartError, match=r"limits.connections\) do not fit in .* descriptors"):
        connections_within(descriptors, 2, asked)


def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    """In a process of its own: a limit cannot be taken back."""
    script = (
        "import resource; from isthmus.live.gateway.server import raise_descriptors; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 1000)); print(raise_descriptors()); "
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard >= 1000 or hard == resource.RLIM_INFINITY
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1000", "1000"]
