"""Ray, for those who ask for it: loading it takes a second, and it need not be installed."""

from __future__ import annotations

from typing import Any

from isthmus.extras import missing


def with_ray(asked: str) -> Any:
    """The module that imports Ray. Raises ConfigError where Ray is not installed."""
    try:
        from isthmus.live.cluster import ray_launcher
    except ModuleNotFoundError as error:
        raise missing(error, asked) from None
    return ray_launcher
