from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.model_files import fingerprint

FILES = [
    "config.json",
    "chat_template.jinja",
    "model.safetensors",
    "b.safetensors",
    "additional_chat_templates/tool_use.jinja",
]


def test_each_file_that_is_read_counts_and_no_other(tmp_path: Path) -> None:
    for name in [*FILES, "README.md"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("a")
    found = {fingerprint(tmp_path)}
    for at, name in enumerate(FILES, start=1):
        (tmp_path / name).write_text("b")
        found.add(fingerprint(tmp_path))
        assert len(found) == at + 1
    (tmp_path / "README.md").write_text("b")
    assert fingerprint(tmp_path) in found


def test_no_model_has_none(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        fingerprint(tmp_path / "none")
