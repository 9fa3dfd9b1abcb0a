"""What `isthmus node` says when it cannot begin."""

from __future__ import annotations

import pytest

from isthmus.cli.node import node
from isthmus.errors import ConfigError
from isthmus.types import Role


@pytest.mark.parametrize("role", Role)
def test_a_node_needs_a_head_to_join(role: Role) -> None:
    with pytest.raises(ConfigError, match=r"^isthmus node needs --role \S+ and --join HOST:PORT$"):
        node(role=role)
