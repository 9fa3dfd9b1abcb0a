"""In which form KV travels: encoded where the link, not computing, would be waited for.

`cost.transfer` says by which codec KV is there first; here are the links, and what they carry already.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from isthmus.core.attempts import FetchOrder
from isthmus.core.conductor.copies import ClusterLink
from isthmus.core.conductor.rules import Rules
from isthmus.core.conductor.view import NodeView, Placement, RequestView
from isthmus.core.cost.transfer import INT8, NONE, Transfer, choose_codec
from isthmus.core.types import NS_PER_S


def encoded(
    rules: Rules, request: RequestView, placement: Placement, kv_bytes: int, now: int
) -> tuple[FetchOrder | None, str]:
    """A placement's fetch with its codec, and the codec of its hand-over of so many bytes: a state is not encoded."""
    prefill, decode, fetch = placement.prefill, placement.decode, placement.fetch
    if fetch is not None and placement.source is not None:
        rate = _rate(placement.source, prefill, placement.across, now)
        # It begins at once, and is waited for when what is not cached is computed.
        computing = prefill.prefill_ns(request.arrived.num_tokens, placement.cached)
        waiting = placement.ttft_ns - placement.work_ns
        codecs = rules.codecs
        if prefill.state_blocks:  # a recurrent state comes along, whose bytes no codec of numbers fits
            codecs = tuple([name for name in codecs if name != INT8])
        codec = _choose(codecs, prefill, placement.fetch_bytes, rate, waiting + computing)
        fetch = replace(fetch, codec=codec)
    if decode is prefill:
        return fetch, NONE
    computing, link, rails = placement.work_ns, request.across, (prefill.paths, decode.paths)
    if link is not None:
        # Hand-overs share it in turn: it is waited for when what it owes to others takes longer than the computing
        # that this one streams behind.
        rates = [each for paths in rails if (each := paths.handover or paths.network)]
        rate = min([link.bytes_per_s, *rates])
        computing = max(0, computing - int((link.owed - request.owed) * NS_PER_S / link.bytes_per_s))
    elif all(paths.handover for paths in rails):
        rate = min(paths.handover for paths in rails)
    else:
        rate = _rate(prefill, decode, None, now)
    return fetch, _choose(rules.codecs, prefill, kv_bytes, rate, computing)


def _rate(source: NodeView, target: NodeView, across: ClusterLink | None, now: int) -> float:
    """What other copies leave of the links between two caches, in bytes per second; 0 when nobody knows."""
    rate = min(source.paths.network, target.paths.network)
    if not rate:
        return 0.0
    left = rate / (source.link_out.stretch(now) * target.link_in.stretch(now))
    return left if across is None else min(left, across.bytes_per_s / across.stretch(now))


def _choose(codecs: Sequence[str], node: NodeView, num_bytes: int, rate: float, compute_ns: int) -> str:
    if not node.kv_dtype or rate <= 0:
        return NONE
    transfer = Transfer(num_bytes, node.cost.num_layers, rate, compute_ns)
    return choose_codec(transfer, codecs, node.cost.handling.speeds(node.kv_dtype, node.block_size))
