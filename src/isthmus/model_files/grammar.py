"""Grammars compiled against a model's tokenizer, wherever that is done alike: what the gateway lets in, engines follow.

The library is somebody else's native code, and grammars are strangers': it runs where a process may die
(`isthmus.sandbox`). Imported by who meets a grammar, since the library takes a while to load and need not be installed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from isthmus import sandbox
from isthmus.model_files.grammar_limits import GrammarError, GrammarLimits

LIMITS = LLParserLimits(
    max_items_in_row=2_000,
    step_max_items=20_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""One request must not hold up all others of its batch: of what tried to be slow, a mask took 0.25 s at worst."""
MAX_MULTIPLE = 10_000
"""Takes 0.15 s; a million would take 10 s and 344 MiB."""
MAX_PRODUCT = (1 << 32) - 1
"""Largest product of multiples that hold together; beyond it the library (1.9.1) computes wrongly without an error."""
MAX_DIGITS = 30
_MULTIPLE = re.compile(r'multipleOf\\*"\s*:\s*([-+.0-9eE]+)')
_ESCAPED = re.compile(r"\\+u([0-9a-fA-F]{4})")
_COMBINING = ("allOf", "anyOf", "oneOf", "$ref")


def grammar_tokenizer(tokenizer: str, ends: Sequence[int], vocab_size: int | None = None) -> LLTokenizer:
    """`tokenizer`: the text of a tokenizer.json; `ends`: the tokens that end an answer; `vocab_size`: of the logits,
    None as the tokenizer has. Raises GrammarError."""
    if not ends:
        raise GrammarError("this model names no token that ends an answer, and grammars need one")
    try:
        return LLTokenizer(tokenizer, vocab_size, list(ends))
    except ValueError as error:
        raise GrammarError(_line(f"this model's tokenizer cannot be used for grammars: {error}")) from None


def compile_grammar(grammar: str, tokenizer: LLTokenizer, limits: GrammarLimits) -> LLMatcher:
    """At the beginning of an answer, what may come first found out already; copies know it, too. Takes a millisecond,
    or a second for a large one. Raises GrammarError."""
    if len(grammar.encode()) > limits.max_bytes:
        raise GrammarError(f"it is longer than {limits.max_bytes} bytes (limits.grammar_bytes)")
    _check_multiples(grammar)
    with sandbox.cpu_limit(limits.cpu_s):
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()
    check(matcher)
    return matcher


def _check_multiples(grammar: str) -> None:
    """The library counts up to every `multipleOf`, or to the least common multiple of those that hold for one number,
    but for factors of ten, and no limit of its own ends that. Raises GrammarError."""
    spelled = _ESCAPED.sub(lambda found: chr(int(found[1], 16)), grammar)
    found = _MULTIPLE.findall(spelled)
    counted = [_without_tens(number) for number in found]
    if any(word in spelled for word in _COMBINING):
        counted = [math.lcm(*counted)]
        places = max(map(_places, found), default=0)
        if len(found) > 1 and math.prod(map(_digits, found)) * 10 ** (len(found) * places) > MAX_PRODUCT:
            counted.append(MAX_MULTIPLE + 1)
    if max(counted, default=0) > MAX_MULTIPLE:
        raise GrammarError(
            f"'multipleOf' is followed up to {MAX_MULTIPLE}, of those that hold together the product"
        )


def _digits(number: str) -> int:
    """Its digits as a whole number; more than is allowed where there are too many."""
    digits = re.split("[eE]", number)[0].replace(".", "").lstrip("-+0") or "1"
    return MAX_PRODUCT + 1 if len(digits) > MAX_DIGITS else int(digits)


def _places(number: str) -> int:
    """Behind the point; many where an exponent may say so."""
    return MAX_DIGITS if "e" in number.lower() else len(number.partition(".")[2].rstrip("0"))


def _without_tens(number: str) -> int:
    """The number's digits without factors of two and five."""
    left = _digits(number)
    for factor in (2, 5):
        while left % factor == 0:
            left //= factor
    return left


def check(matcher: LLMatcher) -> None:
    """Raises GrammarError when it cannot go on, and never can again."""
    if matcher.is_error():
        raise GrammarError(_line(matcher.get_error()))


_PLAIN = (
    ("NoExtensionBias", "nothing that is allowed can come next"),
    ("Too many items", "it can be read in too many ways"),
    ("oneOf constraints", "of 'oneOf' more than one may fit, which is not followed; 'anyOf' would be"),
    ("look-around", "look-ahead and look-behind of regular expressions are not followed"),
    ("backreferences", "backreferences of regular expressions are not followed"),
)
"""Parts of the library's messages, and their meaning in plain words."""


_IN_LARK = "failed to compile JSON schema: "
_SHOWN = re.compile(r"\s*(\d+ \||\^)")
"""A line of the grammar, or what points into one: of no use where the gateway wrote it for a schema."""


def _line(text: str) -> str:
    for theirs, ours in _PLAIN:
        if theirs in text:
            return ours
    _, _, of_schema = text.partition(_IN_LARK)
    if of_schema:
        text = "\n".join(line for line in of_schema.splitlines() if not _SHOWN.match(line))
    text = text.replace("<non-verbose/>", "").replace("Unimplemented keys:", "these words are not followed:")
    return " ".join(text.split())[:300]
