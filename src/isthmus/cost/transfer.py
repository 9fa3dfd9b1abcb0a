"""When KV is at the node that will use it, and by which codec it is there first.

KV leaves layer by layer while it is computed, each layer is encoded, sent and decoded while others are, and each
of the four steps has a resource of its own. So the slowest sets the time (for computing and sending: Mooncake,
arXiv 2407.00079, section 5.2); what a codec adds beyond that is encoding the last layer and decoding it:

    none    max(compute, bytes / link)
    codec   max(compute, bytes / encode, bytes * kept / link, bytes / decode)
            + (bytes / encode + bytes / decode) / layers

The last layer's time on the link is left out of both. A codec makes it shorter, so the formula is, if anything,
unfair to codecs; in return no codec is ever chosen while computing, and not the link, sets the time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from isthmus.types import NS_PER_S

NONE, ZSTD, INT8 = "none", "zstd", "int8"


class Transfer(msgspec.Struct, frozen=True):
    """KV that goes from one node to another. `compute_ns`: until its last layer is computed, 0 if it is already.

    `link_bytes_per_s`: what is left of the link for it, above 0.
    """

    num_bytes: int
    num_layers: int
    link_bytes_per_s: float
    compute_ns: int = 0


class CodecSpeed(msgspec.Struct, frozen=True):
    """What a codec does on one core. `kept`: bytes sent for a byte of KV; speeds count bytes of KV too."""

    kept: float
    encode_bytes_per_s: float
    decode_bytes_per_s: float


# One core of an Intel Xeon of 2023 (AVX-512), shared with other work, November 2026; `isthmus.engine.codecs`, native
# kernels, KV of a trained Llama of 3 million parameters (bfloat16), of benchmarks' random Llama models and of normal
# numbers, which differ by less than 2 % in `kept`. (kept by zstd, its encoding, its decoding, int8's encoding and
# decoding; bytes per second)
_MEASURED = {
    "bfloat16": (0.665, 1.1e9, 2.2e9, 3.0e9, 4.0e9),
    "float16": (0.846, 1.2e9, 1.8e9, 3.0e9, 3.0e9),
    "float32": (0.832, 1.7e9, 3.1e9, 5.0e9, 9.0e9),
}
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def codec_speeds(dtype: str, block_size: int) -> dict[str, CodecSpeed]:
    """Of every codec but `none`, lossless ones first. int8 sends a byte a number, and 2 a channel of each block."""
    kept, encode, decode, quantise, dequantise = _MEASURED[dtype]
    int8_kept = (block_size + 2) / (block_size * _DTYPE_BYTES[dtype])
    return {ZSTD: CodecSpeed(kept, encode, decode), INT8: CodecSpeed(int8_kept, quantise, dequantise)}


def arrival_ns(transfer: Transfer, speed: CodecSpeed | None) -> int:
    """Time from the start of computing until the KV can be used at the other end; None: not encoded."""
    size = transfer.num_bytes
    if speed is None:
        return max(transfer.compute_ns, _ns(size, transfer.link_bytes_per_s))
    encode, decode = _ns(size, speed.encode_bytes_per_s), _ns(size, speed.decode_bytes_per_s)
    wire = _ns(size * speed.kept, transfer.link_bytes_per_s)
    return max(transfer.compute_ns, encode, wire, decode) + (encode + decode) // transfer.num_layers


def choose_codec(transfer: Transfer, allowed: Collection[str], speeds: Mapping[str, CodecSpeed]) -> str:
    """The codec by which the KV arrives first; of equals `none`, then the first in `speeds`."""
    best, earliest = NONE, arrival_ns(transfer, None)
    for name, speed in speeds.items():
        if name in allowed and (arrival := arrival_ns(transfer, speed)) < earliest:
            best, earliest = name, arrival
    return best


def _ns(num_bytes: float, bytes_per_s: float) -> int:
    return int(num_bytes * NS_PER_S / bytes_per_s)
