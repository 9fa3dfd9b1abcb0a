from __future__ import annotations

import ast
from functools import cache

import pytest

from tests.edits import Code, Stale, path_of
from tests.protections import ROOT, protections

SOURCE = ast.unparse(
    ast.parse("""
class Lock:
    def turn(self, key):
        '''Opens for the key that fits.'''
        if key is None or self.fits(key) > MOST:
            raise ValueError('a key that does not fit')
        self.count = self.count + 1
        return key and self.fits(key)
""")
)


def test_each_has_a_test_and_a_symbol() -> None:
    """Whether its edit has a place there is not asked, or each change of a function would begin with this table;
    `make protections` does."""
    code, text = cache(lambda path: Code(path.read_text())), cache(lambda file: (ROOT / file).read_text())
    for one in protections():
        file, _, name = one.test.partition("::")
        assert f"def {name}(" in text(file), one
        assert code(path_of(one.symbol, ROOT)).owners(one.symbol), one


@pytest.mark.parametrize(
    ("edit", "old", "new"),
    [
        ("never MOST", "self.fits(key) > MOST", "False"),
        ("always None MOST", "key is None or self.fits(key) > MOST", "True"),
        ("skip ValueError", "raise ValueError('a key that does not fit')", "pass"),
        ("skip does not fit", "raise ValueError('a key that does not fit')", "pass"),
        ("skip count", "self.count = self.count + 1", "pass"),
        ("1 is 0", "+ 1", "+ 0"),
        ("fits() MOST is key == 1", "self.fits(key) > MOST", "key == 1"),
        ("every fits() is len(key)", "self.fits(key)", "len(key)"),
        ("returns None", '"""Opens for the key that fits."""', "return None"),
    ],
)
def test_an_edit_is_made_in_the_smallest_that_mentions_its_words(edit: str, old: str, new: str) -> None:
    code = Code(SOURCE)
    code.change("lock:Lock.turn", edit)
    assert ast.unparse(code.tree) == SOURCE.replace(old, new) != SOURCE


@pytest.mark.parametrize(
    ("symbol", "edit", "why"),
    [
        ("Lock.open", "never MOST", "there is no lock:Lock.open"),
        ("Lock.turn", "never LEAST", "'never LEAST' has no places"),
        ("Lock.turn", "fits() is 1", "'fits\\(\\) is 1' has 2 places"),
        ("Lock.turn", "MOST is most", "nothing in the module is named most"),
        ("Lock.turn", "MOST is", "'MOST is' is no edit"),
    ],
)
def test_an_edit_that_fits_no_more_says_so(symbol: str, edit: str, why: str) -> None:
    with pytest.raises(Stale, match=why):
        Code(SOURCE).change(f"lock:{symbol}", edit)
