from __future__ import annotations

import errno
import json
import random
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from llguidance import LLMatcher
from numpy.typing import NDArray
from tokenizers import Tokenizer

from isthmus.cli.models import bytes_folder, find_model
from isthmus.core.types import Sampling
from isthmus.live.engine.constraints import Constraints
from isthmus.live.engine.engine import Engine, EngineOptions
from isthmus.live.engine.grammar import MAX_IDLE, Grammars
from isthmus.live.engine.interface import Chunk, Row
from isthmus.live.engine.sampling import sample
from isthmus.model_files import end_tokens, open_files
from isthmus.model_files.grammar import compile_grammar, grammar_tokenizer
from isthmus.model_files.grammar_limits import GRAMMAR_LIMITS, GrammarError, GrammarLimits
from tests.models import EOS, make_model
from tests.schemas import grammar, object_schema, validate

BYTES = bytes_folder()
END, VOCABULARY = 257, 272
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
AMBIGUOUS = LLMatcher.grammar_from_lark('start: a\na: a b | b a | "x"\nb: a a | "x" | ""\n')
"""What may be read in ever more ways with each x."""
LARGE = LLMatcher.grammar_from_json_schema(
    {"type": "object", "properties": {f"property_{n:05d}_{'x' * 30}": {"type": "integer"} for n in range(1000)}}
)


def next_tokens(grammars: Grammars, row: Row, vocabulary: int = VOCABULARY) -> list[int]:
    bits = np.zeros((1, -(-vocabulary // 32)), np.int32)
    grammars.fill([(0, row)], bits)
    return unpacked(bits[0])


def unpacked(bits_W: NDArray[np.int32]) -> list[int]:
    return np.unpackbits(bits_W.view(np.uint8), bitorder="little").nonzero()[0].tolist()


def text_of(outputs: Iterable[int]) -> bytes:
    return bytes(token for token in outputs if token < 256)


def row_of(text: str, outputs: list[int] | None = None) -> Row:
    return Row(Sampling(grammar=text), [] if outputs is None else outputs)


# ---- what may come next


def test_every_end_token_ends_a_grammar_and_tokens_beyond_the_tokenizer_never_come(tmp_path: Path) -> None:
    for file in BYTES.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 260]}))
    grammars, row = Grammars(tmp_path, 1000), row_of(LLMatcher.grammar_from_regex("[^x]?"))
    tokens = next_tokens(grammars, row, 1000)
    assert {257, 260} < set(tokens) and max(tokens) == 260 and ord("x") not in tokens


def test_the_default_model_s_tokenizer_is_read_from_its_gguf_file() -> None:
    path, _ = find_model(None)
    tokenizer = Tokenizer.from_str(open_files(path).required("tokenizer.json"))
    wanted = 'The name is "Ünicode 🙂".'
    row = row_of(LLMatcher.grammar_from_lark(f"start: {json.dumps(wanted, ensure_ascii=False)}"), [])
    grammars = Grammars(path, 49_152)
    for token in tokenizer.encode(wanted).ids:
        assert token in next_tokens(grammars, row, 49_152)
        row.outputs.append(token)  # type: ignore[attr-defined]
    assert next_tokens(grammars, row, 49_152) == sorted(end_tokens(open_files(path)))


def test_masks_of_many_rows_are_those_of_each() -> None:
    """Side by side, of grammars of their own, at places of their own, and with a row that cannot be followed."""
    draw, rows, alone = random.Random(4), list[Row](), Grammars(BYTES, VOCABULARY)
    for number in range(12):
        row = row_of("{nonsense" if number == 5 else grammar(object_schema(draw)))
        for _ in range(number):
            if tokens := [each for each in next_tokens(alone, row) if each != END and number != 5]:
                row.outputs.append(draw.choice(tokens))  # type: ignore[attr-defined]
        rows.append(row)
    bits, together = np.full((20, 9), 77, np.int32), Grammars(BYTES, VOCABULARY)
    together.fill([(19 - at, row) for at, row in enumerate(rows)], bits)
    for at, row in enumerate(rows):
        if at == 5:
            assert "key must be a string" in together.objection(row)
        else:
            assert unpacked(bits[19 - at]) == next_tokens(alone, row) and not together.objection(row)
    assert (bits[:8] == 77).all(), "rows without a grammar are left alone"


# ---- what cannot be followed


def objection(grammars: Grammars, row: Row, vocabulary: int = VOCABULARY) -> str:
    """To what is asked for first."""
    next_tokens(grammars, row, vocabulary)
    return grammars.objection(row)


@pytest.mark.parametrize(
    ("text", "outputs", "reason"),
    [
        ("{nonsense", [], "key must be a string"),
        ("start: undefined", [], "undefined"),
        (LLMatcher.grammar_from_json_schema({"type": "no such type"}), [], "no such type"),
        (LLMatcher.grammar_from_regex("x" * 200_000), [], "longer than"),
        (LLMatcher.grammar_from_json_schema(json.loads('{"items":' * 300 + "{}" + "}" * 300)), [], "recursion"),
        ('start: "a" B\nB: /b/ & /c/', [ord("a")], "nothing that is allowed can come next"),
        (grammar(PERSON), [ord("{"), ord("x")], "doesn't satisfy the grammar"),
    ],
)
def test_what_does_not_compile_or_ends_nowhere_or_does_not_match_is_objected_to(
    text: str, outputs: list[int], reason: str
) -> None:
    found = objection(Grammars(BYTES, VOCABULARY), row_of(text, outputs))
    assert found.startswith("the grammar cannot be followed: ") and reason in found
    assert "\n" not in found and len(found) < 300


def test_rules_may_nest_as_deep_as_a_text_has_room_for() -> None:
    """The library recurses once for each, which the stack must hold."""
    rules = [f"r{number}: r{number + 1}" for number in range(8_000)]
    row, grammars = row_of("\n".join(["start: r0", *rules, 'r8000: "y"'])), Grammars(BYTES, VOCABULARY)
    assert len(row.sampling.grammar) > 100_000
    assert next_tokens(grammars, row) == [ord("y")] and not grammars.objection(row)


def test_a_grammar_that_takes_too_much_is_objected_to_in_the_midst_and_for_good() -> None:
    grammars, row = Grammars(BYTES, VOCABULARY), row_of(AMBIGUOUS)
    while not grammars.objection(row):
        next_tokens(grammars, row)
        row.outputs.append(ord("x"))  # type: ignore[attr-defined]
        assert len(row.outputs) < 1000
    assert "the grammar cannot be followed: " in grammars.objection(row) and len(row.outputs) > 5
    reason = grammars.objection(row)
    next_tokens(grammars, row)
    assert grammars.objection(row) == reason and "it takes more than 5 ms for each token" in reason


def test_without_a_tokenizer_or_an_end_token_there_are_no_grammars(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    row = row_of(grammar(PERSON))
    assert "this engine has no tokenizer" in objection(Grammars(None, VOCABULARY), row)
    assert "names no token that ends an answer" in objection(Grammars(tmp_path, VOCABULARY), row)
    (tmp_path / "config.json").write_text('{"eos_token_id": 257}')
    for model, vocab_size in ((tmp_path, VOCABULARY), (BYTES, 100)):
        found = objection(Grammars(model, vocab_size), row, vocab_size)
        assert "tokenizer cannot be used for grammars" in found
    (tmp_path / "tokenizer.json").unlink()
    assert "tokenizer.json: no such file" in objection(Grammars(tmp_path, VOCABULARY), row)


# ---- what is kept


def test_of_grammars_that_no_row_follows_few_are_kept() -> None:
    grammars = Grammars(BYTES, VOCABULARY)
    texts = [LLMatcher.grammar_from_regex(f"a{number}") for number in range(MAX_IDLE + 8)]
    followed = row_of(texts[0])
    for text in texts:
        assert next_tokens(grammars, followed if text == texts[0] else row_of(text)) == [ord("a")]
    assert MAX_IDLE <= grammars.gauges()["grammars"] <= MAX_IDLE + 2
    assert next_tokens(grammars, followed) == next_tokens(grammars, row_of(texts[1])) == [ord("a")]


def test_compiled_grammars_are_bounded_in_bytes() -> None:
    """As many as fit, and the one that is followed in any case."""
    grammars = Grammars(BYTES, VOCABULARY, GrammarLimits(kept_bytes=8 << 20))
    for number in range(4):
        assert next_tokens(grammars, row_of(LARGE.replace("property", f"p{number}")))
        gauges = grammars.gauges()
        assert gauges["grammar_bytes"] < gauges["grammars"] * (64 << 20)
    assert 1 <= gauges["grammars"] <= 2 and gauges["grammar_bytes"] > 4 << 20


def test_a_row_that_comes_with_outputs_goes_on_as_one_that_made_them_and_so_does_a_new_process() -> None:
    """As after the death of a node or of the process, in every place of the answer; the same step may come twice."""
    text, outputs, draw = grammar(PERSON), list[int](), random.Random(5)
    grammars, others, row = Grammars(BYTES, VOCABULARY), Grammars(BYTES, VOCABULARY), row_of(text, outputs)
    deaths = 0
    while (tokens := next_tokens(grammars, row)) != [END]:
        assert next_tokens(grammars, row) == tokens
        for other in (grammars, others):
            assert next_tokens(other, row_of(text, list(outputs))) == tokens
        outputs.append(draw.choice(tokens))
        if len(outputs) % 7 == 0:
            worker = grammars._grammars[text].sandbox._worker
            assert worker is not None
            worker.shutdown(socket.SHUT_RD)  # as if it ended before it answers
            deaths += 1
    assert deaths > 2 and not grammars.objection(row)
    validate(text_of(outputs), PERSON)


@pytest.mark.parametrize(
    "schema",
    [
        {"const": -(2**63)},
        {"enum": ["a", -(2**63)]},
        {"type": "integer", "minimum": -(2**63), "maximum": -(2**63) + 1},
        {"properties": {"a": {"anyOf": [{"type": "null"}, {"const": -(2**63)}]}}},
    ],
)
def test_where_the_library_breaks_its_process_only_that_grammar_is_objected_to(schema: dict[str, Any]) -> None:
    grammars, broken = Grammars(BYTES, VOCABULARY), row_of(LLMatcher.grammar_from_json_schema(schema))
    well = row_of(grammar(PERSON))
    bits = np.zeros((2, -(-VOCABULARY // 32)), np.int32)
    grammars.fill([(0, broken), (1, well)], bits)
    assert unpacked(bits[1]) == [ord("{")] and not grammars.objection(well)
    assert "the library of grammars fails on it" in grammars.objection(broken)
    assert grammars.gauges()["grammar_deaths_total"] >= 1


def test_what_takes_too_long_to_compile_is_objected_to() -> None:
    grammars = Grammars(BYTES, VOCABULARY, GrammarLimits(cpu_s=0.01))
    assert "it takes too long" in objection(grammars, row_of(LARGE))


def test_where_no_process_can_be_started_rows_end_and_the_next_may_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the midst of an answer, too: whoever fills masks goes on."""
    grammars, text = Grammars(BYTES, VOCABULARY), LLMatcher.grammar_from_regex("(only here|there)*")

    def no_more() -> NoReturn:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(socket, "socketpair", no_more)
        row = row_of(text)
        next_tokens(grammars, row)
        assert grammars.objection(row).endswith("no process can be started: Too many open files")
    del row
    assert next_tokens(grammars, row_of(text)) == [ord("o"), ord("t"), END]


# ---- whole answers


@pytest.mark.parametrize("seed", range(6))
def test_every_answer_parses_and_validates(seed: int) -> None:
    """Random logits, greedy and drawn in all ways, each with a schema of its own."""
    draw, constraints = random.Random(seed), Constraints(BYTES, VOCABULARY)
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 3.0, "top_k": 2},
        {"temperature": 0.01, "top_p": 0.5, "min_p": 0.1},
        {"temperature": 1.0, "min_tokens": 400, "stop_tokens": (END,), "presence_penalty": 1.0},
        {"temperature": 0.0, "logit_bias": ((END, 100.0), (7, 100.0)), "repetition_penalty": 1.3},
    ]
    schemas = [object_schema(draw, 3) for _ in range(12)]
    rows = [
        Row(Sampling(grammar=grammar(each), seed=at, **kinds[at % len(kinds)]), [])
        for at, each in enumerate(schemas)
    ]
    generator, going = torch.Generator().manual_seed(seed), rows
    while going:
        logits = 8 * torch.randn(len(going), VOCABULARY, generator=generator)
        tokens, _ = sample(logits, going, constraints.allowed(going))
        for row, token in zip(going, tokens, strict=True):
            row.outputs.append(token)  # type: ignore[attr-defined]
            assert not constraints.objection(row) and len(row.outputs) < 2000
        going = [row for row in going if not constraints.ends(row.sampling, row.outputs[-1])]
    for row, wanted in zip(rows, schemas, strict=True):
        assert list(row.outputs).count(END) == 1 and row.outputs[-1] == END
        validate(text_of(row.outputs), wanted)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other tests want none to end an answer."""
    folder = tmp_path_factory.mktemp("ending") / "llama"
    make_model(folder, "llama")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    return folder


def test_a_step_that_is_broken_off_is_repeated_alike_and_others_do_not_notice(llama: Path) -> None:
    """Of one batch: a row with a grammar, one whose grammar cannot be followed, and a free one."""
    samplings = [
        Sampling(temperature=0, grammar=grammar(PERSON)),
        Sampling(temperature=0, grammar="{nonsense"),
        Sampling(temperature=0),
    ]

    def rows() -> list[Row]:
        return [Row(sampling, []) for sampling in samplings]

    engine = Engine(llama, EngineOptions(dtype="float32", kv_bytes=1 << 24))
    chunks = [Chunk([5, 6, number], 0, [number], True) for number in range(3)]
    alone = [engine.step(engine.build([chunk]), [row])[0][0] for chunk, row in zip(chunks, rows(), strict=True)]
    together = rows()

    def refuse(layer: int) -> None:
        if layer == 1:
            raise ConnectionError

    batch = engine.build(chunks)
    with pytest.raises(ConnectionError):
        engine.step(batch, together, before_layer=refuse)
    for _ in range(2):
        tokens, _ = engine.step(batch, together)
        assert (tokens[0], tokens[2]) == (alone[0], alone[2])
    objections = [bool(engine.constraints.objection(row)) for row in together]
    assert objections == [False, True, False]


OF_BYTES = grammar_tokenizer(open_files(bytes_folder()).required("tokenizer.json"), [257])


@pytest.mark.parametrize(
    "schema",
    [
        {"multipleOf": 99_991},
        {"multipleOf": 1e5 + 3},
        {"multipleOf": 9.9991},
        {"multipleOf": 10**18 + 1},
        {"type": "object", "properties": {"a": {"items": {"multipleOf": -99_991}}}},
        {"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]},
        {"$ref": "#/$defs/a", "multipleOf": 997, "$defs": {"a": {"type": "integer", "multipleOf": 991}}},
    ],
)
def test_multiples_that_the_library_would_count_up_to_are_refused(schema: dict[str, Any]) -> None:
    for text in (LLMatcher.grammar_from_json_schema(schema), f"start: %json {json.dumps(schema)}"):
        for spelled in (text, text.replace("multipleOf", "multiple\\u004ff")):
            with pytest.raises(GrammarError, match="'multipleOf' is followed up to"):
                compile_grammar(spelled, OF_BYTES, GRAMMAR_LIMITS)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number", "multipleOf": 0.01},
        {"type": "integer", "multipleOf": 100_000},
        {"type": "integer", "multipleOf": 9_973, "maximum": 99_999, "minimum": 0},
        {
            "type": "object",
            "properties": {"a": {"type": "integer", "multipleOf": 97}, "b": {"multipleOf": 9_001}},
        },
        {"type": "string", "enum": ["multipleOf: 99991"]},
    ],
)
def test_other_multiples_are_followed(schema: dict[str, Any]) -> None:
    compile_grammar(LLMatcher.grammar_from_json_schema(schema), OF_BYTES, GRAMMAR_LIMITS)
