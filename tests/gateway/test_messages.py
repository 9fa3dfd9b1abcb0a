from __future__ import annotations

import pydantic
import pytest

from isthmus.gateway.messages import Message


def refused(**fields: object) -> str:
    with pytest.raises(pydantic.ValidationError) as caught:
        Message.model_validate({"role": "user", "content": "hi"} | fields)
    return str(caught.value)


def test_text_parts_become_lines() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert Message.model_validate({"role": "user", "content": parts}).content == "a\nb"


def test_an_answer_can_be_sent_back_as_it_came() -> None:
    came = {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "tool_calls": None}
    assert Message.model_validate(came).for_template() == {"role": "assistant", "content": "x"}


def test_names_reach_the_template() -> None:
    message = Message.model_validate({"role": "user", "content": "x", "name": "ann"})
    assert message.for_template() == {"role": "user", "content": "x", "name": "ann"}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "must be a string or a list"),
        (5, "must be a string or a list"),
        (["a"], "part 0 must be an object"),
        ([{"type": "text", "text": "a"}, {"type": "image_url"}], "part 1 has type 'image_url'"),
        ([{"type": "input_audio"}], "part 0 has type 'input_audio'; only 'text' is supported"),
        ([{"type": "text"}], "part 0 must have a string in its field 'text'"),
        ([{"type": "text", "text": "a", "extra": 1}], "part 0 has an unknown field 'extra'"),
    ],
)
def test_wrong_content(content: object, complaint: str) -> None:
    assert complaint in refused(content=content)


def test_wrong_roles() -> None:
    assert "'tool' is not supported" in refused(role="tool")
    assert "must be one of system, developer, user, assistant" in refused(role="bot")
    assert "must be one of" in refused(role=["user"])


def test_tool_calls_are_refused() -> None:
    assert "supported only as []" in refused(tool_calls=[{}])
    assert "not supported" in refused(tool_call_id="x")
