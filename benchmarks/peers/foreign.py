"""A peer in a Python interpreter of its own, which has what the peer needs and not Isthmus."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from isthmus.bench import BenchError
from isthmus.core.errors import StartError


class Foreign:
    """A script of ours in another Python interpreter. Asks and answers are lines of JSON."""

    def __init__(self, python: str, script: str, *arguments: str) -> None:
        command = [python, "-I", str(Path(__file__).with_name(script)), *arguments]
        quiet = {**os.environ, "GLOG_minloglevel": "3", "MC_LOG_LEVEL": "ERROR"}
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=quiet,
            )
        except OSError as error:
            raise StartError(f"{python}: cannot be run: {error.strerror}") from None
        self._script = script
        try:
            self.hello: Any = self._receive()
        except (BenchError, StartError):
            self.close()
            raise

    def ask(self, *command: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._receive()

    def _receive(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:  # what the libraries print there is no answer
            if line.startswith("= "):
                answer = json.loads(line[2:])
                if isinstance(answer, dict) and "error" in answer:
                    raise BenchError(answer["error"])
                return answer
        raise StartError(f"{self._script} ended without an answer")

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
