"""Options that take several values: `--prefill URL URL` is `--prefill URL --prefill URL`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typer.core import TyperCommand

if TYPE_CHECKING:
    from typer._click import Context


def spread(arguments: list[str], options: tuple[str, ...]) -> list[str]:
    """Returns arguments with the name of an option before each of its values, which end where an option begins."""
    found: list[str] = []
    option = ""
    for argument in arguments:
        if argument.startswith("-"):
            option = argument if argument in options else ""
            if not option:
                found.append(argument)
        else:
            found += [option, argument] if option else [argument]
    return found


class RouteCommand(TyperCommand):
    """`isthmus route`, whose servers are lists."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, spread(args, ("--prefill", "--decode")))
