"""What nodes of other machines are told to join with."""

from __future__ import annotations

import pytest

from isthmus.cluster.join_token import JoinToken

PIN = "A" * 43 + "_"


@pytest.mark.parametrize("address", ["head:7000", "10.0.0.1:7000", "[fd00::1]:7000"])
@pytest.mark.parametrize("secret", ["", "secret", "with # and / and é", "x" * 200])
def test_a_token_is_read_as_it_was_written(address: str, secret: str) -> None:
    token = JoinToken(address, PIN, secret)
    assert JoinToken.parse(str(token)) == token
    assert str(token).startswith(f"isthmus://{address}#") and " " not in str(token)


def test_an_address_alone_names_no_authority() -> None:
    assert JoinToken.parse("head:7000") == JoinToken("head:7000", "", "")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("head", "is not HOST:PORT"),
        ("isthmus://head#" + PIN, "is not HOST:PORT"),
        ("isthmus://head:7000", "not whole"),
        ("isthmus://head:7000#", "not whole"),
        ("isthmus://head:7000#" + PIN[1:], "not whole"),
        ("isthmus://head:7000#" + PIN[:-1] + "!", "not whole"),
        ("isthmus://head:7000#" + PIN + "c2VjcmV0!", "damaged"),
        ("isthmus://head:7000#" + PIN + "_____w", "damaged"),
    ],
)
def test_a_token_that_was_damaged_is_refused_and_not_quoted(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told) as caught:
        JoinToken.parse(text)
    assert "c2VjcmV0" not in str(caught.value)
