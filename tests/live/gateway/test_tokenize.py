"""What the model sees of a text or a conversation, and back."""

from __future__ import annotations

from isthmus.live.gateway import GatewayTokenizer

from . import folder
from .fake import CARD
from .inprocess import Poster

MESSAGES = [{"role": "user", "content": "hi"}]


def test_a_text(post: Poster, tokenizer: GatewayTokenizer) -> None:
    body = post.post("/tokenize", prompt="hé", return_token_strs=True).json()
    assert body["tokens"] == tokenizer.encode_text("hé")
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
    assert body["max_model_len"] == CARD.max_length
    plain = post.post("/tokenize", prompt="hé", add_special_tokens=False).json()
    assert plain["tokens"] == folder.byte_tokens("hé")
    assert "token_strs" not in plain


def test_messages_as_a_chat_sees_them(post: Poster) -> None:
    body = post.post("/tokenize", model="acme/tiny", messages=MESSAGES).json()
    chat = post.chat(messages=MESSAGES, return_token_ids=True).json()
    assert body["tokens"] == chat["prompt_token_ids"]
    closed = post.post("/tokenize", messages=MESSAGES, add_generation_prompt=False).json()
    assert closed["tokens"] == body["tokens"][: closed["count"]]
    assert closed["count"] < body["count"]


def test_back(post: Poster) -> None:
    tokens = [*folder.byte_tokens("grüß"), folder.EOS]
    assert post.post("/detokenize", tokens=tokens).json() == {"prompt": "grüß" + "<eos>"}
    assert post.post("/detokenize", tokens=[]).json() == {"prompt": ""}


def test_what_cannot_be_read(post: Poster) -> None:
    for path, fields, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "model": "other"}, "model"),
        ("/detokenize", {"tokens": [CARD.vocab_size]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ):
        response = post.post(path, **fields)
        assert response.status_code in (400, 404)
        assert response.json()["error"]["param"] == param
