"""A streamed answer that another server can go on with when its own breaks off.

The server is asked for the ids of its tokens (`return_token_ids`), which the client does not see unless it asked for
them itself. A continuation begins at a seam, a little before the break, where the text sent so far is known to be that
of whole tokens. The tokens between seam and break come again and must be equal; their text is left out. Where there is
no seam, or a field of the request counts from the beginning, the request itself is sent again.

    sent            t0 t1 t2 t3 t4 t5|       break
    continuation             t3 t4 t5 t6 t7  prompt: that of the request, t0 t1 t2
                            seam

Knows bytes of requests and of answers; must not know who sends them, or where.
"""

from __future__ import annotations

import re
from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Raw

from isthmus.core.errors import IsthmusError
from isthmus.core.types import PassedRequest
from isthmus.live.servers.continuable import CHAT, COMPLETIONS, Asked, Repeated, read_asked

VLLM, ISTHMUS = "vllm", "isthmus"
TELLING = (VLLM, ISTHMUS)
"""Kinds of servers that tell ids of tokens. vLLM writes null where nobody asked for them."""
MAX_SEAMS = 64
"""The latest ones are kept; with a stop string that is longer than the text behind them an answer begins again."""
MAX_BEHIND = 64
"""Events that are read together."""
MAX_EVENT_BYTES = 32 << 20
"""The first event repeats the prompt's ids."""
DATA, DONE = b"data: {", b"data: [DONE]"
_OPENING = re.compile(rb"\s*\{")
_IDS = (b',"token_ids":', b',"prompt_token_ids":')
"""Keys of lists. Within a string of JSON their quotes would be escaped."""


class BrokenOffError(IsthmusError):
    """The server says amid its answer that it cannot go on."""


class DiffersError(IsthmusError):
    """A continuation is not of the answer that broke off."""


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: dict[str, Any] | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: Raw = Raw()


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    prompt_token_ids: Raw = Raw()
    error: dict[str, Any] | None = None


_read_chunk = msgspec.json.Decoder(_Chunk).decode


_PLAIN = re.compile(rb'data: \{(?!"error").*"(?:content|text)":"(?!")', re.DOTALL)
"""An event of text that is not empty."""


def answer_to(passed: PassedRequest) -> Answer | None:
    """Returns the answer of a request, before it begins, if another server might go on with it; else None."""
    path = passed.target.partition("?")[0]
    opening = _OPENING.match(passed.body)
    if not passed.is_streamed or path not in (COMPLETIONS, CHAT) or opening is None:
        return None
    asked = read_asked(path, passed.body)
    return None if asked is None else Answer(passed, asked, path, opening.end())


class _Seam(msgspec.Struct, frozen=True):
    """A place between two events. `num_tokens`, `num_chars`: sent before it; `is_settled`: the event before it was of
    one token, and of text; `first`: the character behind it; `is_valid`: neither that one nor the one before it stands
    for bytes that are no character."""

    num_tokens: int
    num_chars: int
    is_settled: bool
    first: str
    is_valid: bool


class Answer:
    """One answer, over as many attempts as it takes: `request_to` begins one, and `take` takes what comes of it.

    `opening`: bytes of the body before its first field.
    """

    def __init__(self, passed: PassedRequest, asked: Asked, path: str, opening: int) -> None:
        self._passed, self._asked, self._path, self._opening = passed, asked, path, opening
        self._forget()

    def _forget(self) -> None:
        """Begins anew, with nothing sent."""
        self.is_over = False
        """The end of the stream was sent."""
        self.error: BrokenOffError | DiffersError | None = None
        """How the attempt ends, though its stream may not."""
        self._kind = ""
        self._behind: list[bytes] = []
        """Events of text that were passed on and not read."""
        self._prompt = b""
        """Ids of the prompt, as JSON without brackets."""
        self._last = b""
        """The last event of text, as sent."""

        # What was sent, by all attempts.
        self._tokens = array("q")
        self._num_chars, self._end = 0, ""
        self._seams: deque[_Seam] = deque(maxlen=MAX_SEAMS)
        self._is_settled = False
        self._is_finished = self._is_counted = False
        self._is_lost = False
        """Something came that no continuation would tell."""
        self._begin("", None)

    def _begin(self, kind: str, start: tuple[int, int] | None) -> None:
        """Begins an attempt after so many tokens and characters; None where nothing was sent."""
        self._start, self.error = start, None
        self._tokens_in, self._chars_in = start or (0, 0)
        self._follows = None if kind in TELLING else False  # None: not known before its first event
        self._rest = b""
        self._head: dict[str, Any] = msgspec.json.decode(self._last[6:]) if start is not None else {}

    @property
    def is_followed(self) -> bool:
        """Whether the server tells ids, as far as that is known."""
        return self._follows is not False

    @property
    def can_go_on(self) -> bool:
        self._catch_up()
        return self.is_followed and not self._is_lost

    # What is asked for.

    def request_to(self, kind: str) -> PassedRequest | None:
        """Begins an attempt: returns what to send to a server of that kind; None if it cannot go on."""
        self._catch_up()
        if not self._last:
            self._forget()  # tokens without a text may have come
            self._kind = kind
            self._begin(kind, None)
            return self._whole() if kind in TELLING else self._passed
        if kind != self._kind:
            return None
        start = self._seam() if self._asked.is_extendable else (0, 0)
        limit = self._asked.limit(self._path, kind)
        if limit is UNSET or not start[0]:
            self._begin(kind, (0, 0))
            return self._whole()
        self._begin(kind, start)
        body = self._extended(start[0], limit)
        return msgspec.structs.replace(self._whole(), target=COMPLETIONS, body=body)

    def _whole(self) -> PassedRequest:
        """The request itself, which asks for ids. An encoded answer could not be read."""
        body, at = self._passed.body, self._opening
        if not self._asked.shows_ids:
            body = body[:at] + b'"return_token_ids":true,' + body[at:]
        headers = tuple([pair for pair in self._passed.headers if pair[0].lower() != "accept-encoding"])
        return msgspec.structs.replace(self._passed, body=body, headers=headers)

    def _extended(self, num_tokens: int, limit: int | None) -> bytes:
        """The body that asks for what follows the first tokens of the answer. `limit`: of the whole answer."""
        asked = self._asked
        fields = {name: getattr(asked, name) for name in Repeated.__struct_fields__}
        given = {name: value for name, value in fields.items() if value is not None}
        if asked.min_tokens:
            given["min_tokens"] = max(0, asked.min_tokens - num_tokens)
        ids = ",".join(map(str, self._tokens[:num_tokens])).encode()
        more = {
            "prompt": Raw(b"[" + self._prompt + b"," + ids + b"]"),
            "max_tokens": None if limit is None else limit - num_tokens,
            "temperature": 0,
            "stream": True,
            "return_token_ids": True,
        }
        return msgspec.json.encode(given | more)

    def _seam(self) -> tuple[int, int]:
        """Returns tokens and characters before the last seam that will do; zeros if there is none.

        A stop string that began before the seam must have been found before the break, and one that ended the answer
        must be found again. vLLM holds back as many characters as its longest stop string has but one, and errs about
        the text behind a prompt that ends inside a character; our own server holds back what may begin a stop string.
        """
        stops = self._asked.stops
        longest = max(map(len, stops), default=1) - 1
        is_vllm = self._kind == VLLM
        held = longest if is_vllm and not self._asked.include_stop_str_in_output else 0
        for seam in reversed(self._seams):
            fits = seam.is_settled or (not held and seam.first.isascii())
            if not is_vllm:
                fits &= seam.is_valid and not any(stop.startswith(seam.first) for stop in stops)
            is_inside = 0 < seam.num_tokens < len(self._tokens)
            num_again = self._num_chars - seam.num_chars - held
            if fits and is_inside and num_again >= longest + self._is_finished:
                return seam.num_tokens, seam.num_chars + held
        return 0, 0

    # What comes.

    def take(self, data: bytes) -> bytes:
        """Takes bytes of the attempt's stream. Returns what the client gets of them; with `error` set, nothing more."""
        if self._follows is False:
            return data
        *events, self._rest = (self._rest + data).split(b"\n\n")
        taken: list[bytes] = []
        try:
            for event in events:
                taken.append(self._take(event))
        except (BrokenOffError, DiffersError) as error:
            self.error = error
        out = b"".join(taken)
        is_other = self._follows is None and b"\r" in self._rest  # these servers end no line so
        if is_other or len(self._rest) > MAX_EVENT_BYTES:
            self._follows = False
        if self._follows is False:
            out, self._rest = out + self._rest, b""
        return out

    def _take(self, event: bytes) -> bytes:
        if self._follows is False or not event.startswith(DATA):
            self.is_over |= event == DONE
            return event + b"\n\n"
        if self._follows and self._start is None:
            hidden, num_lists = self._without_ids(event)
            if num_lists == 1 and not self._asked.shows_ids and _PLAIN.match(event):
                self._behind.append(event)
                if len(self._behind) == MAX_BEHIND:
                    self._catch_up()
                self._last = hidden
                return hidden + b"\n\n"
            self._catch_up()
        try:
            chunk = _read_chunk(event[6:])
        except (msgspec.DecodeError, RecursionError):
            return self._unread(event)
        if chunk.error is not None and self.can_go_on and _is_servers(chunk.error):
            raise BrokenOffError(str(chunk.error.get("message", "")))
        if len(chunk.choices) > 1 or chunk.error is not None:
            return self._unread(event)
        if not chunk.choices:
            was_counted, self._is_counted = self._is_counted, True
            return b"" if was_counted else self._written(event)
        if self._start is None:
            return self._first_time(event, chunk, chunk.choices[0])
        return self._again(event, chunk.choices[0])

    def _catch_up(self) -> None:
        """Reads the events that were passed on unread: most answers do not break off."""
        behind, self._behind = self._behind, []
        try:
            for event in behind:
                (choice,) = _read_chunk(event[6:]).choices
                self._count(choice)
                self._is_lost |= choice.token_ids is None
        except (msgspec.DecodeError, ValueError, RecursionError):
            self._is_lost = True

    def _count(self, choice: _Choice) -> str:
        """Counts an event of the first attempt. Returns its text."""
        text, tokens = self._text(choice), choice.token_ids or ()
        self._add(tokens, text, is_single=len(tokens) == 1)
        self._is_finished |= choice.finish_reason is not None
        return text

    def _unread(self, event: bytes) -> bytes:
        """Takes an event of which nothing is known. Raises DiffersError in a continuation."""
        if self._start is not None:
            raise DiffersError("the server answered what cannot be read")
        self._is_lost = True
        if self._follows is None:
            self._follows = False
        return event + b"\n\n"

    def _first_time(self, event: bytes, chunk: _Chunk, choice: _Choice) -> bytes:
        """Takes an event of the first attempt."""
        if self._follows is None:
            prompt = bytes(choice.prompt_token_ids) or bytes(chunk.prompt_token_ids)
            self._follows, self._prompt = prompt.startswith(b"["), prompt[1:-1]
            if not self._follows:  # a version that tells no ids
                return event + b"\n\n"
        text = self._count(choice)
        if not self._asked.shows_ids:
            event = self._hidden(event, chunk, choice)
            if not text and choice.finish_reason is None and self._is_only_ids(choice):
                return b""
        self._last = event
        return event + b"\n\n"

    def _text(self, choice: _Choice) -> str:
        """The text of an event. With something beside it no continuation would be exact."""
        delta = choice.delta
        if delta is None:
            return choice.text or ""
        if not delta.keys() <= _OF_TEXT and any(delta[name] for name in delta if name not in _OF_TEXT):
            self._is_lost = True
        content = delta.get("content")
        return content if isinstance(content, str) else ""

    def _hidden(self, event: bytes, chunk: _Chunk, choice: _Choice) -> bytes:
        """The event as the server sends it to a client that asks for no ids."""
        num_lists = int(choice.token_ids is not None)
        for prompt in (chunk.prompt_token_ids, choice.prompt_token_ids):
            num_lists += bytes(prompt).startswith(b"[") if prompt else 0
        hidden, num_found = self._without_ids(event)
        if num_found == num_lists:
            return hidden
        found = msgspec.json.decode(
            event[6:]
        )  # another field has such a name, or the lists are written otherwise
        for fields in (found, found["choices"][0]):
            self._show(fields, "prompt_token_ids", None)
            self._show(fields, "token_ids", None)
        return b"data: " + msgspec.json.encode(found)

    def _without_ids(self, event: bytes) -> tuple[bytes, int]:
        """Replaces lists of ids, and returns how many there were."""
        num_lists = 0
        for key in _IDS:
            while (at := event.find(key + b"[")) >= 0 and (end := event.find(b"]", at)) >= 0:
                event = event[:at] + (key + b"null" if self._kind == VLLM else b"") + event[end + 1 :]
                num_lists += 1
        return event, num_lists

    def _is_only_ids(self, choice: _Choice) -> bool:
        """Whether an event without text comes only since ids were asked for."""
        if self._kind == VLLM:  # a parser took the text
            self._is_lost |= choice.delta == {}
            return choice.delta == {}
        return not choice.delta

    def _add(self, tokens: Sequence[int], text: str, *, is_single: bool) -> None:
        """Counts what is sent for the first time. `is_single`: by an event of one token."""
        if text:
            is_valid = _UNREADABLE not in (self._end, text[0])
            self._seams.append(_Seam(len(self._tokens), self._num_chars, self._is_settled, text[0], is_valid))
            self._num_chars, self._end = self._num_chars + len(text), text[-1]
        self._is_settled = is_single and bool(text)
        self._tokens.extend(tokens)

    def _again(self, event: bytes, choice: _Choice) -> bytes:
        """Takes an event of a later attempt."""
        self._follows = True
        tokens, text = self._new(choice.token_ids or (), self._text(choice))
        is_last = choice.finish_reason is not None
        if is_last:
            if self._tokens_in < len(self._tokens):
                raise DiffersError("the server's answer ends sooner")
            if self._is_finished:
                return b""
            self._is_finished = True
        is_event = text or is_last or (tokens and (self._asked.shows_ids or self._kind == VLLM))
        return self._written(event, tokens, text) if is_event else b""

    def _new(self, tokens: Sequence[int], text: str) -> tuple[Sequence[int], str]:
        """Leaves out what came before the break. Raises DiffersError if it is not the same."""
        known = self._tokens[self._tokens_in : self._tokens_in + len(tokens)]
        new_tokens, new_text = tokens[len(known) :], text[max(0, self._num_chars - self._chars_in) :]
        if known.tolist() != list(tokens[: len(known)]):
            raise DiffersError("the server's tokens are others")
        self._tokens_in += len(tokens)
        self._chars_in += len(text)
        self._add(new_tokens, new_text, is_single=len(tokens) == 1)
        return new_tokens, new_text

    # How it is written.

    def _written(self, event: bytes, tokens: Sequence[int] = (), text: str = "") -> bytes:
        """An event in the form of the stream that broke off; `tokens` and `text`: what is new of it."""
        start = self._start
        if start is None:
            return event + b"\n\n"
        found = msgspec.json.decode(event[6:])
        for name in ("id", "object", "created", "model"):
            found[name] = self._head[name]
        if (usage := found.get("usage")) is not None:
            usage["prompt_tokens"] -= start[0]
            usage["completion_tokens"] += start[0]
            details = usage.get("prompt_tokens_details")
            if details and type(details.get("cached_tokens")) is int:
                details["cached_tokens"] = min(details["cached_tokens"], usage["prompt_tokens"])
        if not found["choices"]:
            return b"data: " + msgspec.json.encode(found) + b"\n\n"
        choice = found["choices"][0]
        if self._path == CHAT:
            choice = self._of_chat(choice, text)
        else:
            choice["text"] = text
        self._show(choice, "prompt_token_ids", None)
        self._show(choice, "token_ids", list(tokens) if self._asked.shows_ids else None)
        found["choices"] = [choice]
        self._last = b"data: " + msgspec.json.encode(found)
        return self._last + b"\n\n"

    def _of_chat(self, choice: dict[str, Any], text: str) -> dict[str, Any]:
        """A choice of either endpoint as one of a chat."""
        is_vllm, reason = self._kind == VLLM, choice["finish_reason"]
        delta = {"content": text} if text or is_vllm else {}
        written = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        if is_vllm and reason is not None:
            written["stop_reason"] = choice.get("stop_reason")
        return written | {"token_ids": None}

    def _show(self, fields: dict[str, Any], name: str, ids: list[int] | None) -> None:
        """Replaces ids of tokens, if there are some; None: the client sees none."""
        if name not in fields:
            return
        if ids is None and self._kind != VLLM:
            del fields[name]
        else:
            fields[name] = ids


_UNREADABLE = "\ufffd"
_OF_TEXT = frozenset(("role", "content"))


def _is_servers(error: dict[str, Any]) -> bool:
    """Whether an error event tells of the server's failure, not of the request's."""
    code = error.get("code")
    return (type(code) is int and code >= 500) or error.get("type") == "server_error"
