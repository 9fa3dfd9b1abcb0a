from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from isthmus.core.errors import ModelError
from isthmus.core.models import ModelSpec
from isthmus.live.engine.recipe import ARCHITECTURES, ROPE_TYPES, read_spec
from tests.models import LLAMA3, MODEL_CASES, YARN

from .conftest import FolderOf
from .support import changed

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"]}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 40, "max_window_layers": 1}
QWEN3 = QWEN2 | {"architectures": ["Qwen3ForCausalLM"]}


def spec_of(folder: Path, config: dict[str, Any]) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return read_spec(folder)


def refusal(folder: Path, config: dict[str, Any]) -> str:
    with pytest.raises(ModelError) as caught:
        spec_of(folder, config)
    message = str(caught.value)
    assert "config.json" in message and "\n" not in message
    return message


# ---- refusals


PACKED = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}


def compressed(weights: object = PACKED, **fields: object) -> dict[str, Any]:
    plain = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    return plain | {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}} | fields


@pytest.mark.parametrize(
    ("quantisation", "named"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "e5m2"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "expert_dtype"),
        ({"quant_method": "gptq", "bits": 4}, "group_size"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "bits 3"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "is_marlin_format": True}, "is_marlin_format"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "GEMV"}, "gemv"),
        ({"quant_method": "awq", "bits": 8, "group_size": 128}, "bits 8"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": False}, "zero_point"),
        (compressed(format="nvfp4-pack-quantized"), "nvfp4-pack-quantized"),
        (compressed(format=None), "format"),
        (compressed(PACKED | {"num_bits": 3}), "of 4 (int) or 8 (int) bits, not 3 (int)"),
        (compressed(PACKED | {"type": "float"}), "not 4 (float)"),
        (compressed(PACKED | {"strategy": "tensor_group"}), "tensor_group"),
        (compressed(PACKED | {"group_size": -1}), "group_size"),
        (compressed(None), "config_groups"),
        (compressed(config_groups={"W4A16": ["Linear"]}), "W4A16"),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparse"),
        (compressed(transform_config={"config_groups": {}}), "transform_config"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_would_be_read_otherwise_than_it_is_meant_is_refused(
    tmp_path: Path, quantisation: dict[str, Any], named: str
) -> None:
    assert named in refusal(tmp_path, LLAMA | {"quantization_config": quantisation})


def test_blocks_of_two_sizes_are_refused(tmp_path: Path) -> None:
    weights = [
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [size, 128]}
        for size in (64, 128)
    ]
    groups = {f"group_{at}": {"weights": each} for at, each in enumerate(weights)}
    quantisation = compressed(format="float-quantized", config_groups=groups)
    assert "several sizes" in refusal(tmp_path, LLAMA | {"quantization_config": quantisation})


def test_a_quantised_model_is_described_as_the_plain_one(tmp_path: Path) -> None:
    plain = spec_of(tmp_path, LLAMA)
    assert spec_of(tmp_path, LLAMA | {"quantization_config": compressed()}) == plain
    assert spec_of(tmp_path, LLAMA | {"quantization_config": {}}) == plain


NESTED = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    *[
        ({"architectures": [name]}, [name, *ARCHITECTURES])
        for name in ("GPT2LMHeadModel", "MixtralForCausalLM", "Qwen3MoeForCausalLM", "LlamaModel")
    ],
    ({"architectures": None, "model_type": "mamba"}, ["mamba"]),
    *[
        ({field: {key: kind, "factor": 2.0}}, [repr(kind), *ROPE_TYPES])
        for kind in ("dynamic", "longrope", "su", "mrope")
        for field in ("rope_scaling", "rope_parameters")
        for key in ("type", "rope_type")
    ],
    *[
        ({"rope_parameters": changed(LLAMA3 | {"rope_type": kind}, **{missing: None})}, [repr(kind), repr(missing)])
        for kind, missing in [
            ("linear", "factor"), ("yarn", "factor"), *(("llama3", name) for name in LLAMA3 if "factor" in name)
        ]
    ],
    ({"rope_parameters": NESTED}, ["rope_parameters"]),
    *[({"hidden_act": activation}, [repr(activation)]) for activation in ("gelu", "gelu_pytorch_tanh", "relu")],
    *[
        ({field: {"quant_method": method, "bits": 4}}, [
            f"{method or 'unknown'} quantised", "supported: fp8, fbgemm_fp8, compressed-tensors, gptq, awq"
        ])
        for method in ("bitsandbytes", "hqq", None)
        for field in ("quantization_config", "compression_config")
    ],
    ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
    *[
        ({"torch_dtype": None, field: dtype}, [dtype])
        for field in ("dtype", "torch_dtype")
        for dtype in ("float64", "float8_e4m3fn", "int8")
    ],
    ({"num_key_value_heads": 3}, ["3"]),
    ({"head_dim": 15}, ["15"]),
    *[
        ({field: None}, [repr(field)])
        for field in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    ],
    # A broken file is the world's fault: never a bare TypeError.
    ({"hidden_size": "sixty-four"}, ["hidden_size"]),
    ({"num_attention_heads": 0}, ["num_attention_heads"]),
    ({"rope_scaling": "linear"}, ["rope_scaling"]),
    ({"quantization_config": "gptq"}, ["quantization_config"]),
    ({"architectures": 7}, ["architectures"]),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "named"), REFUSED)
def test_what_is_wrong_or_not_supported_is_named(
    tmp_path: Path, fields: dict[str, Any], named: list[str]
) -> None:
    """With all that is supported where it is one of several."""
    message = refusal(tmp_path, changed(LLAMA, **fields))
    assert all(each in message for each in named)


@pytest.mark.parametrize("text", [b"{", b"", b"[1, 2]", b"\xff\xfe{}", b"null"])
def test_a_config_that_is_not_a_json_object_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_spec(tmp_path)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: no such file"):
        read_spec(tmp_path)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_spec(tmp_path / "nowhere")


# ---- reading


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize(
    "options",
    [
        {"rope_type": "default", "rope_theta": 5e5},
        {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0},
        LLAMA3,
        YARN,
    ],
    ids=lambda options: options["rope_type"],
)
def test_both_spellings_of_rope_read_the_same(tmp_path: Path, options: dict[str, Any], key: str) -> None:
    theta, kind = options["rope_theta"], options["rope_type"]
    numbers = {name: value for name, value in options.items() if name not in ("rope_theta", "rope_type")}
    old = LLAMA | {"rope_theta": theta, "rope_scaling": {key: kind, **numbers}}
    new = spec_of(tmp_path, LLAMA | {"rope_parameters": options})
    assert spec_of(tmp_path, old) == new
    assert new.rope.kind == kind and new.rope.theta == theta
    assert numbers.items() <= new.rope.options.items()


def test_no_scaling_is_the_default_rope(tmp_path: Path) -> None:
    plain = spec_of(tmp_path, LLAMA | {"rope_theta": 5e5})
    assert spec_of(tmp_path, LLAMA | {"rope_theta": 5e5, "rope_scaling": None}) == plain
    assert plain.rope.kind == "default" and plain.rope.theta == 5e5
    assert spec_of(tmp_path, LLAMA).rope.theta == 10_000.0


@pytest.mark.parametrize("options", [LLAMA3, YARN], ids=["llama3", "yarn"])
def test_the_original_length_is_the_models_own_when_not_stated(tmp_path: Path, options: dict[str, Any]) -> None:
    bare = changed(options, original_max_position_embeddings=None)
    spec = spec_of(tmp_path, LLAMA | {"rope_parameters": bare})
    assert spec.rope.options["original_max_position_embeddings"] == 512


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (LLAMA | {"sliding_window": 40}, (0, 0, 0)),
        (MISTRAL, (4096, 4096, 4096)),
        (MISTRAL | {"sliding_window": 40}, (40, 40, 40)),
        (MISTRAL | {"sliding_window": None}, (0, 0, 0)),
        (QWEN2, (0, 0, 0)),
        (QWEN2 | {"use_sliding_window": False}, (0, 0, 0)),
        (QWEN2 | {"use_sliding_window": True}, (0, 40, 40)),
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": 3}, (0, 0, 0)),
        (QWEN2 | {"use_sliding_window": True, "sliding_window": None}, (0, 0, 0)),
        (QWEN3 | {"use_sliding_window": True, "max_window_layers": 0}, (40, 40, 40)),
        (
            QWEN3
            | {
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (40, 0, 40),
        ),
    ],
)
def test_each_layer_has_its_own_window(
    tmp_path: Path, config: dict[str, Any], windows: tuple[int, ...]
) -> None:
    assert tuple(layer.mixer.window for layer in spec_of(tmp_path, config).layers) == windows


@pytest.mark.parametrize(
    ("config", "qkv", "output", "mlp"),
    [
        (LLAMA, False, False, False),
        (LLAMA | {"attention_bias": True}, True, True, False),
        (LLAMA | {"mlp_bias": True}, False, False, True),
        (MISTRAL | {"attention_bias": True, "mlp_bias": True}, False, False, False),
        (QWEN2, True, False, False),
        (QWEN3, False, False, False),
        (QWEN3 | {"attention_bias": True}, True, True, False),
    ],
)
def test_each_family_has_its_biases(
    tmp_path: Path, config: dict[str, Any], qkv: bool, output: bool, mlp: bool
) -> None:
    spec = spec_of(tmp_path, config)
    for layer in spec.layers:
        assert (layer.mixer.qkv_bias, layer.mixer.output_bias, layer.mlp.bias) == (qkv, output, mlp)
        assert layer.mixer.qk_norm == (spec.architecture == "Qwen3ForCausalLM")


def test_head_size_and_heads_have_their_defaults(tmp_path: Path) -> None:
    assert spec_of(tmp_path, LLAMA).head_dim == 16
    assert spec_of(tmp_path, QWEN3).head_dim == 128
    assert spec_of(tmp_path, LLAMA | {"head_dim": 24}).head_dim == 24
    assert spec_of(tmp_path, changed(LLAMA, num_key_value_heads=None)).num_kv_heads == 4


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
@pytest.mark.parametrize(
    ("stated", "read"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "bfloat16")]
)
def test_the_dtype_is_read_in_both_spellings(tmp_path: Path, field: str, stated: str, read: str) -> None:
    assert spec_of(tmp_path, changed(LLAMA, torch_dtype=None) | {field: stated}).dtype == read


@pytest.mark.parametrize("case", MODEL_CASES)
def test_what_transformers_saves_is_read(folder_of: FolderOf, case: str) -> None:
    family, overrides = MODEL_CASES[case]
    spec = read_spec(folder_of(case))
    assert spec.architecture.lower() == f"{family}forcausallm" and spec.max_length == 4096
    assert (spec.vocab_size, spec.hidden_size, spec.num_layers) == (272, 64, 3)
    assert all((layer.mixer.num_heads, layer.mlp.width) == (4, 96) for layer in spec.layers)
    assert spec.num_kv_heads == overrides.get("num_key_value_heads", 2)
    assert spec.head_dim == overrides.get("head_dim", 16)
    assert spec.tied_embeddings == overrides.get("tie_word_embeddings", False)
    assert spec.rope.kind == overrides.get("rope_parameters", {}).get("rope_type", "default")
