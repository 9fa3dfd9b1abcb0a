"""What every model brings beside its weights, by the names that a Hugging Face folder has for it."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, NamedTuple

import blake3
import msgspec

from isthmus.core.errors import ModelError
from isthmus.model_files.header import parts_of


class _Added(msgspec.Struct):
    id: int
    content: str


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]] = {}


class _Tokenizer(msgspec.Struct):
    """Of a tokenizer.json the ids of its tokens: millions of bytes, so nothing else is made of them."""

    added_tokens: list[_Added] | None = None
    model: _Vocabulary | None = None


class ModelFiles(ABC):
    """Texts by the name of a file: `config.json`, `tokenizer.json`, `tokenizer_config.json`, `generation_config.json`,
    `chat_template.jinja`. `path`: of the folder or the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def text(self, name: str) -> str | None:
        """None when there is no such file. Raises ModelError when it cannot be read."""

    @abstractmethod
    def where(self, name: str) -> str:
        """How messages name it."""

    @abstractmethod
    def missing(self, name: str) -> str:
        """What messages say when it must be there and is not."""

    @abstractmethod
    def names(self, folder: str, suffix: str) -> Sequence[str]:
        """Names of the files in a folder beside these, in order; none where there is no such folder."""

    @abstractmethod
    def token_id(self, text: str) -> int | None:
        """The id of a token by its text, None where the tokenizer has no such token. Raises ModelError."""

    def object(self, name: str) -> dict[str, Any]:
        """A JSON object, empty when there is no such file. Raises ModelError when it is something else."""
        text = self.text(name)
        try:
            value = {} if text is None else json.loads(text)
        except ValueError as error:
            raise ModelError(f"{self.where(name)}: cannot be read as JSON: {error}") from None
        if not isinstance(value, dict):
            raise ModelError(f"{self.where(name)}: expected a JSON object, found {type(value).__name__}")
        return value

    def required(self, name: str) -> str:
        """Raises ModelError also when there is no such file."""
        text = self.text(name)
        if text is None:
            raise ModelError(f"{self.where(name)}: {self.missing(name)}")
        return text

    def required_object(self, name: str) -> dict[str, Any]:
        self.required(name)
        return self.object(name)


class Folder(ModelFiles):
    """As they lie there, with safetensors weights."""

    def text(self, name: str) -> str | None:
        try:
            return (self.path / name).read_text(encoding="utf-8-sig")  # some editors begin files with a BOM
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise ModelError(f"{self.path / name}: cannot be read: {error}") from None

    def names(self, folder: str, suffix: str) -> Sequence[str]:
        return sorted(f"{folder}/{path.name}" for path in (self.path / folder).glob(f"*{suffix}"))

    def token_id(self, text: str) -> int | None:
        try:
            known = msgspec.json.decode(self.text("tokenizer.json") or "{}", type=_Tokenizer)
        except msgspec.DecodeError as error:
            where = self.where("tokenizer.json")
            raise ModelError(f"{where}: not a tokenizer the tokenizers library can read: {error}") from None
        for added in known.added_tokens or ():
            if added.content == text:
                return added.id
        vocabulary = known.model.vocab if known.model is not None else {}
        if isinstance(vocabulary, dict):
            return vocabulary.get(text)
        return next((at for at, (token, _) in enumerate(vocabulary) if token == text), None)

    def where(self, name: str) -> str:
        return str(self.path / name)

    def missing(self, name: str) -> str:
        return f"no such file; a model folder needs a {name}"


# Special tokens: by name, as templates know them (`bos_token`, `eos_token` and others), and all of them.


def special_tokens(files: ModelFiles) -> dict[str, str]:
    """Texts by name. Raises ModelError."""
    return _named(_stated_special(files))


def added_tokens(files: ModelFiles) -> dict[str, bool]:
    """Texts that are found whole in prompts, and whether they are special (not shown), as the files beside a folder's
    tokenizer say; of a GGUF file its tokenizer knows all. Raises ModelError."""
    stated = _stated_special(files) if isinstance(files, Folder) else {}
    decoder = stated.get("added_tokens_decoder")
    entries = [each for each in decoder.values() if isinstance(each, dict)] if isinstance(decoder, dict) else []
    found = {text: each.get("special") is True for each in entries if (text := _text(each)) is not None}
    lists = [stated.get(name) for name in ("additional_special_tokens", "extra_special_tokens")]
    listed = [_text(each) for values in lists if isinstance(values, list) for each in values]
    named = [*listed, *_named(stated).values()]
    return found | {text: True for text in named if text is not None}


def _named(stated: dict[str, Any]) -> dict[str, str]:
    named = {name: value for name, value in stated.items() if name.endswith("_token")}
    more = stated.get("extra_special_tokens")  # a model's own, as `image_token`
    named |= more if isinstance(more, dict) else {}
    return {name: text for name, value in named.items() if (text := _text(value)) is not None}


def _stated_special(files: ModelFiles) -> dict[str, Any]:
    """Older folders say special tokens in special_tokens_map.json: as transformers has it, that file counts where
    tokenizer_config.json lists no `added_tokens_decoder`, and then before it."""
    config = files.object("tokenizer_config.json")
    return config if "added_tokens_decoder" in config else config | files.object("special_tokens_map.json")


def _text(value: Any) -> str | None:
    """Of a token, which is written as a string or as `{"content": string, ...}`."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


# Which tokens end an answer, as a model's files say.


class Ends(NamedTuple):
    """`tokens`: ids, each once. `ignored`: what the files say and no answer can end with, a line each."""

    tokens: tuple[int, ...]
    ignored: tuple[str, ...]


def end_tokens(files: ModelFiles) -> tuple[int, ...]:
    """Ids of the tokens that end an answer; empty where the files name none. Raises ModelError as `read_ends`."""
    return read_ends(files).tokens


def read_ends(files: ModelFiles) -> Ends:
    """The ids of generation_config.json, else of config.json, as transformers generates; and the tokenizer's end token,
    with which turns end where the author of a fine-tuned model changed the tokenizer alone.

    Raises ModelError when a file is not JSON or holds a value of the wrong type.
    """
    config = files.object("config.json")
    nested = config.get("text_config")
    text_config = nested if isinstance(nested, dict) else {}
    stated = (
        _stated_ends(files.object("generation_config.json"), files.where("generation_config.json"))
        or _stated_ends(config, files.where("config.json"))
        or _stated_ends(text_config, files.where("config.json"))
    )
    ignored = []
    if (text := special_tokens(files).get("eos_token")) is not None:
        token = files.token_id(text)
        if token is None:
            where = files.where("tokenizer_config.json")
            ignored.append(f"{where}: the end token {text!r} is ignored: the tokenizer has no such token")
        else:
            stated = (*stated, token)
    size = config.get("vocab_size", text_config.get("vocab_size"))
    beyond = [token for token in stated if type(size) is int and token >= size]
    if beyond:
        names = ", ".join(map(str, dict.fromkeys(beyond)))
        ignored.append(f"{files.path}: the end token {names} is ignored: the model has {size} tokens")
    return Ends(tuple(dict.fromkeys(token for token in stated if token not in beyond)), tuple(ignored))


def _stated_ends(config: dict[str, Any], where: str) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ModelError(
            f"{where}: eos_token_id must be an integer of at least 0 or a list of such, found {value!r}"
        )
    return tuple(ids)


# A model's chat templates by name.


def chat_templates(files: ModelFiles) -> dict[str, str]:
    """Texts by name, most often only `default`; none where the model has no template.

    As transformers has it: files of their own (chat_template.jinja and additional_chat_templates/NAME.jinja), else what
    tokenizer_config.json says; else chat_template.json, which older processors have. Raises ModelError.
    """
    named = {"default": files.text("chat_template.jinja")}
    for name in files.names("additional_chat_templates", ".jinja"):
        named[PurePath(name).stem] = files.text(name)
    return (
        {name: text for name, text in named.items() if text is not None}
        or _stated_templates(files, "tokenizer_config.json")
        or _stated_templates(files, "chat_template.json")
    )


def _stated_templates(files: ModelFiles, name: str) -> dict[str, str]:
    """Of the field `chat_template`: one template, a list of `{"name": …, "template": …}`, or an object by name."""
    value = files.object(name).get("chat_template")
    named: Any = {} if value is None else value
    if isinstance(value, str):
        named = {"default": value}
    elif isinstance(value, list) and all(isinstance(each, dict) for each in value):
        named = {each.get("name"): each.get("template") for each in value}
    if not isinstance(named, dict) or not all(isinstance(text, str) for each in named.items() for text in each):
        raise ModelError(
            f"{files.where(name)}: chat_template must be a string or a list of templates, each with name and template"
        )
    return named


# Which files of a folder hold the model's weights.


WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"-\d+-of-\d+\.safetensors$")
_SHOWN = 5


class WeightFiles(NamedTuple):
    """`names`: of the files to read, in the folder. `source`: the file that decides: the weights themselves, or their
    index. `left`: names of weights that lie beside them and are not read."""

    names: tuple[str, ...]
    source: str
    left: tuple[str, ...]

    @property
    def note(self) -> str:
        """What somebody who put the files there may not expect; empty where nothing was to be chosen."""
        if not self.left and self.source in (WHOLE, INDEX):
            return ""
        more = ", ..." if len(self.left) > _SHOWN else ""
        left = f"; not read: {', '.join(self.left[:_SHOWN])}{more}" if self.left else ""
        return f"weights are read from {self.source}{left}"


def weight_files(files: ModelFiles) -> WeightFiles:
    """As transformers chooses: the file that config.json names, else model.safetensors, else those of its index. A
    single file of another name is taken, too, if it is no shard or adapter.

    Raises ModelError where nothing says which file it is, and for an index that names files outside the folder.
    """
    present = sorted(path.name for path in files.path.glob("*.safetensors"))
    source = _source(files, present)
    names = _listed(files, source) if source.endswith(".json") else (source,)
    indexes = sorted(path.name for path in files.path.glob("*.safetensors.index.json"))
    return WeightFiles(names, source, tuple(n for n in (*present, *indexes) if n not in (*names, source)))


def _source(files: ModelFiles, present: list[str]) -> str:
    where = files.where("config.json")
    if (named := files.object("config.json").get("transformers_weights")) is not None:
        if not isinstance(named, str) or not named.endswith((".safetensors", ".safetensors.index.json")):
            raise ModelError(
                f"{where}: transformers_weights must name safetensors or their index, found {named!r}"
            )
        return _inside(where, named)
    for name in (WHOLE, INDEX):
        if (files.path / name).is_file():
            return name
    return _single(files, [name for name in present if not name.startswith("adapter_")])


def _single(files: ModelFiles, present: list[str]) -> str:
    shards = [name for name in present if _SHARD.search(name)]
    if shards:
        raise ModelError(f"{files.path}: {shards[0]} is one of several files, and their {INDEX} is missing")
    if len(present) > 1:
        names = ", ".join(present[:_SHOWN])
        raise ModelError(f"{files.path}: which weights? found {names}; rename those to serve to {WHOLE}")
    if present:
        return present[0]
    endings = (".bin", ".pt", ".pth", ".safetensors")
    others = sorted(path.name for path in files.path.iterdir() if path.suffix in endings)
    found = f"; found {', '.join(others)}, which Isthmus does not open" if others else ""
    wanted = "convert the model to safetensors, adapters merged"
    raise ModelError(f"{files.path}: no .safetensors weights of a whole model{found}; {wanted}")


def _listed(files: ModelFiles, index: str) -> tuple[str, ...]:
    where, listed = files.where(index), files.required_object(index).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise ModelError(f"{where}: weight_map must give each tensor's file name")
    return tuple(_inside(where, name) for name in sorted(set(listed.values())))


def _inside(where: str, name: str) -> str:
    """Checks a name, not where a link leads: files of downloaded models are links."""
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise ModelError(f"{where}: names weights outside the model's folder: {name!r}")
    return name


# Whether two machines have the same model, told without reading all of it.


PIECE = 1 << 20
"""Of each file its first and last bytes count, up to so many, and its length. What differs only between them is found
when a node joins: its engine has read all."""
_READ = (".json", ".jinja", ".safetensors", ".gguf", ".model")


def fingerprint(model: Path) -> str:
    """Of a folder or a GGUF file, in hexadecimal. Of a folder all weights count, since vLLM nodes may read more of them
    than others. Raises OSError when there is none, or it cannot be read."""
    digest = blake3.blake3()
    if model.is_file():
        files = parts_of(model)
    else:
        beside = [*model.iterdir(), *model.glob("additional_chat_templates/*")]
        files = sorted(each for each in beside if each.suffix in _READ)
    for file in files:
        with file.open("rb") as opened:
            length = opened.seek(0, 2)
            digest.update(f"{file.name}/{length}/".encode())
            for start in dict.fromkeys((0, max(0, length - PIECE))):
                opened.seek(start)
                digest.update(opened.read(PIECE))
    return digest.hexdigest()
