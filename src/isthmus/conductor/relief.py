"""Our own rule of lending: greedy, by what iterations really take, and only where it is sooner than waiting.

Beside the greedy rule's model (`greedy.py`) it counts that a home whose KV is in part elsewhere asks for it in each
layer, that attention there and at home goes on at the same time, and that a holder attends to guests once in each
iteration of *their* home. Memory that a move frees comes bit by bit, as blocks go while a request decodes; requests
that end free some too, and how fast they do is measured. A move is of use if it is sooner. Where nobody waits but
running requests are about to fill the memory, blocks move before one is pre-empted and computed anew.
"""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.conductor.debts import Plan, longest, repayments, reserve_of
from isthmus.conductor.greedy import needs
from isthmus.conductor.memory import Memory, Resident
from isthmus.cost import Part, Path, slowest

_PS = 1e12


def relief(memories: Sequence[Memory], reserve: float) -> Plan:
    """Where it pays, as much as is missing, with whoever loses least by it."""
    plan = repayments(memories, reserve)
    for debtor in memories:
        if debtor.lacking and debtor.borrows and not debtor.lent and debtor.residents:
            resident = longest(debtor)
            found = _best(debtor, resident, memories, reserve)
            if found is not None:
                plan.append(debtor.lend(resident, *found))
    return plan


def _best(
    debtor: Memory, resident: Resident, memories: Sequence[Memory], reserve: float
) -> tuple[Memory, int] | None:
    best, gain = None, 0.0
    for creditor in memories:
        if creditor is not debtor and resident.may_go_to(creditor):
            count = min(debtor.lacking, creditor.room(reserve_of(creditor, reserve)), resident.movable)
            more = gained(debtor, creditor, count) if count > 0 else 0.0
            if more > gain:
                best, gain = (creditor, count), more
    return best


def gained(debtor: Memory, creditor: Memory, count: int) -> float:
    """Tokens per second that both nodes give more when so many blocks are with the creditor, as if a request were
    admitted in parts. Where nobody waits, what a pre-emption would lose counts instead, as much as all that decode
    there: less than nothing is not worth it."""
    admitted = min(debtor.waiting, count / needs(debtor)) if debtor.waiting else 0
    before = tokens_per_s(debtor) + tokens_per_s(creditor)
    owed = {**debtor.owed, creditor: debtor.owed.get(creditor, 0) + count}
    here = debtor.here - count + round(admitted * needs(debtor))
    home_s = _iteration_s(debtor, debtor.batch + round(admitted), here, owed)
    there_s = iteration_s(creditor) + attends_s(creditor, count) * iteration_s(creditor) / home_s
    after = (debtor.batch + admitted) / home_s + creditor.batch / there_s
    if not debtor.waiting:
        return after
    return after - before


def tokens_per_s(memory: Memory) -> float:
    return memory.batch / iteration_s(memory)


def attends_s(holder: Memory, num_blocks: int) -> float:
    """That a holder takes for so much of others' KV, in each of their iterations."""
    return holder.node.cost.attend_ps(1, num_blocks * holder.node.block_size) / _PS


def iteration_s(memory: Memory) -> float:
    return _iteration_s(memory, memory.batch, memory.here, memory.owed) + attends_s(memory, memory.lent)


def _iteration_s(home: Memory, batch: int, here: int, owed: dict[Memory, int]) -> float:
    cost, size = home.node.cost, home.node.block_size
    fixed, slope = cost.decode_step_ps(max(1, batch))
    attends = slope * here * size
    if owed:
        parts = [
            Part(path(home, each), cost.queries.num_bytes(1), each.node.cost.attend_ps(1, blocks * size))
            for each, blocks in owed.items()
        ]
        attends = max(attends, slowest(parts, cost.queries.layers, rate(home)).whole)
    return (fixed + attends) / _PS


def path(home: Memory, holder: Memory) -> Path:
    rtt_ns = max(home.node.paths.rtt_ns, holder.node.paths.rtt_ns)
    return Path(1000 * rtt_ns, min(rate(home), rate(holder)))


def rate(memory: Memory) -> float:
    """Bytes per second of its link; a stand-in where that is not known."""
    return memory.node.paths.network or memory.node.paths.handover or 1 << 40
