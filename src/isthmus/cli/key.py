"""`isthmus key`: a new API key, and the line by which a deployment's file knows it."""

from __future__ import annotations

import secrets
import sys
from typing import Annotated

import typer

NUM_BYTES = 32
"""Of chance in a key: nobody finds one by trying, so that a digest without salt is safe to keep."""


def key(tenant: Annotated[str, typer.Argument(help="Whose key it is; its tenants share no cache.")]) -> None:
    """Draw an API key for a tenant: the key, which is kept nowhere, and the line for auth.keys in the file."""
    import yaml

    from isthmus.config import key_digest, load_config

    drawn = f"isthmus-{secrets.token_urlsafe(NUM_BYTES)}"
    entry = {"tenant": tenant, "sha256": key_digest(drawn)}
    load_config(None, {"auth.keys": [entry]})  # a name that the file may not have is refused here
    print("The key, for the client; it is shown only now:", file=sys.stderr)
    print(drawn, flush=True)
    print("The line for the deployment's file, under auth: keys:", file=sys.stderr)
    print(f"- {yaml.safe_dump(entry, default_flow_style=True, sort_keys=False, width=1000).strip()}")
