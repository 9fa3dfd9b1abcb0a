"""A cluster whose prompts are assembled from each other's, judged by the tokens, which the conductor does not know."""

from __future__ import annotations

from collections.abc import Sequence

import blake3

from isthmus.core.attempts import Donor
from isthmus.core.conductor import (
    Action,
    Event,
    PromptContent,
    Remember,
    RequestArrived,
    Route,
    Rules,
    Unremember,
)
from isthmus.core.reuse import MIN_PASSAGE, SIMILAR, cut, similarity
from isthmus.core.types import BlockName, RequestId, Reuse

from .cluster import BLOCK_SIZE, Cluster

LEAST = 60
RULES = Rules(reuse_tokens=LEAST, reuse_prompts=12)


def names_of(tokens: Sequence[int], salt: str) -> tuple[BlockName, ...]:
    """Of the full blocks: each stands for all before it."""
    found = list[BlockName]()
    for stop in range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE):
        found.append(blake3.blake3(repr((salt, tokens[:stop])).encode()).digest(length=16))
    return tuple(found)


def content_of(tokens: Sequence[int], reuse: Reuse, salt: str, signature: bytes) -> PromptContent:
    pieces, stops = cut(tokens, salt)
    return PromptContent(reuse, salt.encode(), pieces, stops, signature)


class Readers(Cluster):
    """Every prompt by request; those that the conductor wants remembered."""

    def __init__(self, rules: Rules = RULES) -> None:
        super().__init__(rules)
        self.tokens: dict[RequestId, tuple[int, ...]] = {}
        self.remembered: dict[RequestId, RequestArrived] = {}
        self.num_assembled = self.num_fetched = 0

    def reads(
        self,
        request: str,
        tokens: Sequence[int],
        reuse: Reuse = Reuse.CHUNKS,
        *,
        salt: str = "s",
        signature: bytes = b"",
        max_tokens: int = 10,
    ) -> Route | None:
        """Where its prompt goes, if it is not turned away."""
        name = RequestId(request)
        self.tokens[name] = tuple(tokens)
        content = None if reuse is Reuse.EXACT else content_of(tokens, reuse, salt, signature)
        arrived = RequestArrived(name, salt, len(tokens), max_tokens, names_of(tokens, salt), content=content)
        routes = [action for action in self.on(arrived) if isinstance(action, Route)]
        return routes[0] if routes else None

    def through(self, request: str) -> None:
        """Its prompt is computed, in the time that was predicted, and what has a name is in the cache."""
        self.now += self.routes[RequestId(request)].work_ns
        self.first_token(request)
        self.finish_prefill(request)

    def _act(self, action: Action, event: Event) -> None:
        match action:
            case Remember():
                assert action.request not in self.remembered
                self.remembered[action.request] = self.arrived[action.request][0]
                route = self.routes[action.request]
                assert route.assembly is None, "errors would add up"
                content = self.remembered[action.request].content
                assert content is not None and content.reuse is not Reuse.EXACT, "who did not ask is remembered"
            case Unremember():
                del self.remembered[action.request]
            case _:
                super()._act(action, event)

    def _on_route(self, route: Route) -> None:
        super()._on_route(route)
        if route.assembly is not None:
            self._judge_assembly(route)

    def _judge_assembly(self, route: Route) -> None:
        assembly, (facts, _) = route.assembly, self.arrived[route.request]
        content, tokens = facts.content, self.tokens[route.request]
        assert assembly is not None and content is not None and content.reuse is not Reuse.EXACT
        assert route.attempt == 1 and not route.handover_start and not route.holdings
        cached = min(route.num_cached * BLOCK_SIZE, len(tokens) - 1)
        assert len(tokens) - cached >= self.rules.reuse_tokens, "a short prompt"
        assert 0 < assembly.num_reused <= len(tokens) - cached
        for donor in assembly.donors:
            other = self.remembered[donor.request]
            assert other.content is not None and other.content.scope == content.scope, "of another tenant"
            assert donor.names == other.names[: len(donor.names)] and 0 <= donor.first < len(donor.names)
            self._judge_copy(route, donor)
        if assembly.selection.alike:
            assert content.reuse is Reuse.SEMANTIC
            first = self.remembered[assembly.donors[0].request].content
            assert first is not None and similarity(content.signature, first.signature) >= SIMILAR
        covered = list[int]()
        for passage in assembly.passages:
            donor = assembly.donors[passage.donor]
            assert passage.count >= MIN_PASSAGE and passage.at >= cached
            here = tokens[passage.at : passage.at + passage.count]
            there = self.tokens[donor.request][passage.start : passage.start + passage.count]
            assert here == there and len(here) == passage.count, "another text"
            assert donor.first * BLOCK_SIZE <= passage.start
            assert passage.start + passage.count <= len(donor.names) * BLOCK_SIZE, "what no cache has"
            covered += range(passage.at, passage.at + passage.count)
        assert len(covered) == len(set(covered)), "a token with two donors"
        self.num_assembled += 1

    def _judge_copy(self, route: Route, donor: Donor) -> None:
        """What the node has not itself comes from one that does."""
        own = set(self.stored[route.prefill])
        have = donor.names if donor.fetch is None else donor.names[: donor.fetch.start]
        assert own >= set(have), "a donor that is not there"
        if donor.fetch is not None:
            assert donor.fetch.stop == len(donor.names) and donor.fetch.source != route.prefill
            assert set(self.stored[donor.fetch.source]) >= set(donor.names)
            self.num_fetched += 1
