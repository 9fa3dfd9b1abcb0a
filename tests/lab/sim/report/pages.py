"""A page as a browser takes it apart: its mark-up, its charts, and its scripts."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from typing import Any
from xml.etree import ElementTree

_SCRIPT = re.compile(r"<script([^>]*)>(.*?)</script>", re.S)


class Page:
    """Reads strictly, as XML: every tag closed, every attribute quoted, every `&` and `<` of a text escaped.

    `charts`: by title, what plotly is given.
    """

    def __init__(self, text: str) -> None:
        head = "<!DOCTYPE html>\n"
        assert text.startswith(head)
        self.markup = _SCRIPT.sub(r"<script\1></script>", text.removeprefix(head))
        self.root = ElementTree.fromstring(self.markup)
        self.text = "\n".join(self.root.itertext())
        self.scripts = [body for kind, body in _SCRIPT.findall(text) if not kind]
        (self.data,) = (body for kind, body in _SCRIPT.findall(text) if "application/json" in kind)
        drawn: list[dict[str, Any]] = json.loads(self.data, parse_constant=_refuse)
        figures = {figure.find("div[@role='img']"): figure for figure in self.root.iter("figure")}
        places = {place.attrib["id"]: figure for place, figure in figures.items() if place is not None}
        assert sorted(places) == sorted(f"chart-{at}" for at in range(len(drawn)))
        self.charts = {_title(places[f"chart-{at}"]): chart for at, chart in enumerate(drawn)}
        self.labels = [str(place.get("aria-label")) for place in figures if place is not None]

    def allowed(self) -> set[str]:
        """Hashes of the scripts that the page's policy lets run."""
        (policy,) = (meta.attrib["content"] for meta in self.root.iter("meta") if "http-equiv" in meta.attrib)
        assert "default-src 'none'" in policy and "script-src 'sha256-" in policy
        return set(re.findall(r"'(sha256-[^']+)'", policy))

    def hashes(self) -> set[str]:
        """Of the scripts that are there."""
        digests = (hashlib.sha256(script.encode()).digest() for script in self.scripts)
        return {f"sha256-{base64.b64encode(digest).decode()}" for digest in digests}


def texts_of(value: Any) -> list[str]:
    """Every text in the data of a chart."""
    if isinstance(value, dict):
        return [text for each in value.values() for text in texts_of(each)]
    if isinstance(value, list):
        return [text for each in value for text in texts_of(each)]
    return [value] if isinstance(value, str) else []


def _title(figure: ElementTree.Element) -> str:
    heading = figure.find("h3")
    return "" if heading is None else "".join(heading.itertext())


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")
