"""`isthmus link`: the process of one link between clusters of one machine. Started by `isthmus serve`."""

from __future__ import annotations

from typing import Annotated

import typer


def link(name: Annotated[str, typer.Option(help="For `ps`.")] = "") -> None:
    """Carry the link whose orders come on standard input."""
    from isthmus.live.cluster.shaper import main

    main()
