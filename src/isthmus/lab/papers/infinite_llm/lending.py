"""The paper's two rules of lending, as plug-ins: `lending.policy: isthmus.lab.papers.infinite_llm.lending:greedy`.

ledger   (first version, DistKV-LLM) who lacks memory borrows as much, from whom has most of it
greedy   (second, "debtors and creditors") as much as makes the tokens of both together, per second, most
"""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.core.conductor.debts import NodeMemory, Plan, repayments
from isthmus.core.conductor.view import NodeView

LEDGER, GREEDY = (f"{__name__}:{name}" for name in ("ledger", "greedy"))
LEAST_GAIN = 1e-3
"""Least gain of a move of the greedy rule, as a share of the two nodes' rate; smaller gains may be rounding."""
_PS = 1e12


def ledger(memories: Sequence[NodeMemory], reserve: float) -> Plan:
    """Borrows the missing blocks from the node with most to spare."""
    plan = repayments(memories, reserve)
    for debtor in memories:
        found = debtor.creditors(memories, reserve) if debtor.may_borrow else []
        if found:
            creditor, room = max(found, key=lambda each: each[1])
            count = min(debtor.lacking, room, debtor.longest.movable)
            if count > 0:
                plan.append(debtor.lend(creditor, count))
    return plan


def greedy(memories: Sequence[NodeMemory], reserve: float) -> Plan:
    """To whom has most, so many blocks that the tokens of both together, per second, become most, where the debtor
    admits whom it has room for then and the creditor attends to more; until no move adds any.

    An iteration of a batch b over contexts that sum to S takes W(b) / f(b) + S / g, and gives b tokens; what W / f and
    g are on a node its cost model says. The paper leaves two thresholds open: here a debtor is a node where requests
    wait for memory, for the others could admit nobody more, and a creditor one with memory to spare.
    """
    plan = repayments(memories, reserve)
    while True:
        before = len(plan)
        debtors = [each for each in memories if each.waiting and each.may_borrow]
        for debtor in sorted(debtors, key=lambda each: each.batch):
            found = debtor.creditors(memories, reserve)
            if found:
                creditor, room = max(found, key=lambda each: each[1])
                count, admitted = best(debtor, creditor, min(room, debtor.longest.movable))
                if count:
                    plan.append(debtor.lend(creditor, count))
                    _admit(debtor, admitted)
        if len(plan) == before:
            return plan


def _admit(debtor: NodeMemory, count: int) -> None:
    """Counts waiting requests as admitted."""
    num_blocks = count * debtor.needs
    debtor.waiting, debtor.batch = debtor.waiting - count, debtor.batch + count
    debtor.wanted, debtor.here = debtor.wanted - num_blocks, debtor.here + num_blocks
    debtor.free -= num_blocks


def best(debtor: NodeMemory, creditor: NodeMemory, most: int) -> tuple[int, int]:
    """The best number of blocks to move, up to `most`, and of requests that the debtor then admits; (0, 0) for none.

    Between two admissions every further block only makes the creditor slower than the debtor faster, or the other way
    round: what is looked at is the fewest blocks for each number of admissions.
    """
    before, found, gain = rate(debtor) + rate(creditor), (0, 0), 0.0
    each = debtor.needs
    for admitted in range(1, debtor.waiting + 1):
        count = max(1, admitted * each + debtor.spare - debtor.free)
        if count > most:
            break
        after = _rate(debtor.node, debtor.batch + admitted, debtor.here - count + admitted * each)
        after += _rate(creditor.node, creditor.batch, creditor.here + creditor.lent + count)
        if after - before > max(gain, LEAST_GAIN * before):
            found, gain = (count, admitted), after - before
    return found


def rate(memory: NodeMemory) -> float:
    """Tokens per second, by the greedy rule's model."""
    return _rate(memory.node, memory.batch, memory.here + memory.lent)


def _rate(node: NodeView, batch: int, num_blocks: int) -> float:
    if not batch:
        return 0.0
    fixed, slope = node.cost.decode_step_ps(batch)
    return batch * _PS / max(1, fixed + slope * num_blocks * node.block_size)
