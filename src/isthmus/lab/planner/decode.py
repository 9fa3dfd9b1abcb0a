"""Whether it pays that attention nodes hold the KV: a decode node with its share of them, against decode nodes alone.

Both sides cost as nearly the same as whole accelerators allow, and decode sequences of one length in the largest
batches that memory, `slo.tbt_ms` and `max_sequences` allow. What counts is tokens for the price. Without attention
nodes the accelerators are those of the decode node, grouped as is best.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from functools import partial

import msgspec

from isthmus.core.cost import Analytic, compile_cost, offload
from isthmus.core.cost.pooled import Pooled, is_compute_bound
from isthmus.core.errors import ConfigError
from isthmus.core.types import NS_PER_S
from isthmus.facts import NodeFacts
from isthmus.lab.planner import answer as say
from isthmus.lab.planner.fleet import AttentionPool, Fleet, step_s

_S_PER_HOUR = 3600
"""Prices are of an hour."""


def offload_of(fleet: Fleet, context: float) -> say.AttentionOffload | None:
    """For sequences of so many tokens; None without attention nodes. Raises ConfigError where no sequence fits."""
    attending = fleet.home.attending
    if attending is None:
        return None
    elsewhere = _elsewhere(fleet, attending, context)
    sides, problem = (
        [],
        ConfigError("roles.decode: without attention nodes the same price buys none for the weights"),
    )
    for copies, facts in attending.alone:
        try:
            sides.append(_alone(fleet, attending, context, copies, facts))
        except ConfigError as error:
            problem = error
    if not sides:
        raise problem
    alone = max(sides, key=lambda side: side.per_price)
    ratio = elsewhere.per_price / alone.per_price
    return say.AttentionOffload(elsewhere, alone, ratio, _reason(elsewhere, alone, ratio))


def _elsewhere(fleet: Fleet, attending: AttentionPool, context: float) -> say.BudgetSide:
    decode = fleet.home.decode
    batch = decode_batch(decode, context, fleet.tbt_ms, attending)
    found = pooled(decode, attending)
    rate, turns = batch.size / batch.step_s, min(turns_of(decode), batch.size)
    price = attending.decode_price + attending.share * attending.price
    return say.BudgetSide(
        nodes=f"{_named(1, decode)} + {_named(attending.share, attending.facts)}",
        price=price,
        batch=batch.size,
        step_ms=1000 * batch.step_s,
        rate=rate,
        per_price=_S_PER_HOUR * rate / price,
        binds=batch.binds,
        turns=turns,
        compute_bound=is_compute_bound(found.model, -(-batch.size // turns)),
    )


def _alone(
    fleet: Fleet, attending: AttentionPool, context: float, copies: int, facts: NodeFacts
) -> say.BudgetSide:
    batch = decode_batch(facts, context, fleet.tbt_ms)
    rate = copies * batch.size / batch.step_s
    price = copies * attending.decode_price * _gpus(facts) / _gpus(fleet.home.decode)
    return say.BudgetSide(
        nodes=_named(copies, facts),
        price=price,
        batch=copies * batch.size,
        step_ms=1000 * batch.step_s,
        rate=rate,
        per_price=_S_PER_HOUR * rate / price,
        binds=batch.binds,
        turns=1,
        compute_bound=is_compute_bound(compile_cost(facts.cost), batch.size),
    )


def _gpus(facts: NodeFacts) -> int:
    return facts.cost.num_gpus if isinstance(facts.cost, Analytic) else 1


def _named(count: float, facts: NodeFacts) -> str:
    if not isinstance(facts.cost, Analytic):
        return f"{count:g} {facts.role} nodes"
    group = f" x {facts.cost.num_gpus}" if facts.cost.num_gpus > 1 else ""
    return f"{count:g}{group} {facts.cost.hardware.name}"


def _reason(elsewhere: say.BudgetSide, alone: say.BudgetSide, ratio: float) -> str:
    times = f"{elsewhere.batch / alone.batch:.2f} times the batch"
    if ratio > 1 and alone.compute_bound:
        return "Compute-bound on either side, but attention elsewhere takes none of its time."
    if ratio > 1:
        return f"Memory-bound alone: {times}, for which weights are read as often."
    if elsewhere.compute_bound:
        return f"Compute-bound: {times} brings little, and there is less to compute with."
    return f"Memory-bound, but {times} does not make up for what the attention nodes cost."


# What a node decodes at once, alone or with its KV on nodes of role attention.


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
