"""GGUF files in the engine: the same tokens and logits as transformers makes of the same file, in float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, get_tensor_name_map
from gguf.constants import MODEL_ARCH
from torch import Tensor

from benchmarks.models import gguf_reference
from isthmus.core.errors import ModelError
from isthmus.live.engine.products import matrices
from isthmus.live.engine.quantised import GROUPED
from isthmus.live.engine.recipe import read_spec
from isthmus.live.engine.tiles import Tiled
from isthmus.live.engine.weights import Weights, load_weights
from isthmus.model_files.gguf import tensor_name
from isthmus.model_files.header import KINDS, read_header
from tests.gguf_files import Tensors, packed, write_gguf
from tests.models import LLAMA3, YARN, make_model, reference_logits

from .support import answer_of, engine_of, largest_error, logits_by_position, refusal, relative_error, tokens_of

KINDS_MADE = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]
KINDS_DRAWN = ["Q4_K", "Q5_K", "Q6_K"]
PROMPT, NUM_TOKENS = tokens_of(70), 24

Made = Callable[..., Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A file of a random model; read only."""

    @lru_cache
    def made(family: str, kind: str = "F32", **overrides: Any) -> Path:
        folder = tmp_path_factory.mktemp("model")
        make_model(folder, family, **overrides)
        path = folder / "gguf" / f"{family}.{kind}.gguf"
        path.parent.mkdir()
        return write_gguf(path, folder, kind)

    return made


def check(path: Path) -> None:
    """The tokens that the engine answers are the likeliest by the reference, and its logits are the reference's."""
    engine = engine_of(path)
    answer = answer_of(engine, PROMPT, NUM_TOKENS)
    known = PROMPT + answer[:-1]
    with torch.inference_mode():
        expected = gguf_reference(path)(torch.tensor([known])).logits[0]
    assert expected[len(PROMPT) - 1 :].argmax(-1).tolist() == answer
    found = logits_by_position(engine, known, list(range(12)), chunk=31)
    for position, logits in found.items():
        assert relative_error(logits, expected[position]) < 1e-5


@pytest.mark.parametrize("kind", KINDS_MADE)
def test_each_type(made: Made, kind: str) -> None:
    check(made("llama", kind))


@pytest.mark.parametrize("kind", KINDS_DRAWN)
def test_each_type_of_long_blocks(made: Made, kind: str) -> None:
    check(made("llama", kind, hidden_size=256, intermediate_size=512))


@pytest.mark.parametrize("kind", sorted(GROUPED))
def test_in_bfloat16_weights_stay_quantised(made: Made, kind: str) -> None:
    """Queries and keys too, whose rows are put into another order, and a head that is the embedding's tensor. bfloat16
    moves the logits by some percent; a row that is out of place, by all of it."""
    for tied in (False, True):
        small = {"hidden_size": 256, "intermediate_size": 256}  # too few weights to be timed and widened
        path = made("llama", kind, **small, tie_word_embeddings=tied, initializer_range=0.05)
        engine = engine_of(path, dtype=None)
        assert engine.model._weights.head is not None
        held = list(matrices((engine.model._weights.layers, engine.model._weights.head)))
        assert [type(weight) for weight in held] == [Tiled] * len(held)
        with torch.inference_mode():
            expected = gguf_reference(path)(torch.tensor([PROMPT])).logits[0]
        for position, logits in logits_by_position(engine, PROMPT, list(range(12)), chunk=31).items():
            assert relative_error(logits, expected[position]) < 0.15


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"num_key_value_heads": 4}),
        ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
        ("llama", {"head_dim": 32}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 128}),  # the only size that transformers takes from such a file
    ],
)
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_each_architecture(made: Made, kind: str, family: str, overrides: dict[str, Any]) -> None:
    check(made(family, kind, **overrides))


@pytest.mark.parametrize(
    ("family", "overrides", "keys"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}, {}),
        ("qwen3", {"head_dim": 32}, {}),
        ("llama", {"rope_parameters": YARN}, {"llama.rope.scaling": YARN}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
         {"llama.rope.scaling": {"rope_type": "linear", "factor": 4.0}}),
    ],
)  # fmt: skip
def test_what_transformers_leaves_out(
    tmp_path: Path, family: str, overrides: dict[str, Any], keys: dict[str, dict[str, Any]]
) -> None:
    """Against the folder that the file was made of."""
    make_model(tmp_path, family, **overrides)
    scaling = {
        "rope_type": "type",
        "factor": "factor",
        "original_max_position_embeddings": "original_context_length",
    }
    metadata = {f"{at}.{key}": rope.get(name) for at, rope in keys.items() for name, key in scaling.items()}
    path = write_gguf(tmp_path / "gguf", tmp_path, metadata=metadata)
    check_like_folder(path, tmp_path)


def check_like_folder(path: Path, folder: Path) -> None:
    expected = reference_logits(folder, PROMPT)
    found = logits_by_position(engine_of(path), PROMPT, list(range(12)), chunk=23)
    for position, logits in found.items():
        assert largest_error(logits, expected[position]) < 2e-5


def test_factors_of_frequencies(tmp_path: Path) -> None:
    """Llama 3.1's smoothing, which the converter writes as what each frequency is divided by."""
    make_model(tmp_path, "llama", rope_parameters=LLAMA3)
    plain = LLAMA3["rope_theta"] ** (-np.arange(0, 16, 2) / 16)
    wavelengths = 2 * np.pi / plain
    share = (LLAMA3["original_max_position_embeddings"] / wavelengths - 1.0) / 3.0
    factors = 1 / ((1 - share) / LLAMA3["factor"] + share)
    factors = np.where(share < 0, LLAMA3["factor"], np.where(share > 1, 1.0, factors)).astype(np.float32)

    def change(tensors: Tensors) -> None:
        tensors["rope_freqs.weight"] = factors, GGMLQuantizationType.F32

    check_like_folder(write_gguf(tmp_path / "gguf", tmp_path, change=change), tmp_path)


# ---- what is stored, and its name


def test_weights_are_widened_to_bfloat16_unless_all_matrices_are_float32(made: Made) -> None:
    assert read_spec(made("llama")).dtype == "float32"
    for kind in ("F16", "BF16", "Q8_0"):
        assert read_spec(made("llama", kind)).dtype == "bfloat16"
    assert engine_of(made("llama", "Q8_0"), dtype=None).layout.dtype == "bfloat16"


def test_the_revision_is_that_of_the_bytes(made: Made, tmp_path: Path) -> None:
    path = made("llama", "Q4_0")
    revision = engine_of(path).revision
    copy = tmp_path / "other-name.gguf"
    copy.write_bytes(path.read_bytes())
    assert (
        engine_of(copy).revision
        == engine_of(path, dtype=None).revision
        == engine_of(path, layers=(1, 2)).revision
        == revision
    )
    changed = bytearray(path.read_bytes())
    changed[-40] ^= 1
    copy.write_bytes(changed)
    assert engine_of(copy).revision != revision != engine_of(made("llama", "Q4_1")).revision


def test_a_stage_holds_its_own_layers_alone(made: Made) -> None:
    def weights(layers: tuple[int, int] | None = None) -> Weights:
        kinds = {"dtype": torch.bfloat16, "activations": torch.bfloat16, "device": torch.device("cpu")}
        return load_weights(path, read_spec(path), **kinds, layers=layers)

    path = made("qwen2", "Q8_0")
    whole, part = weights(), weights((1, 3))
    assert part.embedding is None and part.head is not None and part.revision == whole.revision
    found, expected = part.layers[0], whole.layers[1]
    assert torch.equal(found.mlp.down.weight, expected.mlp.down.weight)
    assert found.mlp.down.weight.dtype == torch.bfloat16 and found.mlp_norm.dtype == torch.float32


# ---- the header


def test_the_header_is_the_library_s(made: Made) -> None:
    path = made("qwen3", "Q8_0", head_dim=128)
    header, library = read_header(path), GGUFReader(path)
    ours = {name: (info.start, info.num_bytes, info.kind.name) for name, info in header.tensors.items()}
    assert ours == {
        tensor.name: (tensor.data_offset, tensor.n_bytes, tensor.tensor_type.name) for tensor in library.tensors
    }
    fields = {name: field for name, field in library.fields.items() if not name.startswith("GGUF.")}
    assert header.metadata == {name: field.contents() for name, field in fields.items()}


def test_types_are_the_library_s() -> None:
    for number, kind in KINDS.items():
        known = GGMLQuantizationType(number)
        assert (known.name, *GGML_QUANT_SIZES[known]) == kind


@pytest.mark.parametrize("arch", [MODEL_ARCH.LLAMA, MODEL_ARCH.QWEN2, MODEL_ARCH.QWEN3])
def test_names_are_the_library_s(arch: MODEL_ARCH, made: Made) -> None:
    names = get_tensor_name_map(arch, 3)
    family = {MODEL_ARCH.LLAMA: "llama", MODEL_ARCH.QWEN2: "qwen2", MODEL_ARCH.QWEN3: "qwen3"}[arch]
    folder = made(family, "F32", **({"head_dim": 128} if family == "qwen3" else {})).parents[1]
    for name in transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict():
        assert tensor_name(name) == names.get_name(name, (".weight", ".bias"))


# ---- refusals, each in one line that names the file


@pytest.fixture(scope="module")
def folder(made: Made) -> Path:
    return made("llama").parents[1]


def test_every_truncated_file(made: Made, tmp_path: Path) -> None:
    path = made("llama", "Q8_0")
    whole, short = path.read_bytes(), tmp_path / "short.gguf"
    start = min(info.start for info in read_header(path).tensors.values())
    for size in (*range(0, start, 7), start, len(whole) // 2, len(whole) - 1000):
        short.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"truncated|empty|is not a GGUF file"):
            read_header(short)


def test_no_file_and_no_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file"):
        read_header(tmp_path / "none.gguf")
    (tmp_path / "text.gguf").write_text("a text, not a model")
    assert "is not a GGUF file" in refusal(tmp_path / "text.gguf")


def test_another_version(made: Made, tmp_path: Path) -> None:
    path = tmp_path / "new.gguf"
    path.write_bytes(b"GGUF\x04" + made("llama").read_bytes()[5:])
    assert "GGUF version 4" in refusal(path)


LONGROPE = {"type": "longrope", "factor": 2.0}


def without(name: str) -> tuple[dict[str, Any], str]:
    return {"change": lambda tensors: tensors.pop(name)}, f"no tensor {name!r}"


def beside(name: str) -> tuple[dict[str, Any], str]:
    """A tensor that nothing would be computed with."""
    extra = {name: (np.ones(64, np.float32), GGMLQuantizationType.F32)}
    return {"change": lambda tensors: tensors.update(extra)}, f"1 tensors are not of this architecture: {name}"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"metadata": {"general.architecture": "mamba"}}, "'mamba' is not supported; supported: llama, qwen2, qwen3"),
        ({"metadata": {"llama.block_count": None}}, "'llama.block_count' is missing"),
        ({"metadata": {"llama.block_count": 1 << 31}}, "2147483648 layers are stated"),
        ({"metadata": {"llama.embedding_length": "wide"}}, "'llama.embedding_length' must be a whole number"),
        ({"metadata": {"llama.expert_count": 8}}, "mixture of experts"),
        ({"metadata": {"llama.attention.value_length": 32}}, "different lengths"),
        ({"metadata": {"llama.rope.dimension_count": 8}}, "partial_rotary_factor"),
        ({"metadata": {f"llama.rope.scaling.{key}": value for key, value in LONGROPE.items()}}, "'longrope' is not"),
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "needs a number in the field 'factor'"),
        ({"metadata": {"llama.rope.scaling.attn_factor": 2.0}}, "attn_factor 2.0 is not supported"),
        ({"metadata": {"llama.feed_forward_length": 128}}, "blk.0.ffn_gate.weight has shape"),
        ({"metadata": {"split.count": 3}}, "one of 3 files"),
        ({"metadata": {"general.alignment": 0}}, "'general.alignment' must be a whole number above 0"),
        ({"metadata": {"llama.attention.scale": 0.5}}, "llama.attention.scale 0.5 is not supported"),
        *map(without, ("token_embd.weight", "blk.1.attn_k.weight", "blk.2.ffn_norm.weight", "output_norm.weight")),
        *map(beside, ("blk.0.attn_q_norm.weight", "blk.3.attn_q.weight", "blk.1.attn_output.bias")),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_file_is_named(
    folder: Path, tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    message = refusal(write_gguf(tmp_path / "model.gguf", folder, **options))
    assert says in message


def test_an_unknown_type(folder: Path, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        data = tensors["blk.1.ffn_up.weight"][0]
        tensors["blk.1.ffn_up.weight"] = packed(data, GGMLQuantizationType.TQ1_0), GGMLQuantizationType.TQ1_0

    make_model(tmp_path, "llama", hidden_size=256)
    message = refusal(write_gguf(tmp_path / "model.gguf", tmp_path, change=change))
    assert "blk.1.ffn_up.weight is of type TQ1_0, which is not supported; supported: F32, " in message


def test_a_folder_with_one_file_and_with_several(made: Made, tmp_path: Path) -> None:
    path = made("llama", "Q8_0")
    assert engine_of(path.parent).revision == engine_of(path).revision
    for name in "ab":
        (tmp_path / f"{name}.gguf").write_bytes(path.read_bytes())
    assert "several GGUF files; name one: a.gguf, b.gguf" in refusal(tmp_path)


def test_more_than_one_piece_is_widened_alike() -> None:
    """Rows that are longer and shorter than what is widened at a time."""
    from isthmus.live.engine.quantised import Packed, widened

    numbers = torch.randn(700, 320, generator=torch.Generator().manual_seed(1)).numpy()
    for kind in ("F32", "F16", "BF16", "Q4_1"):
        stored = packed(numbers, GGMLQuantizationType[kind])
        rows = stored.view(np.uint8).reshape(700, -1)
        found: Tensor = widened(Packed(kind, rows, (700, 320)), torch.float32)
        for row in (0, 1, 204, 205, 699):
            alone = widened(Packed(kind, rows[row : row + 1], (1, 320)), torch.float32)
            assert torch.equal(found[row], alone[0])
        assert largest_error(found, torch.from_numpy(numbers)) < {"Q4_1": 0.3, "BF16": 0.01}.get(kind, 1e-3)
