"""Packages that an extra of Isthmus brings: what computes, and Ray. Verbs that need none of them run without."""

from __future__ import annotations

from importlib.util import find_spec

from isthmus.core.errors import ConfigError

EXTRAS = {"torch": "engine", "safetensors": "engine", "gguf": "engine", "llguidance": "engine", "ray": "ray"}
"""The extra of pyproject.toml that brings each package."""


def require(package: str, asked: str) -> None:
    """`asked`: what needs the package. Raises ConfigError where it is not installed."""
    if find_spec(package) is None:
        raise _lacking(package, asked)


def missing(error: ModuleNotFoundError, asked: str) -> ConfigError:
    """The error in a user's words, if it is of a package that an extra brings. Raises any other again."""
    if error.name not in EXTRAS:
        raise error
    return _lacking(error.name, asked)


def _lacking(package: str, asked: str) -> ConfigError:
    return ConfigError(
        f"{asked} needs {package}, which is not installed: pip install 'isthmus[{EXTRAS[package]}]'"
    )
