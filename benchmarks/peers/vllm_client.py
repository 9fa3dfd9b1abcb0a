"""`vllm bench serve`, run by its path in an interpreter that has vLLM and not Isthmus.

The console script of the CPU build does not start (it asks for the version of a distribution of another name), so
this calls what that script calls, with the same arguments. One process serves many calls: to import vLLM takes
longer than most rows. Reads commands as lines of JSON, answers with lines `= JSON`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any


def main() -> None:
    try:
        client, parser = _load()
    except Exception as error:
        return answer({"error": f"vllm bench serve cannot be imported: {error}"})
    answer("ready")
    for line in sys.stdin:
        arguments, log = json.loads(line)
        answer(measure(client, parser, arguments, log))
    return None


def _load() -> Any:
    """Models and tokenizers are folders here: nothing is to be asked of the hub."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    return serve.main, parser


def measure(client: Any, parser: Any, arguments: list[str], log: str) -> dict[str, Any]:
    """What the client says goes to the log; SystemExit is what its parser raises."""
    with open(log, "a") as sink, contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
        try:
            client(parser.parse_args(arguments))
        except (Exception, SystemExit) as error:
            return {"error": f"vllm bench serve failed: {error!r}; see {log}"}
    return {}


def answer(value: Any) -> None:
    print("=", json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
