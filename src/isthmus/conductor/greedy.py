"""Debtors and creditors, greedily (Infinite-LLM's second form, section on scheduling).

An iteration of a batch b over contexts that sum to S takes W(b) / f(b) + S / g, and gives b tokens; what W / f and g
are on a node its cost model says. Blocks of a debtor's longest request go to the creditor with most free memory: so
many that the tokens of both together, per second, become most, where the debtor admits whom it has room for then and
the creditor attends to more. It ends when no move adds any.

A debtor is a node where requests wait for memory, for the others could admit nobody more; a creditor one with memory to
spare. The thresholds that the paper leaves open are these two.
"""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.conductor.debts import Plan, longest, most_room, repayments
from isthmus.conductor.events import Lend
from isthmus.conductor.memory import Memory, Resident
from isthmus.conductor.view import NodeView

LEAST_GAIN = 1e-3
"""Of what two nodes give, that a move must add: less is within what rounding makes of it."""


def greedy(memories: Sequence[Memory], reserve: float) -> Plan:
    plan = repayments(memories, reserve)
    while True:
        debtors = [
            each for each in memories if each.waiting and each.lacking and each.borrows and not each.lent
        ]
        moves: Plan = []
        for debtor in sorted([each for each in debtors if each.residents], key=lambda each: each.batch):
            resident = longest(debtor)
            creditor, room = most_room(memories, debtor, resident, reserve)
            if creditor is None:
                continue
            count, admitted = best(debtor, creditor, min(room, resident.movable))
            if count:
                moves.append(move(debtor, creditor, resident, count, admitted))
        if not moves:
            return plan
        plan += moves


def best(debtor: Memory, creditor: Memory, most: int) -> tuple[int, int]:
    """Of up to `most` blocks, how many to move, and how many requests the debtor then admits; (0, 0) for none.

    Between two admissions every further block only makes the creditor slower than the debtor faster, or the other way
    round: what is looked at is the fewest blocks for each number of admissions.
    """
    before, found, gain = rate(debtor) + rate(creditor), (0, 0), 0.0
    each = needs(debtor)
    for admitted in range(1, debtor.waiting + 1):
        count = max(1, admitted * each + debtor.spare - debtor.free)
        if count > most:
            break
        after = tokens_per_s(debtor.node, debtor.batch + admitted, debtor.here - count + admitted * each)
        after += tokens_per_s(creditor.node, creditor.batch, creditor.here + creditor.lent + count)
        if after - before > max(gain, LEAST_GAIN * before):
            found, gain = (count, admitted), after - before
    return found


def move(debtor: Memory, creditor: Memory, resident: Resident, count: int, admitted: int) -> Lend:
    """It counts as done, and those that wait as admitted."""
    each = needs(debtor)
    lend = debtor.lend(resident, creditor, count)
    debtor.waiting -= admitted
    debtor.batch += admitted
    debtor.here += admitted * each
    debtor.free -= admitted * each
    debtor.wanted -= admitted * each
    return lend


def needs(memory: Memory) -> int:
    """Blocks of one that waits there, in the mean."""
    return max(1, -(-memory.wanted // max(1, memory.waiting)))


def rate(memory: Memory) -> float:
    return tokens_per_s(memory.node, memory.batch, memory.here + memory.lent)


def tokens_per_s(node: NodeView, batch: int, num_blocks: int) -> float:
    """That a batch gives with so much KV to attend to here."""
    if not batch:
        return 0.0
    fixed, slope = node.cost.decode_step_ps(batch)
    return batch * 1e12 / max(1, fixed + slope * num_blocks * node.block_size)
