"""Takes away one protection at a time and sees that its test fails: `make protections ARGS="hand-over"`.

`protections.yaml` has them: what is to hold, where, how it is taken away, and the test. Each is tried in a copy of the
tree, alone, since a second check behind it must not hide that the first is gone.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import yaml

from tests.scratch import ROOT, copied, environment

LIMIT_S = 240


class Protection(NamedTuple):
    what: str
    path: str
    old: str
    new: str
    test: str


def protections(word: str = "") -> list[Protection]:
    """Those whose name has the word in it."""
    rows = yaml.safe_load((ROOT / "tests/protections.yaml").read_text())
    return [Protection(**row) for row in rows if word in row["what"]]


def passes(scratch: Path, *tests: str) -> bool:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    env = environment(scratch, PYTHONDONTWRITEBYTECODE="1")
    try:
        status = subprocess.run(command, cwd=scratch, env=env, timeout=LIMIT_S, capture_output=True).returncode
    except subprocess.TimeoutExpired:
        return False
    if status not in (0, 1):
        raise SystemExit(f"{' '.join(tests)}: pytest ends with {status}")
    return status == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("word", nargs="?", default="", help="only those with this in their name")
    chosen = protections(parser.parse_args().word)
    with tempfile.TemporaryDirectory() as folder:
        scratch = copied(Path(folder))
        if not passes(scratch, *dict.fromkeys(one.test for one in chosen)):
            raise SystemExit("the tests fail with all protections in place")
        unseen = [one for one in chosen if not is_seen(scratch, one)]
    print(f"{len(chosen) - len(unseen)} of {len(chosen)} are seen to be gone")
    sys.exit(bool(unseen))


def is_seen(scratch: Path, one: Protection) -> bool:
    path = scratch / one.path
    source = path.read_text()
    path.write_text(source.replace(one.old, one.new))
    seen = not passes(scratch, one.test)
    path.write_text(source)
    print(f"{'seen' if seen else 'NOT SEEN':8} {one.what}", flush=True)
    return seen


if __name__ == "__main__":
    main()
