"""Of each Python process that finds it in its path, as in `make steady`'s run `late`: it begins late, and so do its
threads and what is given to them, some of them by much. What comes first by habit only does not."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from concurrent.futures import thread as pool
from typing import Any

LONGEST_S = 0.2

_drawn = random.Random(f"{os.environ.get('ISTHMUS_TESTS_LATE')} {sys.orig_argv}")
_sleep = time.sleep


def late(kind: type) -> None:
    run = kind.run  # type: ignore[attr-defined]

    def run_late(self: Any) -> None:
        if _drawn.random() < 0.3:
            _sleep(LONGEST_S * _drawn.random() ** 3)
        run(self)

    kind.run = run_late  # type: ignore[attr-defined]


_sleep(LONGEST_S * _drawn.random() ** 3)
late(pool._WorkItem)
late(threading.Thread)
