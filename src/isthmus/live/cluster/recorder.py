"""The flight recorder of conductor and nodes: every event and its actions as one JSON line, and their replay.

Recordings are passed on, so they name no tenant: conductor and nodes know tenants by opaque names only.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from io import BufferedWriter
from pathlib import Path
from typing import Any

import blake3
import msgspec

from isthmus.core.conductor import Conductor, Event, Rules
from isthmus.core.conductor.events import RECORDING_FORMAT
from isthmus.core.errors import ConfigError
from isthmus.core.node.events import Event as NodeEvent
from isthmus.core.scheduler import BlockPool, Run
from isthmus.facts import NodeFacts, make_known, own_names
from isthmus.live.cluster.private import private

log = logging.getLogger(__name__)


def opaque(tenant: str, secret: str) -> str:
    """Returns an opaque name of a tenant, the same for the same `secret` of a cluster; "" for no tenant."""
    if not tenant:
        return ""
    key = blake3.blake3(secret.encode(), derive_key_context="isthmus recordings: names of tenants").digest()
    return blake3.blake3(tenant.encode(), key=key).hexdigest(length=8)


class RecordingHeader(msgspec.Struct, frozen=True, omit_defaults=True):
    """First line of a recording: the conductor's `rules`, or a `node`'s facts and its transfer timeout."""

    format: int
    rules: Rules | None = None
    node: NodeFacts | None = None
    transfer_ns: int = 0

    def subject(self) -> Callable[[Any, int], Sequence[Any]]:
        """Returns a new decider like the recorded one: event and time in, actions out."""
        if self.node is None:
            assert self.rules is not None
            return Conductor(self.rules).on
        return self.node.node_of(BlockPool(self.node.kv_blocks), transfer_ns=self.transfer_ns).on


class Line(msgspec.Struct, frozen=True):
    """One line of a recording, undecoded for comparison."""

    at_ns: int
    event: msgspec.Raw
    actions: msgspec.Raw


class Recorder:
    """Appends to a file; each line is written at once, so a crash loses at most the line under way."""

    def __init__(self, path: Path, header: RecordingHeader) -> None:
        try:
            self._file: BufferedWriter = open(path, "wb", opener=private)  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"record: cannot write {path}: {error.strerror}") from None
        self._write(_ENCODER.encode(header))

    def record(self, at_ns: int, event: Any, actions: Sequence[Any]) -> None:
        """Writes an event and its actions at once, since a run changes later."""
        self._write(_ENCODER.encode({"at_ns": at_ns, "event": event, "actions": actions}))

    def close(self) -> None:
        self._file.close()

    def _write(self, line: bytes) -> None:
        self._file.write(line + b"\n")
        self._file.flush()


class LiveRecorder(Recorder):
    """A recorder whose recording ends, and not the cluster, when the disk is full."""

    _is_over = False

    def record(self, at_ns: int, event: Any, actions: Sequence[Any]) -> None:
        if not self._is_over:
            try:
                super().record(at_ns, event, actions)
            except OSError as error:
                log.error("the flight recording %s ends here: %s", self._file.name, error.strerror)
                self.close()

    def close(self) -> None:
        self._is_over = True
        with contextlib.suppress(OSError):  # it writes what it could not
            super().close()


def node_recorder(path: Path, facts: NodeFacts, transfer_s: float, start: int = 1) -> Recorder:
    """Returns the recorder of a node's `start`-th start, with a file beside the conductor's at `path`."""
    header = RecordingHeader(RECORDING_FORMAT, node=facts, transfer_ns=int(transfer_s * 1e9))
    number = f".{start}" if start > 1 else ""
    return LiveRecorder(path.with_suffix(f".{facts.node}{number}{path.suffix}"), header)


def _plain(value: Any) -> Any:
    if isinstance(value, Run):
        return {"type": "Run", "steps": value.steps, "num_decodes": value.num_decodes, "pieces": value.pieces}
    raise NotImplementedError(f"{type(value).__name__} cannot be written down")


_ENCODER = msgspec.json.Encoder(enc_hook=_plain)


def read(path: Path) -> tuple[RecordingHeader, Sequence[bytes]]:
    """Returns the header of a recording, and its other lines. Raises ConfigError for another format."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if not lines:
        raise ConfigError(f"{path}: empty; a recording starts with a header line")
    try:
        header = msgspec.json.decode(lines[0], type=RecordingHeader)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: line 1 is no recording header: {error}") from None
    if header.format != RECORDING_FORMAT:
        raise ConfigError(f"{path}: recording format {header.format}; this version reads {RECORDING_FORMAT}")
    if (header.rules is None) == (header.node is None):
        raise ConfigError(f"{path}: line 1 is no recording header: it names neither rules nor a node, or both")
    return header, lines[1:]


class Difference(msgspec.Struct, frozen=True):
    """The first line at which a replay decided otherwise; texts are JSON."""

    line: int
    event: str
    recorded: str
    replayed: str


def replay(path: Path, own: Sequence[str] = ()) -> tuple[int, Difference | None]:
    """Feeds a recording to a new conductor or node. Returns (events replayed, first difference or None).

    `own`: the user's own policies that may be run, since a recording may come from anybody. Raises ConfigError that
    names the line that cannot be read.
    """
    header, lines = read(path)
    if header.rules is not None:
        for option, name, _ in own_names(header.rules):
            if name not in own:
                raise ConfigError(
                    f"{path}: line 1: {option} {name!r} is one of your own; if it may be run, give --policy {name}"
                )
        make_known(header.rules)
    decide = header.subject()
    line_of = msgspec.json.Decoder(Line).decode
    event_of: Callable[[bytes], Any] = msgspec.json.Decoder(Event if header.node is None else NodeEvent).decode
    for number, text in enumerate(lines, start=2):
        try:
            line = line_of(text)
            event = event_of(line.event)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: line {number} cannot be read: {error}") from None
        replayed = _ENCODER.encode(decide(event, line.at_ns))
        if replayed != bytes(line.actions):
            texts = (bytes(line.event), bytes(line.actions), replayed)
            return number - 1, Difference(number, *[text.decode() for text in texts])
    return len(lines), None
