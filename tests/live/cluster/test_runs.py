"""Runs of an engine: what is counted, what is waited for, and what nobody asks for any more."""

from __future__ import annotations

from itertools import count
from typing import Any

from isthmus.core.attempts import Route
from isthmus.core.node.events import Broken, LoadBlocks, Missing, Shorten, StartAttempt
from isthmus.core.scheduler import Admitted, Piece, Preempted, Run, Stepped
from isthmus.core.types import BlockName, NodeId, RequestId, Role, Sampling, Span
from isthmus.live.cluster.runs import Runs
from isthmus.live.kv.cache import PrefixMissing
from isthmus.live.peers.messages import Output, Scores
from tests.live.cluster.test_node import HERE, Interrupted, Owner

A, B = RequestId("a#1"), RequestId("b#1")
NAMES: tuple[BlockName, ...] = (b"x", b"y", b"z")
LAYERS = 2


class Loading:
    """A prefix of which `num_blocks` come. `waited`: for which layers, and how many blocks of each."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.waited: list[tuple[int, int]] = []

    def wait(self, layer: int, num_blocks: int) -> None:
        self.waited.append((layer, num_blocks))
        if self.num_blocks < num_blocks:
            raise PrefixMissing(self.num_blocks)


class Mover:
    """`loads`: under way; `ready`: what could leave, `first`: the tokens that go with it."""

    def __init__(self) -> None:
        self.loads: dict[RequestId, Loading] = {}
        self.done: list[RequestId] = []
        self.ready: list[tuple[RequestId, Span, Span]] = []
        self.first: list[tuple[RequestId, int]] = []

    def load_of(self, key: RequestId) -> Loading | None:
        return self.loads.get(key)

    def loaded(self, key: RequestId) -> None:
        self.done.append(key)

    def kv_ready(self, key: RequestId, layers: Span, tokens: Span, blocks: Any) -> None:
        self.ready.append((key, layers, tokens))

    def first_token(self, key: RequestId, token: int) -> None:
        self.first.append((key, token))


class Kit:
    """Runs of an engine of two layers. Each look at the clock finds it a second later."""

    def __init__(self) -> None:
        self.mover, self.outputs, self.scores = Mover(), list[Output](), list[Scores]()
        clock = count(0, 10**9)
        self.runs = Runs(
            Interrupted(), self.mover, self.outputs.extend, self.scores.append, lambda: next(clock)
        )  # type: ignore[arg-type]

    def begin(self, key: RequestId, num_tokens: int, part: Role = Role.MIXED, **asked: Any) -> None:
        route = Route(RequestId(key[0]), 1, HERE, HERE if part is Role.MIXED else NodeId("there"))
        text = {"tokens": tuple(range(num_tokens)), "num_prompt": num_tokens}
        sampling = Sampling(temperature=0, **asked)
        self.runs.begin(StartAttempt(key, part, route, num_tokens, 100, sampling=sampling, **text))

    def run(self, *pieces: Piece) -> list[Missing | Stepped]:
        execution = self.runs.start(Run(pieces, 0, 0, 1, list))
        self.runs.compute(execution)
        self.runs.add_tokens(execution)
        return self.runs.finish(execution)


def test_a_prefix_that_could_not_be_loaded_is_no_hit() -> None:
    """Only once counted, though the attempt is pre-empted and admitted again."""
    owner, key = Owner(), RequestId("a#1")
    route = Route(RequestId("a"), 1, HERE, HERE)
    owner.runs.begin(StartAttempt(key, Role.MIXED, route, 20, 30, tokens=tuple(range(20)), num_prompt=20))
    counters = owner.runs.counters
    for _ in range(2):
        owner.runs.admitted(Admitted(key, 16, (), ()))
        assert (counters["prefix_cache_hits"], counters["prefix_cache_queries"]) == (16, 20)
    owner.runs.shortened(Shorten(key, 4))
    assert (counters["prefix_cache_hits"], counters["prefix_cache_queries"]) == (4, 20)
    owner.runs.shortened(Shorten(key, 8))
    assert counters["prefix_cache_hits"] == 4, "it was shorter before"


def test_a_prefix_is_waited_for_layer_by_layer_and_once() -> None:
    kit, load = Kit(), Loading(2)
    kit.begin(A, 10)
    kit.runs.loading(LoadBlocks(A, NAMES[:2], (0, 1), 8))
    kit.mover.loads[A] = load
    assert kit.run(Piece(A, 8, 1, (0, 1, 2), False)) == [Stepped(1, (), ())]
    assert load.waited == [(layer, 2) for layer in range(LAYERS)] and kit.mover.done == [A]
    assert kit.runs.counters["kv_wait_seconds"] == LAYERS
    kit.run(Piece(A, 9, 1, (0, 1, 2), True))
    assert len(load.waited) == LAYERS and len(kit.outputs) == 1


def test_what_is_missing_is_the_prefix_that_was_waited_for_last_and_the_iteration_does_not_count() -> None:
    kit = Kit()
    for key, blocks, here in ((A, (0, 1, 2), 2), (B, (3, 4, 5), 1)):
        kit.begin(key, 10)
        kit.runs.loading(LoadBlocks(key, NAMES[:2], blocks[:2], 8))
        kit.mover.loads[key] = Loading(here)
    pieces = [Piece(A, 8, 2, (0, 1, 2), True), Piece(B, 8, 2, (3, 4, 5), True)]
    assert kit.run(*pieces) == [Missing(B, 1), Stepped(0, (), ())]
    assert not kit.outputs and not kit.mover.done and kit.runs.counters["iterations"] == 0
    kit.runs.shortened(Shorten(B, 4))
    assert kit.run(pieces[0], Piece(B, 4, 6, (3, 4, 5), True)) == [Stepped(1, (), ())]
    assert [request for request, _, _ in kit.outputs] == ["a", "b"] and kit.mover.done == [A, B]


def test_of_a_prompt_whole_blocks_leave_as_they_are_computed_and_the_rest_at_its_end() -> None:
    kit = Kit()
    kit.begin(A, 10, Role.PREFILL)
    kit.begin(B, 3)
    kit.run(Piece(A, 0, 3, (0, 1, 2), False), Piece(B, 0, 3, (3,), True))
    assert not kit.mover.ready, "no block is whole"
    kit.run(Piece(A, 3, 6, (0, 1, 2), False))
    kit.run(Piece(A, 9, 1, (0, 1, 2), True))
    layers = [Span(layer, layer + 1) for layer in range(LAYERS)]
    assert kit.mover.ready == [(A, layer, Span(0, stop)) for stop in (8, 10) for layer in layers]
    assert kit.mover.first == [(A, kit.outputs[-1][2].token)]


def test_a_prompt_is_scored_chunk_by_chunk_and_not_again_when_its_answer_has_begun() -> None:
    """The last token of a chunk is scored against the first of the next. Who does not ask is not scored."""
    kit = Kit()
    kit.begin(A, 9, prompt_logprobs=1)
    kit.begin(B, 3)
    blocks = (0, 1, 2)
    kit.run(Piece(A, 0, 4, blocks, False), Piece(B, 0, 3, (3,), True))
    kit.run(Piece(A, 4, 4, blocks, False))
    kit.runs.preempted(Preempted(A))
    kit.run(Piece(A, 0, 8, blocks, False))
    kit.run(Piece(A, 8, 1, blocks, True))
    told = [
        (each.request, each.attempt, each.first, [score.top[0][0] for score in each.logprobs])
        for each in kit.scores
    ]
    assert told == [
        ("a", 1, 0, [1, 2, 3, 4]), ("a", 1, 4, [5, 6, 7, 8]), ("a", 1, 0, [1, 2, 3, 4, 5, 6, 7, 8]),
    ]  # fmt: skip
    kit.run(Piece(A, 9, 1, blocks, True))
    kit.runs.preempted(Preempted(A))
    kit.run(Piece(A, 0, 11, blocks, True))
    assert len(kit.scores) == 3 and len(kit.outputs) == 4


def test_what_no_token_can_be_chosen_for_breaks_and_what_is_computed_beside_it_goes_on() -> None:
    """The node hears of it before it plans anew."""
    kit = Kit()
    kit.begin(A, 10)
    kit.begin(B, 6, grammar="there is no tokenizer here")
    execution = kit.runs.start(
        Run((Piece(B, 0, 6, (4, 5), True), Piece(A, 0, 10, (0, 1, 2), True)), 0, 0, 9, list)
    )
    kit.runs.compute(execution)
    assert execution.over and not execution.ended, "its run is over"
    kit.runs.add_tokens(execution)
    broken, stepped = kit.runs.finish(execution)
    assert isinstance(broken, Broken) and broken.key == B and not broken.distrust
    assert "grammar" in broken.reason
    assert stepped == Stepped(1, ())
    assert [request for request, _, _ in kit.outputs] == [RequestId("a")]
