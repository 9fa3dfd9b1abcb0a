"""A model's tokenizer with its chat template and generation defaults."""

from __future__ import annotations

import codecs
import json
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer

from isthmus.core.errors import ModelError, RequestError
from isthmus.extras import missing
from isthmus.live.gateway.detokenizer import MAX_PENDING, Detokenizer
from isthmus.live.gateway.pieces import Pieces, are_independent
from isthmus.live.gateway.template import ChatTemplate, load_template
from isthmus.model_files import ModelFiles, added_tokens, open_files, read_ends
from isthmus.model_files.grammar_limits import GrammarError

if TYPE_CHECKING:
    from llguidance import LLTokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GenerationDefaults:
    """Sampling defaults for fields that a request leaves out: the model's, else OpenAI's. `eos`: ids of the end
    tokens."""

    eos: tuple[int, ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0


def load_generation(files: ModelFiles) -> GenerationDefaults:
    """Reads generation_config.json and the end tokens; both may be absent. Ignored end tokens are logged.

    Raises ModelError when a file is not JSON or holds a value of the wrong type.
    """
    generation, where = files.object("generation_config.json"), files.where("generation_config.json")
    eos, ignored = read_ends(files)
    for line in ignored:
        log.warning(line)
    repetition_penalty = _number(generation, "repetition_penalty", where, otherwise=1.0)
    if not repetition_penalty:
        raise ModelError(f"{where}: repetition_penalty must be above 0")
    if generation.get("do_sample") is not True:
        return GenerationDefaults(eos=eos, repetition_penalty=repetition_penalty)
    return GenerationDefaults(
        eos=eos,
        temperature=_number(generation, "temperature", where, otherwise=1.0),
        top_p=_number(generation, "top_p", where, otherwise=1.0),
        top_k=int(_number(generation, "top_k", where, otherwise=0)),
        repetition_penalty=repetition_penalty,
    )


def _number(config: dict[str, Any], name: str, where: str, *, otherwise: float) -> float:
    value = config.get(name)
    if value is None:
        return otherwise
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise ModelError(f"{where}: {name} must be a number of at least 0, found {value!r}")
    return float(value)


_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_Utf8 = codecs.getincrementaldecoder("utf-8")
LOOK_BACK = 64
"""Tokens at the end of a prompt that are searched for visible ones, which begin the window of its answers."""


class GatewayTokenizer:
    """Thread-safe."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, generation: GenerationDefaults
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.generation = generation
        self._tokenizer = tokenizer
        self.template = template
        self._pieces: Pieces | None = None
        self._is_shared = True
        self._added = {token: added.content for token, added in tokenizer.get_added_tokens_decoder().items()}
        self._visible = _visible(tokenizer)
        self._all_visible = _visible(tokenizer, special=True)
        self._shown: dict[tuple[str, ...], bytes] = {(): self._visible}
        self._longest = _longest(tokenizer)
        self._byte_level = "ByteLevel" in json.dumps(json.loads(tokenizer.to_str()).get("decoder"))

    @classmethod
    def load(cls, model: Path) -> GatewayTokenizer:
        """The tokenizer of a model folder or a GGUF file. Raises ModelError naming a file that is missing or wrong."""
        files = open_files(model)
        text = files.required("tokenizer.json")
        try:
            tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            where = files.where("tokenizer.json")
            raise ModelError(f"{where}: not a tokenizer the tokenizers library can read: {error}") from error
        _add(tokenizer, added_tokens(files))
        return cls(tokenizer, load_template(files), load_generation(files))

    def remember(self, most_bytes: int) -> None:
        """Remembers tokens of conversations, where their parts are tokenised independently. From then on one thread
        alone may use it, which does all the work."""
        self._is_shared = False
        if are_independent(self._tokenizer):
            self._pieces = Pieces(
                self._tokenizer, partial(self._encode_whole, add_special_tokens=False), most_bytes
            )

    def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokens of a plain prompt, with the special tokens that the model expects around it."""
        return self._encode(text, add_special_tokens=add_special_tokens)

    def least_tokens(self, num_chars: int) -> int:
        """A lower bound for the tokens of a text of `num_chars` characters; 0 if unknown. Tokenising a long text only
        to refuse it would take seconds and hundreds of MiB."""
        return num_chars // self._longest if self._longest else 0

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The prompt of a conversation; `options`: of `ChatTemplate.render`. Raises RequestError without a template,
        or if it refuses."""
        if self.template is None:
            raise RequestError("this model has no chat template: use /v1/completions instead", param="messages")
        return self.template.render(messages, **options)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_special_tokens: bool = False, **options: Any
    ) -> list[int]:
        """Tokens of a conversation. Raises as `render`."""
        return self._encode(self.render(messages, **options), add_special_tokens=add_special_tokens)

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Text of `tokens`, with special tokens only if `special`."""
        return self._tokenizer.decode(tokens, skip_special_tokens=not special)

    def detokenizer(
        self, prompt: Sequence[int] = (), *, special: bool = False, shown: Sequence[str] = ()
    ) -> Detokenizer:
        """The detokenizer of one answer to `prompt`. `special`: all special tokens are text; `shown`: these are."""
        visible = self._all_visible if special else self._visible_with(tuple(shown))
        at_end = [token for token in prompt[-LOOK_BACK:] if token < len(visible) and visible[token]]
        # Starts at a character boundary: up to three continuation bytes are dropped.
        before = at_end[-MAX_PENDING - 3 :]
        while len(before) > MAX_PENDING and self.token_bytes(before[0])[:1] in _CONTINUATIONS:
            del before[0]
        decode = self._tokenizer.decode
        return Detokenizer(lambda tokens: decode(tokens, False), visible, before, open=self._is_open(before))

    def prompt_text(self, prompt: Sequence[int], *, alone: bool) -> str:
        """Text of `prompt`: all of it if it stands `alone`, else up to where the text of its answers begins."""
        end = len(prompt)
        while not alone and end > len(prompt) - MAX_PENDING and self._is_open(prompt[:end]):
            end -= 1
        rest = self.detokenizer(prompt[:end])
        return self.decode(prompt[:end]) + "".join(map(rest.push, prompt[end:]))

    def offsets(self, tokens: Sequence[int], text: str) -> tuple[int, ...]:
        """The character of `text` at which each of its `tokens` begins; a token inside a character begins where that
        does. A leading space that only the tokens have, and special tokens that the text does not spell, have no
        width."""
        starts, at, decoder = list[int](), 0, _Utf8("replace")
        for token in tokens:
            starts.append(min(at, len(text)))
            raw = self.token_bytes(token)
            if token < len(self._visible) and self._visible[token]:
                spelled = decoder.decode(raw)
                unspaced = spelled[:1] == " " and not text.startswith(spelled, at)
                at += len(spelled) - (unspaced and text.startswith(spelled[1:], at))
            elif raw and text.startswith(special := raw.decode(), at):
                at += len(special)
        return tuple(starts)

    def _is_open(self, tokens: Sequence[int]) -> bool:
        """Whether the tokens end inside a character."""
        decoder = _Utf8("replace")
        decoder.decode(b"".join(map(self.token_bytes, tokens[-MAX_PENDING:])))
        return bool(decoder.getstate()[0])

    def _visible_with(self, shown: tuple[str, ...]) -> bytes:
        """`shown`: markers of a tool format, of which there are few."""
        if shown not in self._shown:
            visible = bytearray(self._visible)
            for token in self.special_tokens(shown):
                visible[token] = 1
            self._shown[shown] = bytes(visible)
        return self._shown[shown]

    def special_tokens(self, texts: Sequence[str]) -> dict[int, str]:
        """Those of `texts` that are special tokens, by id."""
        return {
            token: text for token, text in self._added.items() if text in texts and not self._visible[token]
        }

    def special_token(self, text: str) -> int | None:
        """The id of the special token `text`; None if there is none."""
        return next(iter(self.special_tokens([text])), None)

    def words_as_tokens(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Tokens of each word, as it is and behind a space."""
        forms = [form for word in words for form in (word, f" {word.lstrip()}")]
        return tuple(dict.fromkeys(tuple(self._encode(form, add_special_tokens=False)) for form in forms))

    @cached_property
    def for_grammars(self) -> LLTokenizer:
        """The tokenizer as llguidance reads it; takes a moment the first time. Raises RequestError when it cannot."""
        try:
            from isthmus.model_files.grammar import grammar_tokenizer

            return grammar_tokenizer(self._tokenizer.to_str(), self.generation.eos)
        except ModuleNotFoundError as error:
            raise RequestError(str(missing(error, "to follow a grammar the server"))) from None
        except GrammarError as error:
            raise RequestError(f"no grammar can be followed: {error}") from None

    def read_for_grammars(self) -> None:
        """Loads `for_grammars` ahead: the process stands still for a second or three. An error is reported with each
        grammar."""
        with suppress(RequestError):
            _ = self.for_grammars

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token, possibly part of a character; empty for an unknown token."""
        text = self._tokenizer.id_to_token(token)
        if text is None:
            return b""
        if token in self._added and (self._byte_level or not self._visible[token]):
            return text.encode()
        if self._byte_level and all(char in BYTE_OF_CHAR for char in text):
            return bytes(BYTE_OF_CHAR[char] for char in text)
        if match := _BYTE_TOKEN.fullmatch(text):
            return bytes([int(match[1], 16)])
        return text.replace("▁", " ").encode()

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if self._pieces is not None and not add_special_tokens:
            return self._pieces.encode(text)
        return self._encode_whole(text, add_special_tokens=add_special_tokens)

    def _encode_whole(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if not self._is_shared:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        # encode_batch_fast keeps no offsets and releases the interpreter lock, unlike encode, and waits for a thread.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


def _add(tokenizer: Tokenizer, stated: Mapping[str, bool]) -> None:
    """Adds other files' statements about tokens of the tokenizer: all are matched whole, and special ones are not
    shown."""
    known = {added.content: added for added in tokenizer.get_added_tokens_decoder().values()}
    for text, special in stated.items():
        if tokenizer.token_to_id(text) is None:
            continue
        if text not in known:
            tokenizer.add_tokens([AddedToken(text, special=special, normalized=not special)])
        elif special and not known[text].special:
            known[text].special = True
            tokenizer.add_tokens([known[text]])


def _longest(tokenizer: Tokenizer) -> int:
    """Characters of the longest token; 0 if a normalizer may shorten texts."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    return 0 if tokenizer.normalizer is not None else max(map(len, vocabulary), default=0)


def _visible(tokenizer: Tokenizer, *, special: bool = False) -> bytes:
    """One byte for each token id: 0 for unused ids, and for special tokens unless `special`."""
    ids = tokenizer.get_vocab(with_added_tokens=True).values()
    visible = bytearray(max(ids, default=-1) + 1)
    for token in ids:
        visible[token] = 1
    for token, added in tokenizer.get_added_tokens_decoder().items():
        visible[token] = 0 if added.special and not special else 1
    return bytes(visible)


_CONTINUATIONS = frozenset(bytes([byte]) for byte in range(0x80, 0xC0))
"""UTF-8 continuation bytes."""


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for U+0100 and up, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet |= {chr(256 + i): byte for i, byte in enumerate(others)}
    return alphabet


BYTE_OF_CHAR = _byte_alphabet()
