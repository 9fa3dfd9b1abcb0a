"""Every test run draws the same examples, and none is judged by the clock; `make soak` draws others, and more.

`--shuffle SEED` runs modules, and the tests of each, in another order.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import random
from collections import defaultdict

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.internal.conjecture import providers

os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}  # before torch comes: cores are shared
os.environ.setdefault("PYTHONHASHSEED", "0")  # of workers and of the processes that tests start

SLOW = (HealthCheck.too_slow,)
"""It judges by the clock."""
settings.register_profile("isthmus", derandomize=True, deadline=None, suppress_health_check=SLOW)
settings.register_profile(
    "soak",
    deadline=None,
    suppress_health_check=SLOW,
    max_examples=1000,
    print_blob=True,
    database=DirectoryBasedExampleDatabase(".hypothesis/examples"),
)
settings.load_profile("isthmus")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="modules and their tests in another order")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--hypothesis-profile") != "soak":
        # Hypothesis draws numbers and texts that it finds in the modules loaded so far, so that without this a test's
        # examples would depend on which tests its worker ran before.
        providers._get_local_constants = providers.Constants


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine has an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(pyfuncitem.obj(**arguments))
    return True


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.getoption("--shuffle")
    if seed is None:
        return
    draw, modules = random.Random(seed), defaultdict[str, list[pytest.Item]](list)
    for item in items:
        modules[item.location[0]].append(item)
    for tests in modules.values():
        draw.shuffle(tests)
    order = list(modules.values())
    draw.shuffle(order)
    items[:] = [item for tests in order for item in tests]


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported is there for good: nobody looks through all of it whenever a test has made enough objects."""
    gc.collect()
    gc.freeze()
