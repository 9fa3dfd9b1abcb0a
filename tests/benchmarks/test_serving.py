"""What the client is given, what of its files is kept and compared, and how servers are started and ended."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import msgspec
import pytest

from benchmarks import serving
from benchmarks.served import Side, running
from benchmarks.serving import ROWS, Chat, Figures, Pair, Random, result_of
from isthmus.bench import BenchError
from isthmus.bench.study import Spread
from isthmus.core.errors import StartError
from tests.benchmarks.conftest import program
from tests.served import alive

# Stands in for a server, and has a child as vLLM has: it must not outlive it.
FAKE_SERVER = """
import http.server, json, subprocess, sys

child = subprocess.Popen(["sleep", "600"])
print("child", child.pid, flush=True)

class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0

    def do_GET(self):
        self.answer(200)

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        Handler.asked += 1
        self.answer(200 if Handler.asked > 2 else 503)

    def answer(self, status):
        body = json.dumps({"data": [{"id": "fake"}]}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""

# Stands in for `vllm bench serve`: writes the file that it is asked for.
FAKE_CLIENT = """
import json, os, sys

print("= \\"ready\\"", flush=True)
for line in sys.stdin:
    arguments, log = json.loads(line)
    value = lambda name: arguments[arguments.index(name) + 1]
    completed = int(value("--num-prompts")) - FAILED
    figures = {"output_throughput": 10.0, "mean_ttft_ms": 5.0, "mean_tpot_ms": 2.0, "date": "today",
               "completed": completed, "total_output_tokens": 8 * completed}
    with open(os.path.join(value("--result-dir"), value("--result-filename")), "w") as file:
        json.dump(figures, file)
    with open(log, "a") as file:
        print(json.dumps(arguments), file=file)
    print("= {}", flush=True)
"""


def python(file: Path, source: str) -> str:
    """A Python that runs `source` whatever it is told to run."""
    script = file.with_suffix(".py")
    script.write_text(source)
    return program(file, script)


def fake(tmp_path: Path, name: str, source: str = FAKE_SERVER) -> Side:
    return Side(name, (python(tmp_path / name, source), "{port}"))


def pair_of(tmp_path: Path, *rows: serving.Row) -> Pair:
    return Pair("made up", tmp_path, fake(tmp_path, "ours"), fake(tmp_path, "peer"), rows)


def figures(tokens_per_s: float, ttft_ms: float, tpot_ms: float) -> Figures:
    return Figures(tokens_per_s, ttft_ms, tpot_ms, completed=4, total_output_tokens=32)


def test_turns_of_a_conversation_go_on_from_the_one_before() -> None:
    chat = Chat(conversations=3, turns=3, output=8, concurrency=2)
    requests = chat.messages(7)
    assert len(requests) == chat.requests == 9
    assert len({request[0]["content"] for request in requests}) == 1
    for turn in range(1, 3):
        for talk in range(3):
            before, now = requests[3 * (turn - 1) + talk], requests[3 * turn + talk]
            assert now[: len(before)] == before
            assert [message["role"] for message in now[len(before) :]] == ["assistant", "user"]
    said = [message["content"] for request in requests[6:] for message in request[1:]]
    assert len(said) == len(set(said)) == 15
    assert chat.messages(8) != requests == chat.messages(7)


def test_rows_have_names_and_half_a_load_still_fills_the_house() -> None:
    for row in ROWS:
        assert row.concurrency <= row.fewer().requests <= row.requests
    talk = ROWS[-1].fewer()
    assert isinstance(talk, Chat) and talk.conversations > talk.concurrency
    assert [row.name for row in serving.rows_named(["chat", "64/128x8"])] == ["chat", "64/128x8"]
    with pytest.raises(BenchError, match="no row is named 64/128; there are 64/128x1, "):
        serving.rows_named(["64/128"])


def test_results_are_medians_and_what_is_behind_is_said(tmp_path: Path) -> None:
    three = result_of("chat", "ours", [figures(10, 3, 1), figures(30, 1, 2), figures(20, 2, 9)])
    assert three.tokens_per_s == Spread(20, 10, 30)
    assert (three.ttft_ms.median, three.tpot_ms.median, three.rounds, three.tokens) == (2, 2, 3, 8)
    rows = (Random(8, 8, 1, 4), Random(8, 8, 2, 4))
    ours, peer = result_of(rows[0].name, "ours", [figures(10, 3, 1)]), [figures(9, 2, 1)]
    pair = pair_of(tmp_path, *rows)
    found = [ours, result_of(rows[0].name, "peer", peer), result_of(rows[1].name, "ours", peer)]
    lines = serving.verdicts(pair, found)
    assert lines == ["8/8x1: not ahead of peer in mean TTFT ms 3 against 2, ms a token 1 against 1"]
    assert len(serving.table_of(pair, found).rows) == 1
    short = msgspec.structs.replace(found[1], tokens=7.5)
    assert serving.verdicts(pair, [ours, short])[1] == "8/8x1: tokens of an answer 8.0, of peer 7.5"


def test_rounds_are_kept_and_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (Random(8, 8, 1, 4), Random(8, 8, 2, 6))
    monkeypatch.setattr(serving, "ROWS", rows)
    pair, folder = pair_of(tmp_path, *rows), tmp_path / "kept"
    client, said = python(tmp_path / "python", FAKE_CLIENT.replace("FAILED", "0")), []

    def measure(rounds: int) -> list[serving.Result]:
        said.clear()
        return serving.measure([pair], client, folder, rounds, said.append)

    found = measure(2)
    assert [(each.row, each.side, each.rounds) for each in found] == [
        (row.name, side, 2) for row in rows for side in ("ours", "peer")
    ]
    starts = [f"round {number}: starting {side}" for number in (1, 2) for side in ("ours", "peer")]
    assert [line for line in said if "starting" in line] == starts
    assert measure(2) == found and said == []
    (folder / "round-2" / "peer" / "8-8x2.json").unlink()
    assert measure(2) == found
    assert [line.split(" took")[0] for line in said if "starting" in line or "tokens/s" in line] == [
        "round 2: starting peer",
        "round 2: peer 8/8x2: 10.0 tokens/s, TTFT 5 ms, 2.0 ms a token",
    ]
    asked = [json.loads(line) for line in (folder / "round-1" / "ours" / "client.log").read_text().splitlines()]
    assert len(asked) == len(serving.WARM_UP) + len(rows)
    seeds = [arguments[arguments.index("--seed") + 1] for arguments in asked]
    assert seeds == ["0", "0", "1000", "1001"]
    other = msgspec.structs.replace(pair, ours=dataclasses.replace(pair.ours, command=("other", "{port}")))
    with pytest.raises(BenchError, match="holds measurements of another ours; name another folder"):
        serving.measure([other], client, folder, 2, said.append)


def test_a_request_that_failed_ends_the_run(tmp_path: Path) -> None:
    pair = pair_of(tmp_path, Random(8, 8, 1, 4))
    client = python(tmp_path / "python", FAKE_CLIENT.replace("FAILED", "1"))
    with pytest.raises(BenchError, match=r"1 of 16 requests of 64/16x16 failed; see .*client\.log"):
        serving.measure([pair], client, tmp_path / "kept", 1, lambda line: None)


def test_a_server_is_ended_with_its_children(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with running(fake(tmp_path, "one"), log) as server:
        assert server.model == "fake" and server.ready_s > 0
        child = int(log.read_text().split()[1])
        assert alive(child)
        assert log.read_text().count("POST /v1/completions") == 3
    until = time.monotonic() + 30
    while alive(child):
        assert time.monotonic() < until, "the child outlived its server"
        time.sleep(0.02)


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    side = fake(tmp_path, "one", "print('no room'); raise SystemExit('for me')")
    with (
        pytest.raises(StartError, match=r"one ended at its start; .*log ends with: for me"),
        running(side, tmp_path / "log"),
    ):
        pass
    missing = Side("x", ("/no/python",))
    with pytest.raises(StartError, match="/no/python: cannot be run"), running(missing, tmp_path / "log"):
        pass


def test_a_client_that_is_not_there(tmp_path: Path) -> None:
    pair = pair_of(tmp_path, Random(8, 8, 1, 4))
    bare = program(tmp_path / "python", "-S")
    with pytest.raises(BenchError, match="vllm bench serve cannot be imported: No module named 'vllm'"):
        serving.measure([pair], bare, tmp_path / "kept", 1, lambda line: None)
