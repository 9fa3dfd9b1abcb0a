"""Recorded exchanges: a body, what the cluster says to it, and the whole answer, as JSON on one line.

An exchange has these members, of which `path` and the outcome alone are always there:

    rule        what it shows
    method, path, body, raw, headers     the request; `raw` in place of `body`: bytes as Latin-1
    says        what the backend says to each job, or to all: `text` (with <eos> where its `end` is "stop") or `tokens`,
                `per_batch`, `top` (log-probabilities), `cached`, `reused`, `scores` (of the prompt, see `fake.scored`),
                `then` ("hang", or an error with its arguments); or `refuses`: the error of `submit`. Left out: hello
    status      of the answer, 200 if left out; `told`: headers of it that say something
    answer      of a whole answer, the JSON, in whose message … stands for what other people's libraries say
    events      of a stream, and `each`: what all of them have
    max_length  of the model's context, 256 if left out
    untyped     where what is repeated of the request is no type of OpenAI's client
    jobs        of each job what is not as usual, its prompt as text

Ids that are new in each answer are written `ID` and `call_0`, `call_1`, ...; times are 0.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import msgspec

from isthmus.core import errors
from isthmus.core.types import FinishReason, Job, RequestId, Reused, Sampling

from . import folder
from .fake import HANG, Script, Step, says, scored, with_logprobs

_TOLD = ("x-isthmus-note", "retry-after", "accept-encoding")
FOLDER = Path(__file__).parent / "recorded"
_USUAL = json.loads(msgspec.json.encode(Job(RequestId(""), (), 0, Sampling())))
_NEW = re.compile(r"[0-9a-f]{32}|call_[0-9a-f]{24}(?![0-9a-f])")
_TIME = re.compile(r'"(created|created_at|completed_at|time_s)":[0-9.]+')


def exchanges(*, wires: bool) -> dict[str, dict[str, Any]]:
    """All of a kind, by a name that says where each stands: of wires, or of what people's clients sent."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted((FOLDER / "wires" if wires else FOLDER).glob("*.json")):
        for at, each in enumerate(json.loads(path.read_text())["requests"]):
            found[f"{path.stem}-{at}-{each.get('rule', '')}".rstrip("-")] = each
    return found


def script(said: Any) -> Script:
    """What `says` of an exchange stands for."""

    def steps(job: Job) -> Iterable[Step]:
        one = said[int(job.request.rpartition("-")[2])] if isinstance(said, list) else said
        if "refuses" in one:
            raise _error(*one["refuses"])
        end = FinishReason(one["end"]) if one.get("end") else None
        closing = [folder.EOS] if end is FinishReason.STOP else []
        tokens = one["tokens"] if "tokens" in one else [*folder.byte_tokens(one.get("text", "")), *closing]
        reused = Reused(*one["reused"]) if "reused" in one else None
        made = says(
            tokens,
            end,
            per_batch=one.get("per_batch", 1),
            cached_tokens=one.get("cached", 0),
            reused=reused,
        )
        if "top" in one:
            made = with_logprobs(made, one["top"])
        if "scores" in one:
            made = scored(made, job)
        if "then" in one:
            made = [*made, HANG if one["then"] == "hang" else _error(*one["then"])]
        return made

    return steps


def _error(name: str, message: str, options: dict[str, Any]) -> Exception:
    kind = getattr(errors, name, None) or {"RuntimeError": RuntimeError, "ValueError": ValueError}[name]
    made: Exception = kind(message, **options)
    return made


def outcome(response: httpx.Response, jobs: list[Job] | None, *, seeded: bool = False) -> dict[str, Any]:
    """Status, answer and, where `jobs` are given, these; as an exchange has them. `seeded`: with their seeds."""
    calls: dict[str, str] = {}

    def named(found: re.Match[str]) -> str:
        is_call = found[0].startswith("call_")
        return calls.setdefault(found[0], f"call_{len(calls)}") if is_call else "ID"

    text = _TIME.sub(r'"\1":0', _NEW.sub(named, response.text))
    shown: dict[str, Any] = {}
    if response.status_code != 200:
        shown["status"] = response.status_code
    if told := {name: response.headers[name] for name in _TOLD if name in response.headers}:
        shown["told"] = told
    if response.headers.get("content-type", "").startswith("text/event-stream"):
        shown |= _events(text)
    else:
        shown["answer"] = json.loads(text) if text.startswith(("{", "[")) else text
    if jobs is not None:
        shown["jobs"] = [_unusual(job, seeded) for job in jobs]
    return shown


def _events(text: str) -> dict[str, Any]:
    """The events of a stream, and what all of them have in common."""
    *blocks, rest = text.split("\n\n")
    assert rest == ""
    events: list[Any] = []
    for block in blocks:
        *name, data = block.split("\n")
        body = data.removeprefix("data: ")
        events.append("[DONE]" if body == "[DONE]" else json.loads(body))
        assert name == ([f"event: {events[-1]['type']}"] if name else [])
    whole = [event for event in events if isinstance(event, dict)]
    each = {
        key: value
        for key, value in whole[0].items()
        if len(whole) > 1 and all(key in e and e[key] == value for e in whole)
    }
    return {
        "each": each,
        "events": [
            {k: v for k, v in event.items() if k not in each} if isinstance(event, dict) else event
            for event in events
        ],
    }


def _unusual(job: Job, seeded: bool) -> dict[str, Any]:
    """What of a job is not as usual; a grammar is only there or not."""
    made = json.loads(msgspec.json.encode(job))
    shown = {name: value for name, value in made.items() if value != _USUAL[name]}
    del shown["request"], shown["tokens"]
    sampling = {name: value for name, value in made["sampling"].items() if value != _USUAL["sampling"][name]}
    if "grammar" in sampling:
        sampling["grammar"] = True
    if not seeded:
        sampling.pop("seed", None)
    return {"prompt": prompt_of(job), **shown, "sampling": sampling}


def prompt_of(job: Job) -> str:
    """The prompt as text, special tokens spelled out."""
    special = {folder.HE: b"he", folder.BOS: b"<bos>", folder.EOS: b"<eos>"}
    raw = b"".join(bytes([token]) if token < 256 else special.get(token, b"<?>") for token in job.tokens)
    return raw.decode(errors="backslashreplace")
