from __future__ import annotations

from typing import Any

import pytest

from isthmus.core.errors import RequestError
from isthmus.core.types import Sampling
from isthmus.live.gateway.requests import CompletionRequest
from isthmus.live.gateway.sampling import Sampler, choice_seed, sampler_of
from isthmus.live.gateway.tokenizer import GenerationDefaults

from .fake import CARD

DEFAULTS = GenerationDefaults(eos=(258, 7), temperature=0.6, top_p=0.9, top_k=20)


def sampler(**fields: Any) -> Sampler:
    request = CompletionRequest(model="m", prompt="x", **fields)
    return sampler_of(request, DEFAULTS, CARD, logprobs=request.logprobs)


def test_defaults_are_the_model_s() -> None:
    assert sampler().base == Sampling(temperature=0.6, top_p=0.9, top_k=20, stop_tokens=(258, 7))


def test_the_request_comes_first() -> None:
    fields = {
        "temperature": 0.0,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "repetition_penalty": 1.2,
        "logprobs": 4,
    }
    base = sampler(**fields, logit_bias={"5": 2}, stop_token_ids=[7, 9]).base
    assert base == Sampling(**fields, logit_bias=((5, 2.0),), stop_tokens=(258, 7, 9))  # type: ignore[arg-type]


def test_top_k_minus_one_is_off() -> None:
    assert sampler(top_k=-1).base.top_k == 0


def test_ignore_eos_leaves_only_the_client_s_stop_tokens() -> None:
    assert sampler(ignore_eos=True).base.stop_tokens == ()
    assert sampler(ignore_eos=True, stop_token_ids=[9]).base.stop_tokens == (9,)


@pytest.mark.parametrize("fields", [{"stop_token_ids": [1, 300]}, {"logit_bias": {"300": 1}}])
def test_ids_outside_the_vocabulary(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="holds token id 300; this model's ids are 0 to 299") as caught:
        sampler(**fields)
    assert caught.value.param in fields


def test_a_seed_repeats() -> None:
    first, again = (sampler(seed=5).for_prompt(3) for _ in range(2))
    assert first == again
    assert len({sampling.seed for sampling in first}) == 3
    assert first[0] == sampler(seed=5).for_prompt(1)[0]


def test_without_seed_each_prompt_draws_its_own() -> None:
    unseeded = sampler()
    seeds = {sampling.seed for _ in range(4) for sampling in unseeded.for_prompt(2)}
    assert len(seeds) == 8


@pytest.mark.parametrize("seed", [0, 5, -5, 2**63 - 1, -(2**63)])
def test_seeds_have_63_bits(seed: int) -> None:
    assert all(0 <= choice_seed(seed, choice) < 2**63 for choice in range(16))
