"""A placement policy of the user's own: `FILE.py:FUNCTION` where the name of one of ours may stand.

The file is run once, by the process that decides: the head, or the simulator. Its function decides like those in
`conductor/policies.py` and must be as pure: the same estimates, the same placement.
"""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from isthmus.conductor.policies import POLICIES, Policy
from isthmus.errors import ConfigError


def make_known(name: str) -> None:
    """Puts the function that a policy's name stands for among the known ones. Raises ConfigError when the file cannot
    be read or run, or has no such function."""
    file, colon, function = name.rpartition(":")
    if colon:
        POLICIES[name] = _loaded(Path(file), function)


def _loaded(file: Path, function: str) -> Policy:
    spec = spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ConfigError(f"policy: {file} is no Python file here")
    module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the user's code does wrong
        raise ConfigError(f"policy: {file} cannot be run: {type(error).__name__}: {error}") from error
    found: Policy | None = getattr(module, function, None)
    if not callable(found):
        raise ConfigError(f"policy: {file} has no function {function}")
    return found
