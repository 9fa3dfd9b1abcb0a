"""Decides for one node what becomes of an attempt, from its route to its last token, and of cached blocks.

Facts may come while a run is out: changes to blocks of a request in that run wait for the end of the iteration under
way, for which `Cut` asks. Owns the scheduler and the tiers. Knows neither bytes nor sessions nor token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic

import msgspec

from isthmus.core.attempts import (
    FetchFinished,
    FetchOrder,
    PrefillFinished,
    RoleChanged,
    assembly_of,
)
from isthmus.core.blocks import state_names
from isthmus.core.node import events, letters
from isthmus.core.node.attempts import A, Attempt, Attempts, MemoryUsage
from isthmus.core.node.away import HolderSide, HomeSide
from isthmus.core.node.fetches import DonorFetches, Fetches
from isthmus.core.node.letters import extent_of
from isthmus.core.scheduler import Actions, Saved, Scheduler, SchedulerLimits, Stepped, TierCache
from isthmus.core.scheduler.sequence import COMPUTING, DECODING, DEPARTING, RECEIVING
from isthmus.core.types import DECODE, MIXED, NS_PER_S, PREFILL, BlockName, NodeId, RequestId, Role

TRANSFER_NS = 30 * NS_PER_S
MAX_DISTRUSTED = 1024
NOT_RECALLED = "a prefix it counted on is not in its cache any more"

Names = tuple[BlockName, ...]


Handler = Callable[[Any, int, Actions], None]


class Decider(Generic[A]):
    """What nodes of both kinds do: facts and letters go to their handlers; attempts and fetches are held.

    `transfer_ns`: how long a hand-over or a fetch that began may bring nothing.
    """

    def __init__(self, node: NodeId, tiers: TierCache | None, transfer_ns: int) -> None:
        self.node, self.tiers = node, tiers
        self._attempts = Attempts[A](node)
        self._fetches = Fetches(tiers, transfer_ns)
        self._handlers: dict[type, Handler] = {events.LetterReceived: self._heard}
        self._letters: dict[type, Callable[[NodeId, Any, int, Actions], None]] = {
            letters.FetchRequest: self._fetches.wanted,
            letters.FetchDone: self._fetches.enough,
        }

    def on(self, event: events.Event, now: int) -> Actions:
        """Takes one fact, returns the actions that follow from it, in order. `now`: ns, never goes back."""
        actions: Actions = []
        self._handlers[type(event)](event, now, actions)
        return actions

    def __contains__(self, key: RequestId) -> bool:
        return key in self._attempts

    def _heard(self, event: events.LetterReceived, now: int, actions: Actions) -> None:
        """A letter for nodes of another kind is void: its writer has not asked what this node is."""
        handler = self._letters.get(type(event.letter))
        if handler is not None:
            handler(event.peer, event.letter, now, actions)

    def _of_attempt(self, handle: Callable[[A, Any, int, Actions], None]) -> Handler:
        """A handler of facts about one attempt; a fact about an unknown attempt is void."""

        def handler(event: Any, now: int, actions: Actions) -> None:
            attempt = self._attempts.get(event.key)
            if attempt is not None:
                handle(attempt, event, now, actions)

        return handler

    def check_idle(self) -> None:
        """Raises AssertionError unless all that attempts took was given back."""
        assert not self._attempts, "an attempt never ended"
        self._fetches.check_idle()
        assert self.tiers is None or not self.tiers.num_pinned, "a block is still pinned"


class Node(Decider[Attempt]):
    """The decider of a node with our own engine. Its attempts are the scheduler's sequences.

    `limits`: of each role that it may be given. `stages`: of its pipeline group; with several, first tokens come by
    `Sampled`. `kv_heads`: number of equal parts into which the KV of a token can be cut. `report_ns`: least time
    between two reports of memory use, 0 for none.
    """

    def __init__(
        self,
        limits: Mapping[Role, SchedulerLimits],
        scheduler: Scheduler,
        *,
        stages: int = 1,
        kv_heads: int = 1,
        transfer_ns: int = TRANSFER_NS,
        report_ns: int = 0,
    ) -> None:
        super().__init__(scheduler.node, scheduler.tiers, transfer_ns)
        self.scheduler = scheduler
        self._limits, self._stages, self._transfer_ns = limits, stages, transfer_ns
        self._block_size, self._state_blocks = scheduler.limits.block_size, scheduler.limits.state_blocks
        self._home = HomeSide(scheduler)
        self._holder = HolderSide(scheduler, kv_heads if stages == 1 else 0)  # a stage has some of the layers
        self._donors = DonorFetches(scheduler)
        self._usage = MemoryUsage(scheduler, report_ns) if report_ns else None
        self._forgotten: list[Attempt] = []  # dropped while a run with them is out
        self._sampled_early: list[events.Sampled] = []  # told while a run with them is out
        self._distrusted: dict[RequestId, None] = {}  # requests that a cached prefix failed
        self._next_role: Role | None = None
        self._is_cut = False
        self._handlers |= {
            events.StartAttempt: self._begin,
            events.DropAttempt: self._of_attempt(self._forget),
            events.Lend: self._of_attempt(self._lend),
            events.Repay: self._of_attempt(self._repay),
            events.Convert: self._convert,
            events.Gone: self._gone,
            events.ShipmentStored: self._holder.stowed,
            events.Reclaimed: self._reclaimed,
            Stepped: self._stepped,
            Saved: self._saved,
            events.Missing: self._missing,
            events.Sampled: self._sampled,
            events.BlocksFetched: self._fetched,
            events.Loaded: self._of_attempt(self._loaded),
            events.HandoverComplete: self._of_attempt(self._received),
            events.Progress: self._moved,
            events.Broken: self._of_attempt(self._broken),
            events.BlocksLost: self._lost,
            events.PrefixesRecovered: self._recovered,
            events.Woken: self._woken,
        }
        self._letters |= {
            letters.HandoverGranted: self._granted,
            letters.HandoverConfirmed: self._landed,
            letters.ReserveRequest: self._holder.reserve,
            letters.ReserveReply: self._reserved,
            letters.ClaimRequest: self._holder.claim,
            letters.ClaimReply: self._found,
            letters.ShipmentConfirmed: self._shipped,
            letters.SendBack: self._holder.send_back,
            letters.Shrink: self._shrink,
        }

    def on(self, event: events.Event, now: int) -> Actions:
        actions: Actions = []  # not `super().on`: the simulator's time goes by here
        self._handlers[type(event)](event, now, actions)
        if self._usage is not None:
            self._usage.tell(self._attempts, now, actions)
        return actions

    @property
    def keeps_answers(self) -> bool:
        """Whether the cache keeps answers: not of hybrid models, since no snapshot is taken at an answer's end."""
        return self.tiers is not None and not self._state_blocks

    @property
    def has_holders(self) -> bool:
        """Whether an attempt here has, or is to have, KV on other nodes."""
        return bool(self._home.attempts)

    def held_elsewhere(self) -> list[Attempt]:
        """Attempts that decode here with KV on other nodes."""
        attempts = self._home.attempts.values()
        return [attempt for attempt in attempts if attempt.state is DECODING and attempt.remote.there]

    @property
    def num_hosted(self) -> int:
        """Blocks of the engine set aside for KV of other nodes' attempts."""
        return self._holder.num_blocks

    def num_stowed(self, key: RequestId) -> int:
        """Leading blocks that are whole here, of a share of another node's attempt."""
        return self._holder.num_stowed(key)

    def check(self) -> None:
        """Raises AssertionError where an invariant is broken; for tests and the simulator."""
        self.scheduler.check()
        if self.tiers is not None:
            self.tiers.check()
        for attempt in self._attempts.values():
            assert attempt.state is not DECODING or not attempt.pinned, (
                "what decodes needs nothing of the tiers"
            )

    def check_idle(self) -> None:
        super().check_idle()
        scheduler = self.scheduler
        assert not self._forgotten, "a dropped attempt was not forgotten"
        self._home.check_idle()
        self._holder.check_idle()
        self._donors.check_idle()
        assert scheduler.run is None and scheduler.num_waiting == scheduler.num_running == 0
        assert scheduler.pool.available == scheduler.pool.num_blocks, "blocks did not come back"

    # An attempt begins and ends.

    def _begin(self, event: events.StartAttempt, now: int, actions: Actions) -> None:
        distrusts = event.route.request in self._distrusted
        if distrusts:
            event = self._without_cache(event)
        route, part = event.route, event.part
        extent = extent_of(route, event.num_tokens, self._block_size, self._state_blocks)
        attempt = Attempt.of(event, extent, part is PREFILL or self._stages > 1)
        self._attempts.add(attempt)
        reason = ""
        if route.holdings or route.growth:
            reason = self._home.begin(attempt) if self._stages == 1 else "a pipeline group has no holders"
        if reason:
            self._fail(attempt, reason, now, actions)
            return
        if route.taken and attempt.remote.planned and not self._state_blocks:
            actions += self._home.claim(attempt)
            return
        if attempt.assembly is not None:
            can = self.tiers is not None and self._stages == 1 and not self._state_blocks and not distrusts
            if not (can and self.scheduler.has_room(attempt)) and not self._disassemble(attempt, now, actions):
                return
            fetches = self._donors.begin(attempt)
            attempt.awaits = bool(fetches)
            for fetch in fetches:
                self._fetches.begin(fetch, actions)
        self._enter(attempt, now, actions)

    def _gather(self, attempt: Attempt, now: int, actions: Actions) -> bool:
        """Pins the donors' blocks of a prompt, or gives up assembling it. Returns whether the attempt goes on."""
        return self._donors.enter(attempt) or self._disassemble(attempt, now, actions)

    def _disassemble(self, attempt: Attempt, now: int, actions: Actions) -> bool:
        """Has all that is not cached computed, since donors are missing or of no use. Fails an attempt whose decode
        node has room for the packed prompt only. Returns whether the attempt goes on."""
        assembly = assembly_of(attempt.begin.route)
        if attempt.begin.part is PREFILL and assembly is not None and assembly.packing is not None:
            self._fail(attempt, "it cannot be assembled of its donors' KV", now, actions)
            return False
        self.scheduler.disassemble(attempt, attempt.begin.names)
        return True

    def _enter(self, attempt: Attempt, now: int, actions: Actions) -> None:
        """Queues an attempt for memory of the engine."""
        key, route, part = attempt.request, attempt.begin.route, attempt.begin.part
        fetch, scheduler = attempt.fetch, self.scheduler
        gathers = attempt.assembly is not None and not attempt.awaits
        if gathers and not self._gather(attempt, now, actions):
            return
        if part is DECODE:
            if route.handover_start and not self._pin_recalled(attempt):
                self._fail(attempt, "a prefix it was to take from its cache is not there", now, actions)
                return
            if fetch is not None:  # before the load that may follow at once
                self._fetch(attempt, fetch, actions)
            scheduler.expect(attempt, actions)
        else:
            if part is PREFILL:
                actions.append(events.OfferHandover(key, route.decode, attempt.extent))
                attempt.granted |= self._attempts.take_early(route.decode, key) is not None
            self._cut(actions)
            if fetch is not None:
                self._fetch(attempt, fetch, actions)
            scheduler.arrive(attempt)
            if fetch is None and attempt.num_cached and self.tiers is not None and self.tiers.ssd.held:
                self._read(attempt, attempt.num_cached, actions)  # before the load that may follow at once
        if scheduler.run is None:
            self._plan(now, actions)

    def _forget(self, attempt: Attempt, event: events.DropAttempt, now: int, actions: Actions) -> None:
        self._end(attempt, now, actions)

    def _end(self, attempt: Attempt, now: int, actions: Actions) -> None:
        """Ends an attempt in any state; its blocks are free once no run touches them."""
        key = attempt.begin.key
        del self._attempts[key]
        self._home.stop(attempt)
        actions += self._donors.end(attempt)
        self._fetches.end(key, actions)
        if self.scheduler.computes(attempt):
            self._forgotten.append(attempt)
            self._cut(actions)
        else:
            self._free(attempt, now, actions)

    def _release(self, attempt: Attempt, actions: Actions) -> None:
        """Ends what is under way for an attempt, here and at holders."""
        actions.append(events.ReleaseResources(attempt.begin.key))
        if attempt.remote.holders:
            self._home.end(attempt, actions)

    def _free(self, attempt: Attempt, now: int, actions: Actions) -> None:
        """Frees an attempt's blocks, for which others may wait."""
        self._release(attempt, actions)
        self.scheduler.forget(attempt)
        self._replan(now, actions)

    def _fail(
        self,
        attempt: Attempt,
        reason: str,
        now: int,
        actions: Actions,
        *,
        final: bool = False,
        no_room: bool = False,
    ) -> None:
        """Gives an attempt up; the conductor may try again, unless `final`."""
        self._end(attempt, now, actions)
        actions.append(self._attempts.failure(attempt, reason, final=final, no_room=no_room))

    def _broken(self, attempt: Attempt, event: events.Broken, now: int, actions: Actions) -> None:
        if event.distrust:
            self._distrusted[attempt.begin.route.request] = None
            if len(self._distrusted) > MAX_DISTRUSTED:
                del self._distrusted[next(iter(self._distrusted))]
        self._fail(attempt, event.reason, now, actions, final=event.final)

    @staticmethod
    def _without_cache(begin: events.StartAttempt) -> events.StartAttempt:
        """The same attempt without use of caches, which failed it before, and without names for what it computes."""
        alone = msgspec.structs.replace(begin.route, fetch=None, num_cached=0)
        return msgspec.structs.replace(begin, route=alone, names=())

    def _convert(self, event: events.Convert, now: int, actions: Actions) -> None:
        self._next_role = event.role
        self._maybe_switch(actions)

    def _maybe_switch(self, actions: Actions) -> None:
        if self._next_role is not None and self.scheduler.run is None:
            self.scheduler.change(self._limits[self._next_role])
            actions.append(RoleChanged(self.node, self._next_role))
            self._next_role = None

    # What stands still, and what is gone.

    def _gone(self, event: events.Gone, now: int, actions: Actions) -> None:
        """A peer's loss concerns hand-overs from it and to it, fetches from it and by it, attempts whose KV it holds,
        and its attempts whose KV lies here."""
        peer = event.peer
        self._fetches.gone(peer, now, actions)
        for attempt in list(self._attempts.values()):
            begin = attempt.begin
            awaits = begin.part is not MIXED and begin.peer == peer and not attempt.received
            if awaits and not attempt.due_ns:
                self._attempts.give_up(attempt, peer, event.reason, now, actions)
            if peer in attempt.remote.holders:
                self._lost_holder(attempt, event, now, actions)
        if self._holder.gone(peer, now, actions):
            self._replan(now, actions)

    def _lost_holder(self, attempt: Attempt, event: events.Gone, now: int, actions: Actions) -> None:
        """Fails an attempt whose KV a lost holder has; the loss of one that has none counts as its refusal."""
        peer, remote = event.peer, attempt.remote
        if remote.claimed.get(peer, 0) is None:
            self._found(peer, letters.ClaimReply(attempt.request, 0), now, actions)
        elif peer in remote.asked and not remote.has_some(peer):
            self._reserved(peer, letters.ReserveReply(attempt.request, False), now, actions)
        elif any(peer in holding.holders for holding in remote.planned):
            self._fail(attempt, f"{peer}, which has its KV, is gone: {event.reason}", now, actions)

    def _moved(self, event: events.Progress, now: int, actions: Actions) -> None:
        if not event.fetched:
            attempt = self._attempts.get(event.key)
            if attempt is not None:
                attempt.moved_ns = now
        else:
            self._fetches.moved(event.key, now)

    def _woken(self, event: events.Woken, now: int, actions: Actions) -> None:
        for attempt in self._attempts.due(now):
            self._fail(attempt, attempt.reason, now, actions)
        late = now - self._transfer_ns
        for attempt in list(self._attempts.values()):
            if 0 < attempt.moved_ns < late and attempt.state is RECEIVING and not attempt.received:
                self._fail(attempt, f"no KV came for {self._transfer_ns / NS_PER_S:g} s", now, actions)
        self._fetches.end_late(now, actions)
        if self._holder.expire(now, actions):
            self._replan(now, actions)

    # Handing over.

    def _granted(self, peer: NodeId, granted: letters.HandoverGranted, now: int, actions: Actions) -> None:
        attempt = self._attempts.get(granted.key)
        if attempt is None:
            self._attempts.put_early(peer, granted)
        elif attempt.begin.peer == peer and not attempt.granted:
            attempt.granted = True
            if attempt.state is COMPUTING:
                actions += attempt.admitted()
            self._send(attempt, actions)

    def _send(self, attempt: Attempt, actions: Actions) -> None:
        """Has a granted attempt sent from its first chunk on; a prompt to be packed only when it is packed."""
        is_due = attempt.is_whole or not attempt.packs
        if attempt.granted and attempt.started and is_due and not attempt.due_ns:
            peer, extent = attempt.begin.peer, attempt.extent
            actions.append(events.SendHandover(attempt.request, peer, extent, attempt.is_whole))

    def _prompt_computed(self, attempt: Attempt, actions: Actions) -> None:
        """Notes that a prompt is computed and its first token known."""
        attempt.sampled = True
        self._donors.end(attempt)
        self._maybe_finish(attempt, actions)

    def _maybe_finish(self, attempt: Attempt, actions: Actions) -> None:
        """Ends a hand-over once holders have all they are to have, for the decode node attends to all of it."""
        if attempt.packs:
            self._send(attempt, actions)
        elif attempt.granted and attempt.is_whole and not attempt.due_ns:
            actions.append(events.FinishHandover(attempt.begin.key))

    def _landed(self, peer: NodeId, landed: letters.HandoverConfirmed, now: int, actions: Actions) -> None:
        attempt = self._attempts.get(landed.key)
        if attempt is None or attempt.begin.peer != peer or attempt.state is not DEPARTING:
            return  # not all of it was sent: no such peer says so
        del self._attempts[landed.key]
        route = attempt.begin.route
        actions.append(PrefillFinished(route.request, route.attempt))
        self._free(attempt, now, actions)

    # Receiving.

    def _pin_recalled(self, attempt: Attempt) -> bool:
        """Pins the prefix that this node's own cache is to give. Returns False if it is not there any more."""
        begin, tiers = attempt.begin, self.tiers
        recall = begin.route.recall
        if recall is None:
            return False
        own = recall.start if attempt.fetch is not None else recall.stop
        if own and (tiers is None or tiers.match(begin.names[:own])[0] < own):
            return False
        if tiers is not None:  # what is fetched is to stay too until it is in the engine
            attempt.pinned = begin.names[: recall.stop]
            tiers.pin(attempt.pinned)
        return True

    def _check_recalled(self, attempt: Attempt, now: int, actions: Actions) -> None:
        """Fails an attempt whose recalled prefix came short or found no room, before its prompt is computed in vain."""
        begin, tiers = attempt.begin, self.tiers
        count = begin.route.handover_start
        if begin.key in self._attempts and tiers is not None and tiers.match(begin.names[:count])[0] < count:
            self._fail(attempt, NOT_RECALLED, now, actions)

    def _loaded(self, attempt: Attempt, event: events.Loaded, now: int, actions: Actions) -> None:
        if event.num_blocks < attempt.begin.route.handover_start:
            self._fail(attempt, NOT_RECALLED, now, actions)
            return
        attempt.recalled = True
        self.scheduler.unpin(attempt)
        self._maybe_whole(attempt, now, actions)

    def _received(self, attempt: Attempt, event: events.HandoverComplete, now: int, actions: Actions) -> None:
        attempt.received = True
        self._maybe_whole(attempt, now, actions)

    def _maybe_whole(self, attempt: Attempt, now: int, actions: Actions) -> None:
        """Lets an attempt join the batch once every KV group is whole: KV of all tokens, and the recurrent state."""
        if attempt.received and attempt.recalled and not attempt.remote.asked and attempt.state is RECEIVING:
            actions.append(events.SendLetter(attempt.begin.peer, letters.HandoverConfirmed(attempt.begin.key)))
            self.scheduler.imported(attempt)
            self._replan(now, actions)

    # Fetching from other nodes, and giving to them.

    def _fetch(self, attempt: Attempt, fetch: FetchOrder, actions: Actions) -> None:
        """Orders a prefix from another node; for a prefill with the recurrent state at its end, which comes with the
        hand-over for a decode."""
        begin = attempt.begin
        names, whole = begin.names[: fetch.stop], False
        if self._state_blocks and begin.part is not DECODE and names:
            names, whole = names + state_names(names[-1], self._state_blocks), True
        wanted = events.Fetch(begin.key, fetch.source, names, fetch.start, whole, fetch.codec, begin.tenant)
        self._fetches.begin(wanted, actions)

    def _fetched(self, event: events.BlocksFetched, now: int, actions: Actions) -> None:
        """Adopts fetched blocks into the cache, even if the attempt is over. A snapshot of a hybrid model is adopted
        only if every block before it arrived."""
        came = self._fetches.came(event, actions)
        if came is None:
            return
        if not event.ended:
            self._keep_fetched(*came, now, actions)
            return
        attempt, (fetch, stop) = self._attempts.get(event.key), came
        if attempt is None or attempt.begin.part is DECODE:
            if attempt is not None:
                attempt.fetch = None
            self._keep_fetched(fetch, stop, now, actions)
            if attempt is not None:
                self._check_recalled(attempt, now, actions)
            waited = self._donors.fetched(event.key)
            if waited is not None:
                self._donors_came(waited, now, actions)
            return
        if fetch.whole:
            count = len(fetch.names) - self._state_blocks
            stop = count if stop == len(fetch.names) else min(stop, count - 1)
        self.scheduler.fetched(attempt, stop, actions)
        self._plan(now, actions)
        self._tell_fetched(attempt, actions)

    def _donors_came(self, attempt: Attempt, now: int, actions: Actions) -> None:
        """Ends a prompt's wait for donors, all of whose fetches have ended."""
        attempt.awaits = False
        self._tell_fetched(attempt, actions)
        if self._gather(attempt, now, actions):
            self._replan(now, actions)

    @staticmethod
    def _tell_fetched(attempt: Attempt, actions: Actions) -> None:
        if attempt.fetch is None and not attempt.awaits:
            route = attempt.begin.route
            actions.append(FetchFinished(route.request, route.attempt))

    def _keep_fetched(self, fetch: events.Fetch, stop: int, now: int, actions: Actions) -> None:
        """Keeps a prefix in the cache, part of which came from another node."""
        if stop:
            self.scheduler.keep(fetch.names[:stop], actions, fetch.key, fetch.tenant)
            self._plan(now, actions)

    # KV that lies on other nodes, and that of others here.

    def _lend(self, attempt: Attempt, event: events.Lend, now: int, actions: Actions) -> None:
        moves = attempt.state is DECODING and self._stages == 1 and attempt.packing is None
        if not (moves and self._home.move(attempt, (event.holder,), event.num_blocks, actions)):
            actions.append(attempt.spread())

    def _repay(self, attempt: Attempt, event: events.Repay, now: int, actions: Actions) -> None:
        if not (attempt.state is DECODING and self._home.take_back(attempt, event, actions)):
            actions.append(attempt.spread())

    def _reserved(self, holder: NodeId, reserved: letters.ReserveReply, now: int, actions: Actions) -> None:
        attempt = self._attempts.get(reserved.key)
        if attempt is None or holder not in attempt.remote.asked:
            return
        is_ordered = attempt.remote.more is not None and not attempt.remote.growing
        if not self._home.reserved(attempt, holder, reserved.granted, now):
            self._fail(attempt, f"{holder} has no room for its KV", now, actions, no_room=True)
            return
        if reserved.granted:
            actions.append(events.OpenLine(holder))
        if is_ordered and not attempt.remote.asked:
            actions.append(attempt.spread())
        self._maybe_whole(attempt, now, actions)
        self._replan(now, actions)

    def _found(self, holder: NodeId, found: letters.ClaimReply, now: int, actions: Actions) -> None:
        attempt = self._attempts.get(found.key)
        if attempt is None:
            return
        if found.num_blocks:
            actions.append(events.OpenLine(holder))
        if self._home.found(attempt, holder, found.num_blocks):
            self._enter(attempt, now, actions)

    def _shipped(self, holder: NodeId, shipped: letters.ShipmentConfirmed, now: int, actions: Actions) -> None:
        attempt = self._attempts.get(shipped.key)
        if attempt is None or holder not in attempt.remote.holders:
            return
        if shipped.damaged:
            self._fail(attempt, f"a KV block came to {holder} damaged (seal mismatch)", now, actions)
            return
        attempt.remote.arrived(holder, shipped.stop)
        self._arrived(attempt, now, actions)

    def _reclaimed(self, event: events.Reclaimed, now: int, actions: Actions) -> None:
        attempt = self._home.reclaimed(event)
        if attempt is None or not event.whole:  # its blocks are free
            if attempt is not None:
                actions.append(attempt.spread())
            self._replan(now, actions)
        else:
            self._arrived(attempt, now, actions)

    def _arrived(self, attempt: Attempt, now: int, actions: Actions) -> None:
        """Frees what reached a holder, or what came home, as soon as no run touches the attempt."""
        if self.scheduler.computes(attempt):
            self._cut(actions)
            return
        self._ship(now, actions)
        self._replan(now, actions)

    def _ship(self, now: int, actions: Actions) -> None:
        """Settles arrived shipments and returns, finishes hand-overs that waited for them, and ships full blocks."""
        for attempt in self._home.settle(actions):
            self._maybe_finish(attempt, actions)
        self._home.ship(now, actions)

    def _drop(self, now: int, actions: Actions) -> None:
        gone, self.scheduler.dropped = self.scheduler.dropped, []
        for attempt in gone:
            if attempt.request in self._attempts:  # else it was forgotten
                dropped = self._attempts[attempt.request]
                self._fail(dropped, "others needed its memory", now, actions, no_room=True)

    def _shrink(self, peer: NodeId, wanted: letters.Shrink, now: int, actions: Actions) -> None:
        if self._holder.shrink(peer, wanted, now, actions):
            self._replan(now, actions)

    def _replan(self, now: int, actions: Actions) -> None:
        """Plans anew, since blocks became free or a request came."""
        self._cut(actions)
        if self.scheduler.run is None:
            self._plan(now, actions)

    # Runs.

    def _plan(self, now: int, actions: Actions) -> None:
        """Plans the next run, if none is out; hand-overs of prompts that begin in it begin, too."""
        run = self.scheduler.plan(actions, now)
        if self.scheduler.dropped:
            self._drop(now, actions)
        if run is None:
            return
        for piece in run.chunks:
            attempt = self._attempts.get(piece.request)
            if attempt is not None and not attempt.started:
                attempt.started = True
                self._send(attempt, actions)

    def _cut(self, actions: Actions) -> None:
        """Asks once for the end of the run that is out, since somebody waits for the next one."""
        run = self.scheduler.run
        if run is not None and not self._is_cut and run.steps > 1:
            self._is_cut = True
            actions.append(events.Cut())

    def _stepped(self, event: Stepped, now: int, actions: Actions) -> None:
        scheduler, run = self.scheduler, self.scheduler.run
        assert run is not None
        self._is_cut = False
        if self._forgotten:
            for attempt in self._forgotten:
                self._release(attempt, actions)
                scheduler.forget(attempt)
            self._forgotten.clear()
        over = [self._attempts.pop(key) for key in event.ended if key in self._attempts]
        for attempt in over:
            self._home.stop(attempt)
            self._donors.end(attempt)
        if run.chunks and event.steps and self._stages == 1:
            for piece in run.chunks:
                sampled = self._attempts.get(piece.request) if piece.samples else None
                if sampled is not None:
                    self._prompt_computed(sampled, actions)
        scheduler.step(event, actions)
        if self._sampled_early:
            early, self._sampled_early = self._sampled_early, []
            for sampled_event in early:
                self._sampled(sampled_event, now, actions)
        if self._home.attempts:
            self._ship(now, actions)
        self._plan(now, actions)
        for attempt in over:  # when what is saved of it has been taken over
            self._release(attempt, actions)
        if self._next_role is not None:
            self._maybe_switch(actions)

    def _sampled(self, event: events.Sampled, now: int, actions: Actions) -> None:
        if any(self.scheduler.computes(self._attempts[key]) for key in event.keys if key in self._attempts):
            self._sampled_early.append(event)  # the first stage has not said yet that it is through
            return
        for key in event.keys:
            attempt = self._attempts.get(key)
            if attempt is None:
                continue
            if key not in event.ended:
                self._prompt_computed(attempt, actions)
                continue
            del self._attempts[key]
            self._free(attempt, now, actions)

    def _missing(self, event: events.Missing, now: int, actions: Actions) -> None:
        """Shortens the cached prefix of an attempt to what could be loaded; to none with a recurrent state."""
        attempt, num_blocks = self._attempts.get(event.key), event.num_blocks
        if attempt is not None and attempt.assembly is not None:
            if not self._disassemble(attempt, now, actions):
                return
            num_blocks = min(num_blocks, attempt.cached // self._block_size)
        num_tokens = 0 if self._state_blocks else num_blocks * self._block_size
        actions.append(events.Shorten(event.key, num_tokens))
        if attempt is not None:
            self.scheduler.missing(attempt, num_blocks)

    # What is kept.

    def _read(self, attempt: Attempt, num_cached: int, actions: Actions) -> None:
        """Begins reading cached blocks from the SSD while the request waits."""
        tiers, names = self.tiers, attempt.begin.names[:num_cached]
        assert tiers is not None
        if self._state_blocks and names:
            names += state_names(names[-1], self._state_blocks)
        found, on_disk = tiers.match(names)
        if on_disk:
            actions.append(events.Read(attempt.begin.key, names[found - on_disk : found]))

    def _saved(self, event: Saved, now: int, actions: Actions) -> None:
        self.scheduler.saved(event.request)
        if self.scheduler.run is None:
            self._plan(now, actions)

    def _lost(self, event: events.BlocksLost, now: int, actions: Actions) -> None:
        if event.names:
            self.scheduler.lose(event.names, actions)
            self._plan(now, actions)

    def _recovered(self, event: events.PrefixesRecovered, now: int, actions: Actions) -> None:
        self.scheduler.recover(event.chains, actions)
