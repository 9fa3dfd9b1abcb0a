"""Who lends to whom: what plans may never do, whatever nodes say, and what they come to."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.attempts import Holding, HoldingsChanged, MemoryEntry, MemoryUsed
from isthmus.core.conductor import (
    Action,
    Conductor,
    FirstToken,
    Lend,
    NodeJoined,
    NodeLeft,
    Repay,
    RequestArrived,
    RequestEnded,
    Rules,
)
from isthmus.core.conductor.debts import NodeMemory, Resident, repayments
from isthmus.core.conductor.lending import POLICIES
from isthmus.core.conductor.view import NodeView, RequestView, View
from isthmus.core.cost import Curve
from isthmus.core.types import NodeId, RequestId, Role
from isthmus.facts import make_known
from isthmus.lab.papers.infinite_llm.lending import GREEDY, LEDGER, best, greedy, ledger, rate

from .cluster import comes_back

RULES = [LEDGER, GREEDY, "isthmus"]
for rule in RULES:
    make_known(Rules(lending=rule))

SIZE = 16
BLOCKS = 100
COST = Curve(
    kv_token_bytes=1000,
    num_layers=4,
    prefill_token_s=1e-4,
    decode_fixed_s=0.01,
    decode_sequence_s=1e-4,
    decode_context_s=1e-6,
)
NAMES = [NodeId(f"mixed-{at}") for at in range(4)]


def joined(name: NodeId) -> NodeJoined:
    return NodeJoined(name, Role.MIXED, BLOCKS * SIZE, SIZE, COST)


def some_memories(seed: int) -> list[NodeMemory]:
    """Full ones and empty ones, with requests that wait and requests that decode; nobody has borrowed yet."""
    draw, view = Random(seed), View()
    memories = []
    for name in NAMES:
        memory = NodeMemory(view.join(joined(name)))
        memory.free = draw.choice([0, 5, 50, 100])
        held = BLOCKS - memory.free
        while held > 0:
            count = min(held, draw.randrange(1, 60))
            memory.residents.append(Resident(request_of(memory.node, draw), count, ()))
            memory.here, held = memory.here + count, held - count
        memory.batch = memory.spare = len(memory.residents)
        memory.waiting = draw.choice([0, 0, 1, 4])
        memory.wanted = memory.waiting * draw.randrange(1, 30)
        memories.append(memory)
    return memories


def request_of(home: NodeView, draw: Random) -> RequestView:
    name = RequestId(str(draw.random()))
    request = RequestView(RequestArrived(name, "", 100, 10, ()), 0)
    request.decode = home
    return request


@given(st.integers(0, 1 << 32), st.sampled_from(RULES), st.sampled_from([0.0, 0.1, 0.5]))
def test_no_plan_lends_what_there_is_not_or_makes_a_chain(seed: int, policy: str, reserve: float) -> None:
    memories = some_memories(seed)
    before = {memory.node.node: memory.free for memory in memories}
    lacking = {memory.node.node for memory in memories if memory.lacking}
    plan = POLICIES[policy](memories, reserve)
    lent: dict[NodeId, int] = {}
    for step in plan:
        assert isinstance(step, Lend) and step.num_blocks > 0
        lent[step.holder] = lent.get(step.holder, 0) + step.num_blocks
    assert {step.home for step in plan} <= lacking
    assert not lent.keys() & {step.home for step in plan}, "who borrows lends"
    assert len({step.request for step in plan}) == len(plan), "two orders for one request"
    for name, count in lent.items():
        assert count <= before[name] - int(BLOCKS * reserve), "more is lent than there is to spare"


@given(st.integers(0, 1 << 32))
def test_of_the_greedy_rule_no_move_makes_tokens_fewer(seed: int) -> None:
    """By its own model: each move adds some, and where no move does there is none."""
    memories = some_memories(seed)
    total = sum(map(rate, memories))
    plan = greedy(memories, 0.1)
    after = sum(map(rate, memories))
    assert after >= total and (not plan or after > total)
    for debtor in memories:
        for creditor in memories:
            may = debtor is not creditor and debtor.waiting and debtor.lacking and not debtor.lent
            if may and debtor.residents:
                room = min(creditor.room(0.1), debtor.longest.movable)
                assert best(debtor, creditor, room) == (0, 0), "one more move would have added some"


@pytest.mark.parametrize("policy", RULES)
def test_nodes_that_are_alike_move_nothing(policy: str) -> None:
    for free, waiting in ((50, 0), (0, 4), (30, 0)):
        memories = some_memories(1)
        for memory in memories:
            memory.free, memory.waiting, memory.wanted = free, waiting, 10 * waiting
            memory.residents = memory.residents[:1]
            memory.batch = memory.spare = len(memory.residents)
        assert POLICIES[policy](memories, 0.1) == []


class Bank:
    """A conductor, and nodes that do at once what they are told; each keeps its own table."""

    keeps = False
    """Nothing comes home that lies elsewhere."""

    def __init__(self, policy: str) -> None:
        self.conductor, self.now = Conductor(Rules(policy="round_robin", lending=policy)), 0
        self.home: dict[RequestId, NodeId] = {}
        self.holdings: dict[RequestId, tuple[Holding, ...]] = {}
        self.blocks: dict[RequestId, int] = {}
        self.refuses = False
        for name in NAMES:
            self.on(joined(name))

    def on(self, event: object) -> list[Action]:
        self.now += 1_000_000
        actions = self.conductor.on(event, self.now)  # type: ignore[arg-type]
        self.conductor.check()
        comes_back(event, actions)  # type: ignore[arg-type]
        return actions

    def ask(self, name: str, num_blocks: int) -> None:
        [route] = self.on(RequestArrived(RequestId(name), "", num_blocks * SIZE - 1, 1, ()))
        self.on(FirstToken(RequestId(name), 1))
        self.home[RequestId(name)] = route.decode  # type: ignore[union-attr]
        self.blocks[RequestId(name)] = num_blocks
        self.holdings[RequestId(name)] = ()

    def end(self, name: str) -> None:
        self.on(RequestEnded(RequestId(name), 1))
        for books in (self.home, self.blocks, self.holdings):
            del books[RequestId(name)]

    def hosted(self, name: NodeId) -> int:
        held = [each for holdings in self.holdings.values() for each in holdings]
        return sum(each.num_blocks for each in held if each.holders == (name,))

    def here(self, request: RequestId) -> int:
        return self.blocks[request] - sum(each.num_blocks for each in self.holdings[request])

    def report(self, name: NodeId, wanted: int = 0) -> list[Action]:
        """What a node has, and what follows."""
        here = [request for request, home in self.home.items() if home == name]
        entries = [MemoryEntry(each, 1, self.here(each), 0, True, self.holdings[each]) for each in here]
        free = BLOCKS - self.hosted(name) - sum(entry.num_blocks for entry in entries)
        used = MemoryUsed(name, free, len(here), wanted, int(wanted > 0), tuple(entries))
        actions = self.on(used)
        for action in actions:
            self.obey(action)
        return actions

    def obey(self, action: Action) -> None:
        assert isinstance(action, Lend | Repay)
        *before, last = self.holdings[action.request] or (Holding((), 0),)
        if isinstance(action, Repay):
            assert last.holders == (action.holder,) and action.num_blocks <= last.num_blocks
            last = Holding(last.holders, last.num_blocks - action.num_blocks * (not self.keeps))
        elif not self.refuses:
            if last.holders == (action.holder,):
                last = Holding(last.holders, last.num_blocks + action.num_blocks)
            else:
                before, last = [*before, last], Holding((action.holder,), action.num_blocks)
        self.holdings[action.request] = tuple([each for each in (*before, last) if each.num_blocks])
        self.on(HoldingsChanged(action.request, 1, self.holdings[action.request]))
        assert self.hosted(action.holder) <= BLOCKS
        self.same()

    def same(self) -> None:
        """The ledger is the sum of the nodes' tables."""
        for name, node in self.conductor.view.nodes.items():
            assert node.lent_blocks == self.hosted(name)


def crowded(policy: str) -> Bank:
    """One node of four is nearly full of a long request, and all have said so."""
    bank = Bank(policy)
    for name, count in (("long", 90), ("a", 5), ("b", 5), ("c", 5)):
        bank.ask(name, count)
    for name in NAMES:
        assert bank.report(name) == []
    return bank


@pytest.mark.parametrize("policy", RULES)
def test_what_is_borrowed_is_paid_back_when_there_is_room_and_then_nobody_owes_anything(policy: str) -> None:
    bank = crowded(policy)
    bank.report(NAMES[0], wanted=30)  # for a moment only, perhaps
    assert bank.holdings[RequestId("long")] == ()
    bank.report(NAMES[0], wanted=30)
    assert sum(each.num_blocks for each in bank.holdings[RequestId("long")]) >= 20
    for _ in range(4):
        bank.blocks[RequestId("long")] = 60  # there is room again
        for name in NAMES:
            bank.report(name)
    assert not any(bank.holdings.values()) and not any(map(bank.hosted, NAMES))


@pytest.mark.parametrize("policy", RULES)
def test_a_refusal_is_forgotten_until_the_next_plan_and_nodes_that_left_are_lent_to_no_more(
    policy: str,
) -> None:
    bank = crowded(policy)
    bank.refuses = True
    bank.report(NAMES[0], wanted=30)
    assert bank.report(NAMES[0], wanted=30)
    bank.refuses = False
    assert bank.report(NAMES[0], wanted=30) and bank.hosted(NAMES[0]) == 0
    assert bank.holdings[RequestId("long")]
    bank = crowded(policy)
    for name in NAMES[1:]:
        bank.on(NodeLeft(name))
    assert [bank.report(NAMES[0], wanted=30) for _ in range(3)] == [[], [], []]


@pytest.mark.parametrize("policy", RULES)
def test_who_needs_its_own_memory_has_it_back(policy: str) -> None:
    bank = crowded(policy)
    for _ in range(2):
        bank.report(NAMES[0], wanted=30)
    [holding] = bank.holdings[RequestId("long")]
    bank.blocks[RequestId("long")] -= 30  # for the test: there is room at home, though less than the reserve
    bank.report(NAMES[0])
    [creditor] = holding.holders
    bank.report(creditor, wanted=95)
    assert bank.hosted(creditor) < holding.num_blocks


@given(st.integers(0, 1 << 32), st.sampled_from(RULES))
def test_whatever_comes_debts_are_the_sum_of_what_requests_have_elsewhere(seed: int, policy: str) -> None:
    draw, bank = Random(seed), Bank(policy)
    for at in range(40):
        kind = draw.randrange(5)
        if kind == 0:
            bank.ask(f"r{at}", draw.randrange(1, 40))
        elif kind == 1 and bank.home:
            bank.end(draw.choice(list(bank.home)))
        else:
            name = draw.choice(NAMES)
            room = BLOCKS - bank.hosted(name)
            used = sum(bank.here(each) for each, home in bank.home.items() if home == name)
            if used <= room:
                bank.refuses = not draw.randrange(4)
                bank.report(name, wanted=draw.choice([0, 10, 60]))
        bank.same()
    for request in list(bank.home):
        bank.end(request)
    bank.same()


def test_pure_rules_pay_back_by_themselves() -> None:
    """Of a plan alone: nothing comes home that has no room there, or is too long for it."""
    memories = some_memories(3)
    debtor, creditor = memories[0], memories[1]
    debtor.free, debtor.waiting, debtor.wanted, debtor.spare = 80, 0, 0, 1
    request = request_of(debtor.node, Random(1))
    debtor.residents = [Resident(request, 10, [(creditor, 20)])]
    debtor.owed, creditor.lent = {creditor: 20}, 20
    [back] = repayments([debtor, creditor], 0.1)
    assert isinstance(back, Repay) and back.num_blocks == 20
    request.arrived = RequestArrived(request.arrived.request, "", (BLOCKS + 15) * SIZE, SIZE, ())
    debtor.residents = [Resident(request, 100, [(creditor, 20)])]
    [back] = ledger([debtor, creditor], 0.1)
    assert back.num_blocks == 4, "the rest would have no room"


def test_a_debt_that_was_not_paid_back_is_asked_for_again() -> None:
    bank = crowded("isthmus")
    for _ in range(2):
        bank.report(NAMES[0], wanted=30)
    bank.keeps, bank.blocks[RequestId("long")] = True, 60
    asked = [action for _ in range(3) for name in NAMES for action in bank.report(name)]
    assert len([action for action in asked if isinstance(action, Repay)]) >= 2
