"""Quantised safetensors in the engine: the numbers that the formats say, and so the tokens of the model that has them.

That the formats are read as the libraries that write them read them was checked once against those
(`docs/configuration.md`, quantised folders); here against `tests/quantised_files.py`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from isthmus.core.models import Fields, read_quantisation
from isthmus.live.engine.products import matrices
from isthmus.live.engine.quantised import stored
from isthmus.live.engine.recipe import read_spec
from isthmus.live.engine.tiles import Tiled, plain
from isthmus.live.engine.weights import load_weights
from tests.models import check_greedy, reference_logits
from tests.quantised_files import FORMATS, compressed, gptq, pack, quantise

from .conftest import FolderOf
from .support import answer_of, edit, engine_of, logits_by_position, refusal, relative_error, tokens_of

PROMPT, NUM_TOKENS = tokens_of(70), 24
Q_PROJ = "model.layers.0.self_attn.q_proj"
KEPT = {
    "int8",
    "int8-zeros",
    "packed-4",
    "packed-4-rows-zeros",
    "gptq-4",
    "gptq-4-v2",
    "gptq-8",
    "awq",
}
"""Formats that stay quantised in bfloat16."""
Made = Callable[[str, str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def made(folder_of: FolderOf, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Folders of a model of a family, quantised, and with the numbers that this says; read only."""

    @lru_cache
    def made(family: str, kind: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp(kind)
        quantise(folder_of(family), kind, folder / "quantised", folder / "said")
        return folder / "quantised", folder / "said"

    return made


@pytest.fixture
def broken(made: Made, tmp_path: Path) -> Callable[[str], Path]:
    """A copy, to be broken."""
    return lambda kind: shutil.copytree(made("llama", kind)[0], tmp_path / kind)


def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= fields
    path.write_text(json.dumps(config))


# ---- the numbers


@pytest.mark.parametrize("kind", FORMATS)
def test_tokens_are_those_of_the_model_that_the_format_says(made: Made, kind: str) -> None:
    quantised, said = made("qwen3" if kind.startswith("gptq") else "llama", kind)
    engine = engine_of(quantised)
    answer = answer_of(engine, PROMPT, NUM_TOKENS)
    check_greedy(said, PROMPT, answer)
    expected = reference_logits(said, PROMPT)
    for position, logits in logits_by_position(engine, PROMPT, list(range(12)), chunk=31).items():
        assert relative_error(logits, expected[position]) < 1e-5


@pytest.mark.parametrize("kind", FORMATS)
def test_in_bfloat16_whole_numbers_stay_quantised(made: Made, kind: str) -> None:
    """Where their columns are in whole groups of 32, in order; and they are the numbers that they were, but for the
    rounding of offsets."""
    folder, _ = made("llama", kind)
    types = {"dtype": torch.bfloat16, "activations": torch.float32, "device": torch.device("cpu")}
    plainly, kept = (
        load_weights(folder, read_spec(folder), **types, groups=groups) for groups in (False, True)
    )
    assert kept.revision == plainly.revision
    quantised = set()
    for expected, found in zip(matrices(plainly.layers[:2]), matrices(kept.layers[:2]), strict=True):
        quantised.add(isinstance(found, Tiled))
        assert relative_error(plain(found, torch.bfloat16), expected) < (
            4e-3 if isinstance(found, Tiled) else 1e-9
        )
    assert quantised == {kind in KEPT}
    assert not any(isinstance(found, Tiled) for found in matrices(kept.layers[2])), (
        "that layer is not quantised"
    )


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("deepseek_v3", "fp8"),
        ("deepseek_v3", "packed-4-rows-zeros"),
        ("kimi_linear", "gptq-8"),
        ("qwen3_next", "int8"),
    ],
)
def test_experts_and_latent_and_recurrent_layers_are_widened_too(made: Made, family: str, kind: str) -> None:
    quantised, said = made(family, kind)
    found, expected = (
        logits_by_position(engine_of(folder), PROMPT, list(range(12)), chunk=70)[69]
        for folder in (quantised, said)
    )
    assert torch.equal(found, expected)


def test_the_older_name_of_the_field_is_read_too(broken: Callable[[str], Path], made: Made) -> None:
    folder = broken("packed-4")
    path = folder / "config.json"
    path.write_text(path.read_text().replace("quantization_config", "compression_config"))
    assert engine_of(folder).revision == engine_of(made("llama", "packed-4")[0]).revision


class _Tensors(dict[str, Tensor]):
    """The parts of one matrix."""

    def has(self, name: str) -> bool:
        return name in self

    def read(self, name: str, dtypes: tuple[torch.dtype, ...], *shapes: tuple[int, ...]) -> Tensor:
        assert self[name].dtype in dtypes and tuple(self[name].shape) in shapes
        return self[name]


@given(
    bits=st.sampled_from((4, 8)),
    rows=st.integers(1, 40),
    groups=st.integers(1, 5),
    size=st.integers(1, 70),
    zeros=st.booleans(),
    ordered=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=60)
def test_what_was_packed_is_unpacked(
    bits: int, rows: int, groups: int, size: int, zeros: bool, ordered: bool, seed: int
) -> None:
    """Of any size: words that are not full, groups that end within a word, more rows than are widened at once."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, groups * size, generator=generator)
    form = compressed(bits, size, zeros=zeros, ordered=ordered)
    tensors, said = form("X.weight", matrix, generator)
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": size, "symmetric": not zeros}
    found = widened(
        "compressed-tensors", tensors, said, format="pack-quantized", config_groups={"a": {"weights": weights}}
    )
    assert torch.equal(found, said)
    assert (said - matrix).abs().max() <= 1.01 * (matrix.abs().max() / ((1 << bits - 1) - 1))


@given(bits=st.sampled_from((4, 8)), rows=st.integers(1, 5), size=st.integers(1, 9), seed=st.integers(0, 99))
@settings(max_examples=40)
def test_zero_points_of_gptq_are_raised_as_they_were_lowered(
    bits: int, rows: int, size: int, seed: int
) -> None:
    """Word by word: a zero point of 0 borrows from the next one, which comes back with the carry."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(8 * rows, 8 * size, generator=generator)
    tensors, said = gptq(bits, 8, lowered=False)("X.weight", matrix, generator)
    points = torch.randint(0, 1 << bits, (size, 8 * rows), generator=generator)
    fields = {"bits": bits, "group_size": 8}
    tensors["X.qzeros"] = pack(points, bits)
    second = widened("gptq", tensors, said, checkpoint_format="gptq_v2", **fields)
    tensors["X.qzeros"] = tensors["X.qzeros"] - sum(1 << at for at in range(0, 32, bits))
    assert torch.equal(widened("gptq", tensors, said, **fields), second)


def widened(method: str, tensors: dict[str, Tensor], like: Tensor, **fields: Any) -> Tensor:
    config = Fields("config.json", {"quantization_config": {"quant_method": method, **fields}})
    quantisation = read_quantisation(config)
    assert quantisation is not None
    found = stored(quantisation, _Tensors(tensors), "X.weight", tuple(like.shape))  # type: ignore[arg-type]
    assert found is not None
    return found.widened(torch.float32)


# ---- the revision


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("fp8", f"{Q_PROJ}.weight_scale_inv"),
        ("packed-4-ordered", f"{Q_PROJ}.weight_packed"),
        ("packed-8-zeros", f"{Q_PROJ}.weight_zero_point"),
        ("gptq-4", f"{Q_PROJ}.qzeros"),
        ("gptq-4-ordered", f"{Q_PROJ}.g_idx"),
        ("awq", f"{Q_PROJ}.scales"),
    ],
)
def test_any_changed_tensor_changes_the_revision(broken: Callable[[str], Path], kind: str, name: str) -> None:
    folder = broken(kind)
    before = engine_of(folder).revision
    edit(folder, lambda tensors: tensors.update({name: tensors[name].flip(-1)}))
    assert engine_of(folder).revision != before


def test_another_reading_of_the_same_tensors_changes_the_revision(broken: Callable[[str], Path]) -> None:
    folder = broken("gptq-4")
    before = engine_of(folder).revision
    edit_config(folder, checkpoint_format="gptq_v2")
    assert engine_of(folder).revision != before


def test_scales_of_activations_do_not_count(broken: Callable[[str], Path]) -> None:
    folder = broken("fp8-one")
    before = engine_of(folder).revision
    edit(folder, lambda tensors: tensors.update({f"{Q_PROJ}.input_scale": torch.full((1,), 7.0)}))
    assert engine_of(folder).revision == before


@pytest.mark.parametrize("kind", ["fp8", "packed-4", "gptq-4", "awq"])
def test_a_stage_has_the_revision_of_the_whole(made: Made, kind: str) -> None:
    folder, _ = made("llama", kind)
    plain = torch.float32
    stage = load_weights(
        folder, read_spec(folder), dtype=plain, activations=plain, device=torch.device("cpu"), layers=(1, 2)
    )
    assert stage.revision == engine_of(folder).revision


# ---- refusals


@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        ("fp8", "weight_scale"),
        ("float-rows", "weight_scale"),
        ("int8", "weight_scale"),
        ("int8-zeros", "weight_zero_point"),
        ("packed-4", "weight_packed"),
        ("packed-4", "weight_shape"),
        ("packed-8-zeros", "weight_zero_point"),
        ("gptq-4", "qweight"),
        ("gptq-4", "qzeros"),
        ("gptq-4", "scales"),
        ("gptq-4-ordered", "g_idx"),
        ("awq", "qzeros"),
    ],
)
def test_a_missing_tensor_is_named(broken: Callable[[str], Path], kind: str, missing: str) -> None:
    folder = broken(kind)
    edit(
        folder,
        lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith(f"{Q_PROJ}.{missing}")],
    )
    assert f"no tensor '{Q_PROJ}.{missing}" in refusal(folder)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("fp8", "weight"),
        ("fp8", "weight_scale_inv"),
        ("float-rows", "weight_scale"),
        ("int8-zeros", "weight_zero_point"),
        ("packed-4", "weight_packed"),
        ("packed-4", "weight_scale"),
        ("packed-8-zeros", "weight_zero_point"),
        ("packed-4-ordered", "weight_g_idx"),
        ("gptq-4", "qweight"),
        ("gptq-4", "qzeros"),
        ("gptq-4", "scales"),
        ("gptq-4-ordered", "g_idx"),
        ("awq", "qweight"),
    ],
)
def test_a_misshapen_tensor_or_one_of_another_type_is_named(
    broken: Callable[[str], Path], kind: str, name: str
) -> None:
    folder, full = broken(kind), f"{Q_PROJ}.{name}"
    right = load_file(folder / "model.safetensors")[full]
    edit(folder, lambda tensors: tensors.update({full: torch.cat((right, right))}))
    message = refusal(folder)
    assert full in message and "shape" in message
    edit(folder, lambda tensors: tensors.update({full: torch.zeros(right.shape, dtype=torch.float64)}))
    message = refusal(folder)
    assert full in message and "float64" in message


@pytest.mark.parametrize(("kind", "name"), [("gptq-4-ordered", "g_idx"), ("packed-4-ordered", "weight_g_idx")])
@pytest.mark.parametrize("group", [-2, 4])
def test_a_group_that_is_not_there_is_refused(
    broken: Callable[[str], Path], kind: str, name: str, group: int
) -> None:
    folder = broken(kind)
    edit(folder, lambda tensors: tensors[f"{Q_PROJ}.{name}"][5:6].fill_(group))
    assert "names groups beside the 2" in refusal(folder)


def test_an_order_that_config_json_denies_is_refused(broken: Callable[[str], Path]) -> None:
    folder = broken("gptq-4-ordered")
    edit_config(folder, desc_act=False)
    assert "desc_act" in refusal(folder)


def test_a_stated_shape_that_is_another_is_refused(broken: Callable[[str], Path]) -> None:
    folder = broken("packed-4")
    edit(folder, lambda tensors: tensors[f"{Q_PROJ}.weight_shape"].copy_(torch.tensor([64, 63])))
    assert f"{Q_PROJ}.weight_shape" in refusal(folder)


def test_packed_bytes_are_not_taken_for_floats_of_8_bits(broken: Callable[[str], Path]) -> None:
    """Some files of the method fp8 have experts of 4 bits so."""
    folder = broken("fp8")
    name = f"{Q_PROJ}.weight"
    edit(folder, lambda tensors: tensors.update({name: tensors[name].view(torch.int8)}))
    message = refusal(folder)
    assert name in message and "int8" in message
