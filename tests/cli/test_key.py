"""`isthmus key`: a key and the line by which a file knows it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from isthmus.config import key_digest, load_config
from tests.cli.conftest import Command


@pytest.mark.parametrize("tenant", ["acme", "42", "yes", "null", "1e3", "a.b_c-D"])
def test_the_line_goes_into_the_file_as_it_is(isthmus: Command, tmp_path: Path, tenant: str) -> None:
    status, out, err = isthmus("key", tenant)
    key, line = out.splitlines()
    assert (status, key[:8], len(key)) == (0, "isthmus-", 51) and key not in err
    file = tmp_path / "isthmus.yaml"
    file.write_text(f"auth:\n  keys:\n    {line}\n")
    (found,) = load_config(file, {}).auth.keys
    assert (found.tenant, found.sha256) == (tenant, key_digest(key))
    assert yaml.safe_load(line)[0].keys() == {"tenant", "sha256"}
    assert isthmus("key", tenant)[1] != out, "each key is new"


@pytest.mark.parametrize("tenant", ["", "a b", "a:b", "x" * 129])
def test_a_name_that_the_file_refuses_is_refused_here(isthmus: Command, tenant: str) -> None:
    status, out, err = isthmus("key", tenant)
    assert (status, out) == (2, "") and "auth.keys.0.tenant" in err and err.count("\n") == 1
