"""GGUF models in several files, as the library of llama.cpp's converter writes them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGUFWriter

from isthmus.cli.models import find_model
from isthmus.core.errors import ModelError
from isthmus.live.engine.recipe import read_spec
from isthmus.live.engine.weights import load_weights
from isthmus.model_files import fingerprint, open_files
from isthmus.model_files.header import parts_of, read_header, whole_name
from tests.gguf_files import write_gguf
from tests.models import LLAMA3, make_model

COUNT = 5
NAMES = [f"m-{at:05}-of-{COUNT:05}.gguf" for at in range(1, COUNT + 1)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `whole/m.gguf` and its parts in `parts`; read only."""
    folder = tmp_path_factory.mktemp("model")
    make_model(folder, "llama", num_hidden_layers=2, rope_parameters=LLAMA3)
    for name, options in {"whole": {}, "parts": {"split_max_tensors": 6, "small_first_shard": True}}.items():
        (folder / name).mkdir()
        write_gguf(folder / name / "m.gguf", folder, "Q8_0", **options)
    assert sorted(path.name for path in (folder / "parts").iterdir()) == NAMES
    return folder


@pytest.fixture
def parts(made: Path, tmp_path: Path) -> Path:
    """A copy of the parts, to be broken."""
    return shutil.copytree(made / "parts", tmp_path / "parts")


def revision(path: Path) -> str:
    spec = read_spec(path)
    cpu = torch.device("cpu")
    return load_weights(path, spec, dtype=torch.float32, activations=torch.float32, device=cpu).revision


@pytest.mark.parametrize("name", ["", *NAMES])
def test_any_part_stands_for_the_whole(made: Path, name: str) -> None:
    """Also their folder."""
    path, whole = made / "parts" / name, made / "whole/m.gguf"
    assert revision(path) == revision(whole)
    assert open_files(path).object("config.json") == open_files(whole).object("config.json")


def test_the_model_has_the_name_of_the_whole(made: Path) -> None:
    assert find_model(str(made / "parts" / NAMES[1]))[1] == "m" == find_model(str(made / "whole/m.gguf"))[1]
    assert whole_name(Path("x-1-of-2.gguf")) == "x-1-of-2"
    assert parts_of(Path("a/x-00001-of-00000.gguf")) == [Path("a/x-00001-of-00000.gguf")]


def test_parts_beside_another_model_are_one_of_two(parts: Path) -> None:
    shutil.copy(parts / NAMES[0], parts / "other.gguf")
    with pytest.raises(ModelError, match=rf"has several GGUF files; name one: {NAMES[0]}, other\.gguf$"):
        open_files(parts)


@pytest.mark.parametrize("gone", range(COUNT))
def test_a_missing_part_is_named(parts: Path, gone: int) -> None:
    (parts / NAMES[gone]).unlink()
    with pytest.raises(ModelError, match=rf"is one of {COUNT} files; missing: {NAMES[gone]}$"):
        open_files(parts / NAMES[0 if gone else 1])


def test_a_part_of_another_name_is_refused(parts: Path) -> None:
    for name in NAMES[1:]:
        (parts / name).unlink()
    (parts / NAMES[0]).rename(parts / "model.gguf")
    said = rf"model\.gguf: is one of {COUNT} files, which must be named NAME-00001-of-0000{COUNT}\.gguf and on$"
    with pytest.raises(ModelError, match=said):
        open_files(parts)


def swapped(parts: Path) -> None:
    (parts / NAMES[1]).rename(parts / "x")
    (parts / NAMES[2]).rename(parts / NAMES[1])
    (parts / "x").rename(parts / NAMES[2])


def written(part: int, **keys: int) -> Callable[[Path], None]:
    def change(parts: Path) -> None:
        writer = GGUFWriter(parts / NAMES[part], "llama")
        writer.add_uint16("split.no", keys.get("no", part))
        writer.add_uint16("split.count", keys.get("count", COUNT))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (swapped, f"{NAMES[1]}: does not say that it is part 2 of {COUNT}"),
        (written(2, count=7), f"{NAMES[2]}: does not say that it is part 3 of {COUNT}"),
        (written(2, no=0), f"{NAMES[2]}: does not say that it is part 3 of {COUNT}"),
        (written(2), "21 tensors are stated, and 15 are in its 5 parts"),
        (lambda parts: (parts / NAMES[2]).write_bytes(b""), f"{NAMES[2]}: is empty"),
        (
            lambda parts: (parts / NAMES[2]).write_bytes((parts / NAMES[2]).read_bytes()[:-1]),
            "is truncated: 1 bytes",
        ),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(
    parts: Path, change: Callable[[Path], object], says: str
) -> None:
    change(parts)
    with pytest.raises(ModelError) as caught:
        read_header(parts / NAMES[0])
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_part_that_changes_is_read_again(parts: Path) -> None:
    assert len(read_header(parts / NAMES[0]).tensors) == 21
    (parts / NAMES[4]).unlink()
    with pytest.raises(ModelError, match="missing"):
        read_header(parts / NAMES[0])


def test_the_fingerprint_is_of_all_parts(parts: Path) -> None:
    before = fingerprint(parts / NAMES[0])
    assert fingerprint(parts / NAMES[2]) == before
    with (parts / NAMES[4]).open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xaa")
    assert fingerprint(parts / NAMES[0]) != before


def test_a_file_of_the_other_byte_order_is_refused(made: Path, tmp_path: Path) -> None:
    data = (made / "whole/m.gguf").read_bytes()
    path = tmp_path / "m.gguf"
    path.write_bytes(data[:4] + data[4:8][::-1] + data[8:])
    with pytest.raises(ModelError, match="is big-endian; supported: GGUF of versions 2 and 3, little-endian"):
        open_files(path)
