"""`isthmus profile`: measures this machine's engine on a model and writes a cost curve that `engine.cost` takes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isthmus.core.errors import ConfigError

if TYPE_CHECKING:
    from isthmus.bench.profile import Profile

MAX_SEQUENCES = 16
"""Largest batch measured on a vLLM server: any server computes that many sequences at once."""


def profile(
    model: Annotated[
        str | None, typer.Option(help="Model folder, GGUF file or hub id; default: SmolLM2-135M-Instruct.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the curve (YAML) here; default: print it.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16; default: the model's.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda where there is one.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads, as a node will have them.")] = None,
    kv_memory: Annotated[str, typer.Option(help="KV memory, which limits the cases, e.g. 512MiB.")] = "1GiB",
    max_length: Annotated[int | None, typer.Option(min=2, help="Longest context to measure.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Measured turns; the median of each case counts.")] = 5,
    budget_s: Annotated[float, typer.Option(help="No new turn begins after so many seconds.")] = 90.0,
    vllm: Annotated[
        str | None, typer.Option(help="URL of a vLLM server of --model, to measure instead of the engine here.")
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="With --vllm: what the server calls its model; default: its first.")
    ] = None,
    recording: Annotated[
        Path | None,
        typer.Option(help="Learn from this recording of isthmus route instead, and write a deployment file."),
    ] = None,
) -> None:
    """Measure prefill, decode and mixed iterations of the engine here, and fit a cost curve to them."""
    from isthmus.cli.models import find_model
    from isthmus.cli.outputs import check_writable
    from isthmus.config import load_config

    check_writable("--out", out)
    if recording is not None:
        _write(out, _learnt(recording), "use it as --config of simulate and plan")
        return
    beside = [name for name, value in (("--device", device), ("--threads", threads)) if value is not None]
    if vllm is not None and beside:
        raise ConfigError(f"{', '.join(beside)}: of the engine here; a vLLM server has its own, leave it out")
    if vllm is None and served_model_name is not None:
        raise ConfigError("--served-model-name: only with --vllm")
    given = {"dtype": dtype, "device": device, "kv_memory": kv_memory}
    engine = load_config(None, {f"engine.{name}": value for name, value in given.items()}).engine
    folder, _ = find_model(model)
    if vllm is not None:
        found = _of_server(vllm, served_model_name, folder, dtype, max_length, rounds, budget_s)
    else:
        from isthmus.bench.profile import profile_engine
        from isthmus.live.engine.engine import EngineOptions

        options = EngineOptions(
            engine.dtype, engine.device, threads, engine.block_size, engine.kv_memory, max_length
        )
        found = profile_engine(folder, options, rounds=rounds, budget_s=budget_s, report=_say)
    _say(errors_of(found))
    _write(out, as_yaml(found), "use it as engine.cost")


def _write(out: Path | None, text: str, use: str) -> None:
    from isthmus.cli.outputs import write_bytes

    if out is None:
        print(text, end="")
    else:
        write_bytes(out, text.encode())
        _say(f"wrote {out}: {use}")


def _learnt(recording: Path) -> str:
    """A deployment file of the servers of a recording."""
    import yaml

    from isthmus.bench.learning import deployment, learn, recorded

    found = recorded(recording)
    learnt = learn(found)
    _say(
        f"{learnt.curve.origin}; simulated servers with the same requests: "
        + ", ".join([f"{name} {100 * error:+.1f} %" for name, error in learnt.errors.items()])
    )
    return str(yaml.safe_dump(deployment(found, learnt.curve), sort_keys=False))


def _of_server(
    url: str, name: str | None, folder: Path, dtype: str | None, limit: int | None, rounds: int, budget_s: float
) -> Profile:
    """Raises StartError where it is no vLLM server."""
    import asyncio

    from isthmus.bench.profile import profile_server
    from isthmus.cli.engines import vllm_layout
    from isthmus.config import vllm_key
    from isthmus.core.blocks import KVLayout
    from isthmus.live.engine.recipe import vocab_of
    from isthmus.live.servers.client import Client
    from isthmus.live.servers.opening import Told, told

    url = url.rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--vllm {url}: write http://HOST:PORT")
    key = vllm_key()

    async def ask() -> Told:
        client = Client(url, name or "", key)
        try:
            return await told(client)
        finally:
            await client.close()

    known = asyncio.run(ask())
    model = name or known.models[0]
    layout: KVLayout = vllm_layout(folder, dtype, known.block_size)
    return profile_server(
        lambda: Client(url, model, key),
        layout,
        vocab_size=vocab_of(folder),
        max_length=min(limit or known.max_length, known.max_length),
        kv_tokens=known.num_blocks * known.block_size,
        max_sequences=MAX_SEQUENCES,
        origin=f"isthmus profile: {folder.name}, vLLM {known.version}, {layout.dtype}",
        rounds=rounds,
        budget_s=budget_s,
        report=_say,
    )


def errors_of(found: Profile) -> str:
    """Errors of the curve on the iterations that it was fitted to, and on mixed iterations."""
    parts = [f"prefill {found.prefill_error_percent:.1f} %", f"decode {found.decode_error_percent:.1f} %"]
    if found.mixed_error_percent is not None:
        parts.append(f"mixed (not fitted) {found.mixed_error_percent:.1f} %")
    return "mean error: " + ", ".join(parts)


def as_yaml(found: Profile) -> str:
    """What `engine.cost: FILE` reads."""
    import yaml

    from isthmus.core.cost import to_mapping

    return yaml.safe_dump(to_mapping(found.curve), sort_keys=False)


def _say(line: str) -> None:
    typer.echo(line, err=True)
