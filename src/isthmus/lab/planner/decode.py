"""What a node decodes at once, alone or with its KV on nodes of role attention."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from functools import partial

import msgspec

from isthmus.core.cost import compile_cost, offload
from isthmus.core.cost.pooled import Pooled
from isthmus.core.errors import ConfigError
from isthmus.core.types import NS_PER_S
from isthmus.facts import NodeFacts
from isthmus.lab.planner.fleet import AttentionPool, step_s


class LargestBatch(msgspec.Struct, frozen=True):
    """What an instance decodes at once: the largest batch whose step, of `step_s`, is inside the limit on TBT."""

    size: int
    step_s: float
    binds: str


def pooled(decode: NodeFacts, attending: AttentionPool) -> Pooled:
    """A decode node and its share of the attention nodes. What both sides' links bear, the narrower one's do."""
    there = attending.facts
    return Pooled(
        compile_cost(decode.cost),
        compile_cost(there.cost),
        attending.share,
        min(decode.rates.network, attending.share * there.rates.network),
        decode.rates.rtt_ns / NS_PER_S,
    )


def turns_of(decode: NodeFacts) -> int:
    """Batches that take turns on one copy of the layers: with more than two nothing is quicker there."""
    return min(decode.batches, 2)


def decode_batch(
    decode: NodeFacts, context: float, tbt_ms: int | None, attending: AttentionPool | None = None
) -> LargestBatch:
    """BS_max and T_decode of equation (5), of sequences with `context` tokens each, whose KV `attending` hold if given.

    Raises ConfigError if not even one sequence meets the limit or fits the memory, and where steps take no time.
    """
    cost = compile_cost(decode.cost)
    kv_tokens: float = decode.kv_blocks * decode.block_size
    took: Callable[[int], float] = partial(step_s, decode, context=context)
    if attending is not None:
        took = partial(pooled(decode, attending).step_s, context=context, turns=turns_of(decode))
        kv_tokens = attending.share * attending.facts.kv_blocks * attending.facts.block_size
    fit = int(kv_tokens / context)  # their live states have room of their own
    if not fit:
        room = f"{kv_tokens * cost.kv_token_bytes / 1e9:.1f} GB"
        raise ConfigError(
            f"engine.kv_memory: {room} hold no sequence of {context:,.0f} tokens; give nodes more"
        )
    one_s = took(1)
    if not step_s(decode, 1, context):
        raise ConfigError(
            "cost: the profile of the nodes that decode says nothing of decode; give it decode_points or decode_fixed_s"
        )
    most = min(decode.max_sequences, fit)
    if attending is None:
        size = offload.largest_batch(cost, context, most, tbt_ms)
    else:
        size = most if tbt_ms is None else bisect_right(range(1, most + 1), tbt_ms / 1000, key=took)
    if not size:
        raise ConfigError(
            f"slo.tbt_ms: a step of one sequence of {context:,.0f} tokens takes {1000 * one_s:.1f} ms, "
            f"above the limit of {tbt_ms} ms"
        )
    binds = "slo.tbt_ms" if size < most else "max_sequences" if most == decode.max_sequences else "kv_memory"
    return LargestBatch(size, took(size), binds)
