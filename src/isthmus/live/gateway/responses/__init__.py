"""`POST /v1/responses`: the part of OpenAI's Responses API that keeps nothing between requests. A body becomes the
body of a chat completion (body.py); only the answer's format differs (wire.py)."""
