"""`POST /v1/responses`, the part of OpenAI's Responses API that keeps nothing between requests.

A body is the body of a chat completion in other words, and becomes one (`chat.py`); what the answer looks like is
all that differs.
"""
