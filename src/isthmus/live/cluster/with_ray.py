"""Ray, for those who ask for it: loading it takes a second, and it need not be installed."""

from __future__ import annotations

from typing import Any

from isthmus.core.errors import ConfigError


def with_ray(asked: str) -> Any:
    """The module that imports Ray, which takes a second and need not be installed. Raises ConfigError without it."""
    try:
        from isthmus.live.cluster import ray_launcher
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError(
            f"{asked} needs Ray, which is not installed: pip install '.[ray]' in the checkout of Isthmus"
        ) from None
    return ray_launcher
