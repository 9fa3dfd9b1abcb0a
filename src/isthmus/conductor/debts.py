"""Borrowing with a ledger (Infinite-LLM's first form, DistKV-LLM), and how every policy of lending pays back.

A node whose memory has run out borrows from the one that has most: as much as it lacks, of its longest request. Who
lends does not borrow at the same time and who borrows does not lend, so debts make no chains; and a holder never passes
a guest on. The ledger, who owes whom, is the sum of what requests have elsewhere and is written nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.conductor.events import Lend, Repay
from isthmus.conductor.memory import Memory, Resident

Plan = list[Lend | Repay]


def ledger(memories: Sequence[Memory], reserve: float) -> Plan:
    """Borrows where somebody waits, and pays back."""
    plan = repayments(memories, reserve)
    for debtor in memories:
        if debtor.lacking and debtor.borrows and not debtor.lent and debtor.residents:
            resident = longest(debtor)
            creditor, room = most_room(memories, debtor, resident, reserve)
            count = min(debtor.lacking, room, resident.movable)
            if creditor is not None and count > 0:
                plan.append(debtor.lend(resident, creditor, count))
    return plan


def longest(memory: Memory) -> Resident:
    """Its request with most blocks at home."""
    return max(memory.residents, key=lambda resident: resident.num_blocks)


def most_room(
    memories: Sequence[Memory], debtor: Memory, resident: Resident, reserve: float
) -> tuple[Memory | None, int]:
    """Who can lend most for this request, and how much; its reserve is for its own requests to grow."""
    found, most = None, 0
    for memory in memories:
        if memory is not debtor and resident.may_go_to(memory):
            room = memory.room(reserve_of(memory, reserve))
            if room > most:
                found, most = memory, room
    return found, most


def reserve_of(memory: Memory, reserve: float) -> int:
    return int(memory.capacity * reserve)


def repayments(memories: Sequence[Memory], reserve: float) -> Plan:
    """What a creditor needs itself goes home, if there is room; and so does what a debtor has room for again: all of a
    holding, or as much as it keeps in reserve, so that little is not sent to and fro."""
    plan: Plan = []
    for creditor in memories:
        if creditor.lacking and creditor.lent:
            plan += _called_in(creditor, memories)
    for debtor in memories:
        if not debtor.owed or debtor.lacking:
            continue
        least = debtor.spare + reserve_of(debtor, reserve)
        for resident in [each for each in debtor.residents if each.returnable]:
            count = min(resident.returnable, debtor.free - least)
            if count >= min(resident.returnable, max(1, least)):
                plan.append(debtor.repay(resident, count))
    return plan


def _called_in(creditor: Memory, memories: Sequence[Memory]) -> Plan:
    plan: Plan = []
    missing = creditor.lacking
    for debtor in memories:
        if creditor not in debtor.owed:
            continue
        for resident in list(debtor.residents):
            if resident.holders and resident.holders[-1][0] is creditor and not debtor.lacking:
                count = min(missing, resident.returnable, debtor.free - debtor.spare)
                if count > 0:
                    plan.append(debtor.repay(resident, count))
                    missing -= count
    return plan
