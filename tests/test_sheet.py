"""One table, four ways to show it."""

from __future__ import annotations

import io
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from isthmus.cli.outputs import show
from isthmus.sheet import Sheet, escaped, numbers, texts, written

NASTY = '"><script>alert(1)</script>&amp;\x00\x1b]]>'
SHOWN = NASTY.replace("\x00", "\ufffd").replace("\x1b", "\ufffd")
SHEET = Sheet(
    "Rates [bold]",
    (*texts("plan"), *numbers("rate", unit="requests/s", form=".2f"), *numbers("tokens")),
    [("a | b", 2.0, 1_234_567), (NASTY, None, "none")],
    ["Read it so."],
)


def test_markdown_is_aligned_and_has_title_and_notes() -> None:
    plain = Sheet(SHEET.title, SHEET.columns, [("a | b", 2.0, 1_234_567), ("c", None, "none")], SHEET.notes)
    assert plain.markdown() == (
        "Rates [bold]\n\n"
        "| plan   | rate (requests/s) |    tokens |\n"
        "| ------ | ----------------: | --------: |\n"
        "| a \\| b |              2.00 | 1,234,567 |\n"
        "| c      |                 – |      none |\n\n"
        "Read it so.\n"
    )


def test_a_terminal_gets_a_drawn_table_and_a_file_gets_markdown() -> None:
    file = io.StringIO()
    show(SHEET, SHEET, file=file)
    assert file.getvalue() == f"{SHEET.markdown()}\n{SHEET.markdown()}\n"
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(SHEET.terminal())
    drawn = capture.get()
    assert "Rates [bold]" in drawn and "1,234,567" in drawn and "Read it so." in drawn and "|--" not in drawn


def test_json_has_values_units_and_alignment() -> None:
    assert SHEET.as_json() == {
        "title": "Rates [bold]",
        "columns": [
            {"name": "plan", "unit": "", "align": "left"},
            {"name": "rate", "unit": "requests/s", "align": "right"},
            {"name": "tokens", "unit": "", "align": "right"},
        ],
        "rows": [["a | b", 2.0, 1_234_567], [NASTY, None, "none"]],
        "notes": ["Read it so."],
    }


def test_html_is_one_table_in_which_every_text_stays_text() -> None:
    table = ElementTree.fromstring(SHEET.html())
    assert {each.tag for each in table.iter()} == {"table", "thead", "tbody", "tr", "th", "td"}
    assert ["".join(row.itertext()) for row in table.iter("tr")] == [
        "planrate (requests/s)tokens",
        "a | b2.001,234,567",
        f"{SHOWN}–none",
    ]
    bare = Sheet("", texts("", ""), [("a", "b")])
    assert "thead" not in bare.html() and bare.markdown().startswith("|     |     |\n")


@given(st.text())
def test_any_text_is_well_formed_and_comes_back(text: str) -> None:
    element = ElementTree.fromstring(f'<p title="{escaped(text)}">{escaped(text)}</p>')
    kept = "".join(each if each in "\t\n\r" or each >= " " else "\ufffd" for each in text)
    readable = {"\r": "\n"}  # XML has one line end
    assert len(element.text or "") <= len(kept) and "<" not in escaped(text)
    if text.isprintable():
        assert (element.text or "") == "".join(readable.get(each, each) for each in kept)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1_234_567, "1,234,567"), (0.012345, "0.01235"), (12_345.6, "12,346"), (-2.5, "-2.5")],
)
def test_numbers_have_about_four_digits(value: float, text: str) -> None:
    assert written(value) == text
