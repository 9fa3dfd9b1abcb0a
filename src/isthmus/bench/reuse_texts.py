"""Real English prose for studies: a folder of the user's, or what is installed anyway.

Without a folder it is Python's own reference manual, as `help()` shows it, and what the packages that Isthmus needs
say of themselves. Nothing of it is kept in this repository.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from pydoc_data.topics import topics

import blake3

from isthmus.core.errors import ConfigError

SUFFIXES = (".txt", ".md", ".rst", ".py")
LEAST_WORDS, MOST_WORDS = 5, 60
"""Of a sentence; what has fewer or more is a heading, a list or code."""
LEAST_SENTENCES = 2
LETTERS = 0.95
"""Of the characters of a paragraph, those that are letters, spaces or plain marks."""
MOST_BYTES = 1 << 20
"""Of one file: more is not read."""
_CODE = re.compile(r">>>|::=|https?://|[{}<>|\\=]|^\s*[#.]|\bself\b")
_MARKUP = re.compile(r"[*`_\"]+")
_STOP = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")

Passage = tuple[str, ...]
"""The sentences of a paragraph."""


def prose(folder: Path | None) -> list[Passage]:
    """Paragraphs, none twice, in the same order every time. Raises ConfigError for a folder without any."""
    texts = _installed() if folder is None else _files(folder)
    found: dict[Passage, None] = {}
    for text in texts:
        found |= dict.fromkeys(paragraphs(text))
    if folder is not None and not found:
        raise ConfigError(f"--texts {folder}: no paragraph of prose in its {', '.join(SUFFIXES)} files")
    return list(found)


def words(passage: Passage) -> int:
    return sum(len(sentence.split()) for sentence in passage)


def digest(passages: Iterable[Passage]) -> str:
    """Which texts a measurement was made with: they are another Python's in another Python."""
    return blake3.blake3("\n".join(" ".join(each) for each in passages).encode()).hexdigest(length=8)


def paragraphs(text: str) -> Iterator[Passage]:
    """What reads like prose: whole sentences without code."""
    for part in re.split(r"\n\s*\n", text):
        if part.startswith(("    ", "   ", "\t")) and "\n" not in part.strip():
            continue
        flat = _MARKUP.sub("", " ".join(part.split()))
        if _CODE.search(flat) or not flat[:1].isupper() or not flat.endswith("."):
            continue
        sentences = tuple(_STOP.split(flat))
        counts = [len(sentence.split()) for sentence in sentences]
        letters = sum(char.isalpha() or char in " ,.'" for char in flat)
        is_even = min(counts) >= LEAST_WORDS and max(counts) <= MOST_WORDS
        if len(sentences) >= LEAST_SENTENCES and is_even and letters >= LETTERS * len(flat):
            yield sentences


def _installed() -> Iterator[str]:
    yield from (topics[name] for name in sorted(topics))
    for requirement in sorted(metadata.requires("isthmus") or ()):
        if "extra ==" in requirement:
            continue
        name = re.split(r"[=<>!~;\[ ]", requirement)[0]
        yield str(metadata.metadata(name).json["description"])


def _files(folder: Path) -> Iterator[str]:
    if not folder.is_dir():
        raise ConfigError(f"--texts {folder}: no such folder")
    for file in sorted(folder.rglob("*")):
        if file.suffix in SUFFIXES and file.is_file():
            try:
                with file.open(encoding="utf-8", errors="replace") as opened:
                    yield opened.read(MOST_BYTES)
            except OSError as error:
                raise ConfigError(f"--texts {file}: cannot be read: {error.strerror}") from None
