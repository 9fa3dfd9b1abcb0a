"""`python -m benchmarks NAME`: measurements against other people's software, and validations of ours.

What a user runs on his own machine is `isthmus bench NAME`.
"""

from __future__ import annotations

import signal
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from benchmarks.models import BENCH_MODELS, make_random_model
from benchmarks.models import unpack_model as unpack
from isthmus.cli.bench import command, one_command
from isthmus.cli.main import main
from isthmus.cli.models import find_model
from isthmus.core.errors import ConfigError

STUDIES = {
    "accuracy": "accuracy:run",
    "agreement": "agreement:run",
    "conductor": "conductor:run",
    "cost": "cost:run",
    "engine": "beside:engine",
    "messenger": "beside:messenger",
    "reuse": "reuse:run",
    "route": "route:run",
    "serving": "serving:run",
    "store": "beside:store",
    "vllm-faults": "vllm_faults:run",
    "vllm-routing": "vllm_routing:run",
    "wan": "wan:run",
}
"""Each study's function, which takes its plan."""


class Studies(TyperGroup):
    """Imports a study when it is asked for: some import torch."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted([*STUDIES, *super().list_commands(ctx)])

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in STUDIES:
            return super().get_command(ctx, cmd_name)
        module, _, name = STUDIES[cmd_name].partition(":")
        return one_command(cmd_name, command(getattr(import_module(f"benchmarks.{module}"), name)))


app = typer.Typer(
    cls=Studies, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__
)


@app.command("make-model")
def make_model(
    folder: Annotated[Path, typer.Argument(help="Where to write the model folder.")],
    preset: Annotated[str, typer.Option(help="llama-256x8 or llama-512x12.")] = "llama-256x8",
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
) -> None:
    """Write a Llama folder with random weights, for the benchmarks."""
    if preset not in BENCH_MODELS:
        raise ConfigError(f"--preset {preset}: known are {', '.join(BENCH_MODELS)}")
    if dtype not in ("bfloat16", "float32"):
        raise ConfigError(f"--dtype {dtype}: known are bfloat16, float32")
    make_random_model(folder, **BENCH_MODELS[preset], dtype=dtype)
    print(f"wrote {folder}")


@app.command("unpack-model")
def unpack_model(
    folder: Annotated[Path, typer.Argument(help="Where to write the model folder.")],
    model: Annotated[Path | None, typer.Option(help="GGUF file; default: the default model's.")] = None,
) -> None:
    """Write a GGUF file as a folder in bfloat16, for servers that read no such files, by transformers."""
    unpack(model or find_model(None)[0], folder)
    print(f"wrote {folder}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as by Ctrl-C: what was started is ended
    main(app)
