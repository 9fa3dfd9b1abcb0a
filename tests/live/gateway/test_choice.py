from __future__ import annotations

from collections.abc import Sequence

import pytest

from isthmus.core.errors import ProtocolError
from isthmus.core.types import FinishReason, Job, RequestId, Sampling
from isthmus.live.gateway import GatewayTokenizer
from isthmus.live.gateway.choice import Choice, Delta, joined
from isthmus.live.gateway.detokenizer import StopMatcher

from . import folder
from .fake import FakeBackend, FakeStream, says
from .test_detokenizer import BOS, SENTENCEPIECE


@pytest.fixture
def run(tokenizer: GatewayTokenizer, backend: FakeBackend):  # type: ignore[no-untyped-def]
    """Pushes tokens through a choice with the given stop strings."""

    def run(
        tokens: Sequence[int], *stops: str, finish: FinishReason | None = FinishReason.STOP, per_batch: int = 1
    ) -> tuple[Choice, list[Delta]]:
        job = Job(RequestId("r"), (1,), 100, Sampling())
        stream = FakeStream(backend, job, [])
        choice = Choice(0, job, stream, tokenizer.detokenizer(), StopMatcher(stops))
        deltas = []
        for batch in says(tokens, finish, per_batch=per_batch, cached_tokens=3):
            assert not isinstance(batch, str | Exception)
            deltas.append(choice.push(batch))
            if choice.finish:
                break
        return choice, deltas

    return run


def test_the_token_that_ends_an_answer_counts_but_gives_no_text(run) -> None:  # type: ignore[no-untyped-def]
    choice, deltas = run([*folder.byte_tokens("ab"), ord("!")])
    assert joined(deltas) == Delta("ab", [97, 98, 33], [], FinishReason.STOP)
    assert (choice.num_tokens, choice.cached_tokens, choice.stopped) == (3, 3, False)


def test_at_the_length_limit_the_last_token_is_text(run) -> None:  # type: ignore[no-untyped-def]
    _, deltas = run(folder.byte_tokens("ab"), finish=FinishReason.LENGTH)
    assert joined(deltas) == Delta("ab", [97, 98], [], FinishReason.LENGTH)


@pytest.mark.parametrize("per_batch", [1, 2, 3, 100])
def test_a_stop_string_ends_the_answer_at_its_token(run, per_batch: int) -> None:  # type: ignore[no-untyped-def]
    choice, deltas = run(folder.byte_tokens("one, two, three"), "two", finish=None, per_batch=per_batch)
    assert joined(deltas) == Delta("one, ", folder.byte_tokens("one, two"), [], FinishReason.STOP)
    assert choice.num_tokens == 8
    assert choice.stopped


def test_held_text_comes_with_the_end(run) -> None:  # type: ignore[no-untyped-def]
    _, deltas = run([*folder.byte_tokens("a\nU"), 0xE2, folder.EOS], "\nUser")
    assert [delta.text for delta in deltas] == ["a", "", "", "", "\nU\ufffd"]


def test_a_stop_string_may_be_complete_only_with_the_flush(run) -> None:  # type: ignore[no-untyped-def]
    choice, deltas = run([97, 0xE2], "\ufffd", finish=FinishReason.LENGTH)
    assert joined(deltas).text == "a"
    assert choice.finish is FinishReason.STOP


@pytest.mark.parametrize("stop", [" Hello", "o wor"])
def test_a_stop_string_may_begin_with_the_space_before_an_answer(backend: FakeBackend, stop: str) -> None:
    job = Job(RequestId("r"), (BOS, 2), 100, Sampling())
    detokenizer = SENTENCEPIECE.detokenizer(job.tokens)
    choice = Choice(0, job, FakeStream(backend, job, []), detokenizer, StopMatcher([stop]))
    [batch] = says([1, 2], None, per_batch=2)
    assert not isinstance(batch, str | Exception)
    assert choice.push(batch).text == " Hell"[: 5 * (stop != " Hello")]
    assert choice.stopped


def test_missing_logprobs_are_the_cluster_s_fault(tokenizer: GatewayTokenizer, backend: FakeBackend) -> None:
    job = Job(RequestId("r-0"), (1,), 100, Sampling(logprobs=1))
    choice = Choice(0, job, FakeStream(backend, job, []), tokenizer.detokenizer(), StopMatcher([]))
    [batch] = says([97])
    assert not isinstance(batch, str | Exception)
    with pytest.raises(ProtocolError, match="r-0: a token came without"):
        choice.push(batch)
