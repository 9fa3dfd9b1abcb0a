"""The time of moving KV to another node, and the codec by which it arrives first.

KV leaves layer by layer while it is computed; each layer is sealed, encoded and sent, then received, decoded and
checked, at the same time as others. The slowest stage sets the time (for computing and sending: Mooncake, arXiv
2407.00079, section 5.2), and both ends handle the last layer after it:

    out     bytes / encode + layers * send_layer + bytes * kept * send            at the sender; without codec kept is 1
    into    bytes / decode + layers * receive_layer + bytes * kept * receive      at the receiver
    usable  max(compute, out, bytes * kept / link, into) + (out + into) / layers + message

The last layer's time on the link is left out, so no codec is ever chosen while computing, not the link, sets the time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import msgspec

from isthmus.core.errors import ConfigError
from isthmus.core.types import NS_PER_S

NONE, ZSTD, INT8 = "none", "zstd", "int8"


class Transfer(msgspec.Struct, frozen=True):
    """KV that goes from one node to another. `compute_ns`: until its last layer is computed, 0 if it is already;
    `link_bytes_per_s`: the rate left for it, above 0."""

    num_bytes: int
    num_layers: int
    link_bytes_per_s: float
    compute_ns: int = 0


class CodecSpeed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A codec on one core. `kept`: bytes sent for a byte of KV; speeds count bytes of KV. Raises ConfigError for a
    value not above 0."""

    kept: float
    encode_bytes_per_s: float
    decode_bytes_per_s: float

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"cost curve: handling: {name} of a codec must be a number above 0")


# One core of an Intel Xeon of 2023 (AVX-512), shared with other work, November 2026; `isthmus.live.engine.codecs`,
# native kernels, KV of a trained Llama of 3 million parameters (bfloat16), of benchmarks' random Llama models and of
# normal numbers, which differ by less than 2 % in `kept`. (kept by zstd, its encoding, its decoding, int8's encoding
# and decoding; bytes per second)
_MEASURED = {
    "bfloat16": (0.665, 1.1e9, 2.2e9, 3.0e9, 4.0e9),
    "float16": (0.846, 1.2e9, 1.8e9, 3.0e9, 3.0e9),
    "float32": (0.832, 1.7e9, 3.1e9, 5.0e9, 9.0e9),
}
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def codec_speeds(dtype: str, block_size: int) -> dict[str, CodecSpeed]:
    """Every codec but `none`, lossless ones first. int8 sends a byte for each number and 2 for each channel of a
    block."""
    kept, encode, decode, quantise, dequantise = _MEASURED[dtype]
    int8_kept = (block_size + 2) / (block_size * _DTYPE_BYTES[dtype])
    return {ZSTD: CodecSpeed(kept, encode, decode), INT8: CodecSpeed(int8_kept, quantise, dequantise)}


class Handling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of a node's processor for KV beside the engine, for each byte, and each layer of a piece that it is sent
    in; 0 if not measured. Raises ConfigError for a bad value."""

    load_byte_s: float = 0.0
    """Copying from the cache in DRAM to the engine's memory."""
    save_byte_s: float = 0.0
    """Copying the other way, and sealing."""
    send_layer_s: float = 0.0
    send_byte_s: float = 0.0
    """Sealing, and giving to a session with another node."""
    receive_layer_s: float = 0.0
    receive_byte_s: float = 0.0
    """Taking from the session into place, and checking the seal."""
    message_s: float = 0.0
    """Of a message to another node that does not wait for KV."""
    shares_core: bool = False
    """The engine's threads leave no core free, so the engine waits for all handling of KV."""
    zstd: CodecSpeed | None = None
    int8: CodecSpeed | None = None
    """Measured codecs; None: those of `codec_speeds`."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if name.endswith("_s") and not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"cost curve: handling: {name} must be a number, 0 or more")

    def speeds(self, dtype: str, block_size: int) -> dict[str, CodecSpeed]:
        measured = {ZSTD: self.zstd, INT8: self.int8}
        return {name: measured[name] or speed for name, speed in codec_speeds(dtype, block_size).items()}

    def narrowed(self, bytes_per_s: int) -> int:
        """The rate of a link with this node at one end, since all its bytes pass through one core."""
        slowest = max(self.send_byte_s, self.receive_byte_s)
        return min(bytes_per_s, round(1 / slowest)) if slowest else bytes_per_s

    def computed_s(self, *, leaves: bool, saved: bool) -> tuple[float, float]:
        """Seconds that the engine waits (for each layer of a chunk, for each computed byte of KV) if the KV goes to
        another node or to the cache."""
        if not self.shares_core:
            return 0.0, 0.0
        return leaves * self.send_layer_s, leaves * self.send_byte_s + saved * self.save_byte_s


UNKNOWN = Handling()


def after_ns(
    num_bytes: int,
    num_layers: int,
    took_ns: int,
    speed: CodecSpeed | None,
    source: Handling = UNKNOWN,
    target: Handling = UNKNOWN,
) -> int:
    """Nanoseconds from the last byte of KV leaving the link until the other end can use it. `num_bytes`: of the KV
    itself; `took_ns`: to compute it and cross the link; `speed`: of its codec, None if it is not encoded."""
    kept, out, into = 1.0, 0, 0
    if speed is not None:
        kept = speed.kept
        out, into = _ns(num_bytes, speed.encode_bytes_per_s), _ns(num_bytes, speed.decode_bytes_per_s)
    out += int((num_layers * source.send_layer_s + num_bytes * kept * source.send_byte_s) * NS_PER_S)
    into += int((num_layers * target.receive_layer_s + num_bytes * kept * target.receive_byte_s) * NS_PER_S)
    return max(0, max(out, into) - took_ns) + (out + into) // num_layers + int(source.message_s * NS_PER_S)


def arrival_ns(transfer: Transfer, speed: CodecSpeed | None) -> int:
    """Nanoseconds from the start of computing until the KV can be used at the other end; `speed` None: not encoded.
    Only codecs count of the handling, since the rest is equal for all of them."""
    size = transfer.num_bytes * (1.0 if speed is None else speed.kept)
    took = max(transfer.compute_ns, _ns(size, transfer.link_bytes_per_s))
    return took + after_ns(transfer.num_bytes, transfer.num_layers, took, speed)


def choose_codec(transfer: Transfer, allowed: Collection[str], speeds: Mapping[str, CodecSpeed]) -> str:
    """The codec by which the KV arrives first; of equals `none`, then the first in `speeds`."""
    best, earliest = NONE, arrival_ns(transfer, None)
    for name, speed in speeds.items():
        if name in allowed and (arrival := arrival_ns(transfer, speed)) < earliest:
            best, earliest = name, arrival
    return best


def _ns(num_bytes: float, bytes_per_s: float) -> int:
    return int(num_bytes * NS_PER_S / bytes_per_s)
