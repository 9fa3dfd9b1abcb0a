"""Somebody else's client: streams answers while others misbehave, and says how each came.

    python bystander.py < {"url": …, "body": …, "prompts": […]}

A process of its own, so that only the server can make it wait: it imports the standard library alone, and holds no
lock that an act of the tests may want. Each prompt is asked again and again, in a thread of its own, until standard
input ends; then the answers under way come to their end. Each answer is a JSON line on standard output.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
from typing import Any
from urllib.parse import urlsplit

WAIT_S = 60
"""An answer that stands still for so long is lost."""


class Bystander:
    def __init__(self, url: str, body: dict[str, Any]) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._at = parts.hostname, parts.port
        self._body, self._over, self._saying = body, threading.Event(), threading.Lock()

    def run(self, prompts: list[list[int]]) -> None:
        threads = [threading.Thread(target=self._ask_on, args=(prompt,)) for prompt in prompts]
        for thread in threads:
            thread.start()
        sys.stdin.read()
        self._over.set()
        for thread in threads:
            thread.join()

    def _ask_on(self, prompt: list[int]) -> None:
        while not self._over.is_set():
            told: dict[str, Any] = {"prompt": prompt, "tokens": [], "error": "", "gap_s": 0.0}
            try:
                self._ask(prompt, told)
            except (OSError, http.client.HTTPException, ValueError) as error:
                told["error"] = f"{type(error).__name__}: {error}"
                self._over.wait(0.1)
            with self._saying:
                print(json.dumps(told), flush=True)

    def _ask(self, prompt: list[int], told: dict[str, Any]) -> None:
        connection = http.client.HTTPConnection(*self._at, timeout=WAIT_S)
        try:
            last_s = time.monotonic()
            body = json.dumps(self._body | {"prompt": prompt, "stream": True})
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            if reply.status != 200:
                told["error"] = f"{reply.status}: {reply.read().decode()}"
                return
            told["error"] = "no [DONE]"
            for line in reply:
                if not line.startswith(b"data: "):
                    continue
                now_s = time.monotonic()
                told["gap_s"], last_s = max(told["gap_s"], now_s - last_s), now_s
                if line.startswith(b"data: [DONE]"):
                    told["error"] = ""
                    return
                event = json.loads(line.removeprefix(b"data: "))
                told["tokens"] += [token for each in event["choices"] for token in each["token_ids"]]
        finally:
            connection.close()


if __name__ == "__main__":
    asked = json.loads(sys.stdin.readline())
    Bystander(asked["url"], asked["body"]).run(asked["prompts"])
