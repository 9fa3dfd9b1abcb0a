"""Decides for a node whose engine plans its own batches and keeps its own KV memory: vLLM.

It decides when an attempt is submitted (when all blocks that its route counts on are here), which cached blocks stay
until the engine has them, which computed blocks the cache keeps, and how a prompt's KV gets to its decode node: through
the caches (`tiers`: the decode node fetches the blocks that it lacks, and computes the tail), or from engine to engine
(no `tiers`: `params`, by which the first engine says where its KV lies, go to the second once).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from enum import Enum, auto

from isthmus.core.attempts import (
    BlocksEvicted,
    BlocksStored,
    FetchFinished,
    FetchOrder,
    PrefillFinished,
    RoleChanged,
)
from isthmus.core.node import events, letters
from isthmus.core.node.node import TRANSFER_NS, Decider
from isthmus.core.scheduler import Actions, TierCache, TierKeeper
from isthmus.core.types import DECODE, NOBODY, NS_PER_S, PREFILL, BlockName, NodeId, RequestId, Role, Tenant

SETTLE_NS = 2 * NS_PER_S
"""Longest wait of a computed prompt for its last blocks to be saved."""
MAX_REFUSED = 1024

Names = tuple[BlockName, ...]


class ServerAttemptState(Enum):
    """GATHERING: fetches blocks as its route says. AWAITING: its prefill node computes. FETCHING: fetches what that
    computed. SUBMITTED: the engine has it. ANSWERED: its last blocks are being saved. PASSED: its decode node takes it
    over."""

    GATHERING = auto()
    AWAITING = auto()
    FETCHING = auto()
    SUBMITTED = auto()
    ANSWERED = auto()
    PASSED = auto()


GATHERING, AWAITING, FETCHING, SUBMITTED, ANSWERED, PASSED = ServerAttemptState

# Each step of an attempt, from where to where; from elsewhere is a bug of ours. An attempt may end in any state.
AWAITS = {GATHERING: AWAITING}
FETCHES = {AWAITING: FETCHING}
SUBMITS = {GATHERING: SUBMITTED, AWAITING: SUBMITTED, FETCHING: SUBMITTED}
ANSWERS = {SUBMITTED: ANSWERED}
PASSES = {ANSWERED: PASSED}


def handover_key(key: RequestId) -> RequestId:
    """Key of the fetch of a prompt's KV from its prefill node; the attempt's own key is of the fetch that its route
    orders."""
    return RequestId(f"{key}/handover")


class _ServerAttempt:
    """`pinned`: its blocks that stay in the cache; `due_ns`: when it goes on, or is given up for `reason`, 0 for never;
    `awaited`: its prefill node keeps KV for it until it confirms; `settled`: nothing more of it is to be saved."""

    __slots__ = (
        "awaited", "begin", "cached_tokens", "due_ns", "params", "pinned", "reason", "settled", "state",
    )  # fmt: skip

    def __init__(self, begin: events.StartAttempt) -> None:
        self.begin = begin
        self.state = GATHERING
        self.pinned: Names = ()
        self.params = b""
        self.awaited = False
        self.cached_tokens: int | None = None
        self.due_ns = 0
        self.reason = ""
        self.settled = False


class ServerNode(Decider[_ServerAttempt]):
    """`tiers`: its cache, None where engines hand KV over themselves."""

    def __init__(
        self, node: NodeId, role: Role, tiers: TierCache | None, *, transfer_ns: int = TRANSFER_NS
    ) -> None:
        super().__init__(node, tiers, transfer_ns)
        self.role = role
        self._keeper = TierKeeper(tiers, node) if tiers is not None else None
        self._refused: OrderedDict[RequestId, NodeId] = OrderedDict()
        """The last attempts that ended here before their prefill node passed them on, with that node."""
        self._given: dict[RequestId, tuple[NodeId, bytes]] = {}
        """Decode nodes that were told `params` and have not confirmed, even of attempts that are over here: were the
        KV freed before, their engines would read another request's."""
        self._engine: Counter[BlockName] = Counter()
        """Copies of each block in the engine's own memory."""
        self._handlers |= {
            events.StartAttempt: self._begin,
            events.DropAttempt: self._of_attempt(self._forget),
            events.Convert: self._convert,
            events.Gone: self._gone,
            events.EnginePrefilled: self._of_attempt(self._answered),
            events.SavesDone: self._of_attempt(self._settled),
            events.AnswerComplete: self._of_attempt(self._over),
            events.Broken: self._of_attempt(self._broken),
            events.BlocksFetched: self._fetched,
            events.Progress: self._moved,
            events.SlotsFilled: self._filled,
            events.BlocksLost: self._lost,
            events.PrefixesRecovered: self._recovered,
            events.EngineBlocks: self._engine_blocks,
            events.Woken: self._woken,
        }
        self._letters |= {
            letters.PromptComputed: self._passed,
            letters.HandoverConfirmed: self._landed,
            letters.ReserveRequest: self._refuse_room,
            letters.ClaimRequest: self._refuse_claim,
        }

    def on(self, event: events.Event, now: int) -> Actions:
        return [each for action in super().on(event, now) if (each := self._seen(action)) is not None]

    @property
    def num_running(self) -> int:
        """Attempts in the engine."""
        return sum([attempt.state is SUBMITTED for attempt in self._attempts.values()])

    @property
    def num_waiting(self) -> int:
        return len(self._attempts) - self.num_running

    @property
    def num_held(self) -> int:
        """Distinct blocks in the engine's own memory."""
        return len(self._engine)

    def check_idle(self) -> None:
        super().check_idle()
        assert not self._given, "a decode node never answered for what it was given"

    # An attempt begins and ends.

    def _begin(self, event: events.StartAttempt, now: int, actions: Actions) -> None:
        attempt = _ServerAttempt(event)
        self._attempts.add(attempt)
        route = event.route
        if route.holdings or route.growth or route.assembly is not None:
            self._fail(attempt, "its engine computes with the KV of its own prefix alone", actions)
            return
        if self.tiers is not None:
            attempt.pinned = event.names
            self.tiers.pin(event.names)
        fetch = event.fetch
        if fetch is not None and self.tiers is not None:
            self._fetches.begin(events.fetch_of(event.key, fetch, event.names, event.tenant), actions)
        else:
            self._gathered(attempt, now, actions)

    def _gathered(self, attempt: _ServerAttempt, now: int, actions: Actions) -> None:
        """Goes on after the fetch that the route orders, whatever it brought."""
        begin = attempt.begin
        if begin.fetch is not None and begin.part is not DECODE:
            actions.append(FetchFinished(begin.route.request, begin.route.attempt))
        if begin.part is not DECODE:
            self._submit(attempt, actions)
            return
        attempt.state = AWAITS[attempt.state]
        early = self._attempts.take_early(begin.peer, begin.key)
        if early is not None:
            self._passed(begin.peer, early, now, actions)

    def _submit(self, attempt: _ServerAttempt, actions: Actions) -> None:
        key, names, num_blocks = attempt.begin.key, attempt.begin.names, 0
        attempt.state = SUBMITS[attempt.state]
        if self.tiers is not None:
            num_blocks = self.tiers.match(names)[0]
            self._keep(names[:num_blocks], actions, key, attempt.begin.tenant)  # counts as a use
        actions.append(events.Submit(key, num_blocks, attempt.params, attempt.cached_tokens))

    def _answered(
        self, attempt: _ServerAttempt, event: events.EnginePrefilled, now: int, actions: Actions
    ) -> None:
        if attempt.state is not SUBMITTED:
            return
        if attempt.begin.part is not PREFILL:
            self._unpin(attempt)  # it is in the engine's memory
            self._land(attempt, actions)
            return
        attempt.cached_tokens, attempt.params = event.cached_tokens, event.params
        attempt.state = ANSWERS[attempt.state]
        if self.tiers is None or attempt.settled:
            self._pass(attempt, now, actions)
        else:
            attempt.due_ns = now + SETTLE_NS
            actions.append(events.Wake(attempt.due_ns))

    def _settled(self, attempt: _ServerAttempt, event: events.SavesDone, now: int, actions: Actions) -> None:
        attempt.settled = True  # the engine's answer may come later
        if attempt.state is ANSWERED:
            self._pass(attempt, now, actions)

    def _pass(self, attempt: _ServerAttempt, now: int, actions: Actions) -> None:
        """Passes a prompt to its decode node, without a time-out: its session and the head tell when that is gone."""
        begin, params = attempt.begin, attempt.params
        attempt.state, attempt.due_ns, attempt.params = PASSES[attempt.state], 0, b""
        self._given[begin.key] = begin.peer, params
        passed = letters.PromptComputed(begin.key, attempt.cached_tokens or 0, params)
        actions.append(events.SendLetter(begin.peer, passed))

    def _landed(self, peer: NodeId, landed: letters.HandoverConfirmed, now: int, actions: Actions) -> None:
        attempt = self._attempts.get(landed.key)
        reader, params = self._given.get(landed.key, (None, b""))
        if reader != peer:
            return
        del self._given[landed.key]
        if landed.unread:
            self._discard(params, actions)
        if attempt is not None:
            route = attempt.begin.route
            actions.append(PrefillFinished(route.request, route.attempt))
            self._end(attempt, actions)

    def _over(self, attempt: _ServerAttempt, event: events.AnswerComplete, now: int, actions: Actions) -> None:
        self._end(attempt, actions)

    def _forget(self, attempt: _ServerAttempt, event: events.DropAttempt, now: int, actions: Actions) -> None:
        if attempt.state is PASSED:
            self._discard(attempt.params, actions)  # its decode node is gone
        self._end(attempt, actions)

    def _broken(self, attempt: _ServerAttempt, event: events.Broken, now: int, actions: Actions) -> None:
        self._fail(attempt, event.reason, actions, final=event.final)

    def _fail(self, attempt: _ServerAttempt, reason: str, actions: Actions, *, final: bool = False) -> None:
        """Gives an attempt up; the conductor may try again, unless `final`."""
        self._land(attempt, actions, unread=True)
        self._end(attempt, actions)
        actions.append(self._attempts.failure(attempt, reason, final=final))

    def _end(self, attempt: _ServerAttempt, actions: Actions) -> None:
        """Ends an attempt in any state."""
        begin, key = attempt.begin, attempt.begin.key
        del self._attempts[key]
        if self._attempts.take_early(begin.peer, key) is not None:
            attempt.awaited = True
            self._land(attempt, actions, unread=True)
        elif begin.part is DECODE and attempt.state in (GATHERING, AWAITING):
            self._refused[key] = begin.peer
            if len(self._refused) > MAX_REFUSED:
                self._refused.popitem(last=False)
        self._land(attempt, actions)
        for each in (key, handover_key(key)):
            self._fetches.end(each, actions)
        self._unpin(attempt)
        actions.append(events.ReleaseResources(key))

    def _land(self, attempt: _ServerAttempt, actions: Actions, *, unread: bool = False) -> None:
        """Confirms a hand-over to the prefill node: its KV is here, or was read, or is not needed (`unread`). An engine
        that drops a request tells the other engine itself when it has done with its KV."""
        if attempt.awaited:
            attempt.awaited, attempt.params = False, b""
            landed = letters.HandoverConfirmed(attempt.begin.key, unread)
            actions.append(events.SendLetter(attempt.begin.peer, landed))

    def _discard(self, params: bytes, actions: Actions) -> None:
        if params:
            actions.append(events.Discard(params))

    def _unpin(self, attempt: _ServerAttempt) -> None:
        if attempt.pinned and self.tiers is not None:
            self.tiers.unpin(attempt.pinned)
            attempt.pinned = ()

    def _convert(self, event: events.Convert, now: int, actions: Actions) -> None:
        self.role = event.role
        actions.append(RoleChanged(self.node, event.role))

    # Handing over.

    def _passed(self, peer: NodeId, passed: letters.PromptComputed, now: int, actions: Actions) -> None:
        key = passed.key
        attempt = self._attempts.get(key)
        if self._refused.get(key) == peer:
            del self._refused[key]
            actions.append(events.SendLetter(peer, letters.HandoverConfirmed(key, unread=True)))
            return
        if attempt is None or attempt.state is not AWAITING:
            if attempt is None or attempt.state is GATHERING:
                self._attempts.put_early(peer, passed)
            return
        begin = attempt.begin
        if begin.peer != peer:
            return
        attempt.cached_tokens, attempt.params, attempt.awaited = passed.cached_tokens, passed.params, True
        present = self.tiers.match(begin.names)[0] if self.tiers is not None else len(begin.names)
        if present < len(begin.names):
            attempt.state = FETCHES[attempt.state]
            order = FetchOrder(begin.route.prefill, present, len(begin.names), codec=begin.route.codec)
            fetch = events.fetch_of(handover_key(key), order, begin.names, begin.tenant)
            self._fetches.begin(fetch, actions)
        else:
            self._take_over(attempt, actions)

    def _take_over(self, attempt: _ServerAttempt, actions: Actions) -> None:
        """Submits a handed-over prompt; blocks that did not come are computed."""
        if self.tiers is not None:
            self._land(attempt, actions)
        self._submit(attempt, actions)

    def _gone(self, event: events.Gone, now: int, actions: Actions) -> None:
        """Gives up attempts that were passed to a lost peer, and frees KV given to it."""
        self._fetches.gone(event.peer, now, actions)
        for key in [key for key, (reader, _) in self._given.items() if reader == event.peer]:
            attempt, (_, params) = self._attempts.get(key), self._given.pop(key)
            if attempt is None:
                self._discard(params, actions)
                continue
            attempt.params = params
            self._attempts.give_up(attempt, event.peer, event.reason, now, actions)
        for attempt in self._attempts.values():
            if attempt.awaited and attempt.begin.peer == event.peer:
                attempt.awaited = False  # there is nobody to confirm to

    def _refuse_room(self, peer: NodeId, asked: letters.ReserveRequest, now: int, actions: Actions) -> None:
        """No other node's KV lies in this engine's memory."""
        actions.append(events.SendLetter(peer, letters.ReserveReply(asked.key, False)))

    def _refuse_claim(self, peer: NodeId, claim: letters.ClaimRequest, now: int, actions: Actions) -> None:
        actions.append(events.SendLetter(peer, letters.ClaimReply(claim.key, 0)))

    # Fetching from other nodes.

    def _moved(self, event: events.Progress, now: int, actions: Actions) -> None:
        if event.fetched:
            self._fetches.moved(event.key, now)

    def _fetched(self, event: events.BlocksFetched, now: int, actions: Actions) -> None:
        """Adopts fetched blocks into the cache, even if the attempt is over."""
        came = self._fetches.came(event, actions)
        if came is None:
            return
        fetch, stop = came
        self._keep(fetch.names[:stop], actions, fetch.key, fetch.tenant)
        if not event.ended:
            return
        attempt = self._attempts.get(event.key)
        if attempt is not None:
            self._gathered(attempt, now, actions)
            return
        for attempt in self._attempts.values():
            if attempt.state is FETCHING and handover_key(attempt.begin.key) == event.key:
                self._take_over(attempt, actions)
                return

    # What is kept.

    def _filled(self, event: events.SlotsFilled, now: int, actions: Actions) -> None:
        attempt = self._attempts.get(event.key)
        tenant = attempt.begin.tenant if attempt is not None else NOBODY
        self._keep(event.names, actions, event.key, tenant)

    def _keep(self, names: Names, actions: Actions, key: RequestId, tenant: Tenant) -> None:
        if self._keeper is not None:
            self._keeper.keep(names, actions, key, tenant=tenant)

    def _lost(self, event: events.BlocksLost, now: int, actions: Actions) -> None:
        if self._keeper is not None and event.names:
            self._keeper.lose(event.names, actions)

    def _recovered(self, event: events.PrefixesRecovered, now: int, actions: Actions) -> None:
        if self._keeper is not None:
            self._keeper.recover(event.chains, actions)

    def _engine_blocks(self, event: events.EngineBlocks, now: int, actions: Actions) -> None:
        """Counts copies; reports a block with its first copy, and its eviction with its last."""
        new = tuple([name for name in event.stored if not self._engine[name]])
        self._engine.update(event.stored)
        unknown = tuple([name for name in dict.fromkeys(new) if not self._is_kept(name)])
        if unknown:
            actions.append(BlocksStored(self.node, unknown))
        gone = []
        for name in tuple(self._engine) if event.cleared else event.removed:
            left = 0 if event.cleared else self._engine[name] - 1
            if left > 0:
                self._engine[name] = left
            else:
                gone += [name] if self._engine.pop(name, 0) else []
        evicted = tuple([name for name in gone if not self._is_kept(name)])
        if evicted:
            actions.append(BlocksEvicted(self.node, evicted))

    def _is_kept(self, name: BlockName) -> bool:
        return self.tiers is not None and self.tiers.holds(name)

    def _seen(self, action: events.Action) -> events.Action | None:
        """An action as the conductor is to hear it: a block that left the cache stays while the engine has it."""
        if not isinstance(action, BlocksEvicted) or not self._engine:
            return action
        gone = tuple([name for name in action.names if name not in self._engine])
        return BlocksEvicted(action.node, gone) if gone else None

    # Time.

    def _woken(self, event: events.Woken, now: int, actions: Actions) -> None:
        for attempt in self._attempts.due(now):
            if attempt.state is ANSWERED:
                self._pass(attempt, now, actions)
            elif attempt.state is PASSED:
                self._fail(attempt, attempt.reason, actions)
        self._fetches.end_late(now, actions)
