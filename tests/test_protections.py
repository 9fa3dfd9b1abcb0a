from __future__ import annotations

from pathlib import Path

import pytest

from tests.protections import ROOT, Protection, protections


@pytest.mark.parametrize("one", protections(), ids=lambda one: one.what)
def test_a_protection_is_where_the_table_says(one: Protection) -> None:
    """`make protections` takes each away; here the table only keeps in step with the code."""
    assert (ROOT / one.path).read_text().count(one.old) == 1
    file, _, name = one.test.partition("::")
    assert f"def {name}(" in Path(ROOT / file).read_text()


def test_each_has_a_name_of_its_own() -> None:
    names = [one.what for one in protections()]
    assert len(set(names)) == len(names) >= 150
