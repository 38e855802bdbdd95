"""`primeslurm tinker`: serve the Tinker API on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from primeslurm.base.paths import expanded
from primeslurm.cli.lazy_verbs import HelpingGroup, add_command
from primeslurm.cli.output import note
from primeslurm.tinker.server import prepare
from primeslurm.wire.names import ADAPTERS

app = typer.Typer(cls=HelpingGroup, help="Serve the Tinker API on this machine.", add_completion=False)


def serve_command(
    model: Annotated[str, typer.Option(help="Model directory, or a hub id in the Hugging Face cache.", metavar="DIR")],
    host: Annotated[
        str,
        typer.Option(
            help="Address or name to listen on. To accept other computers, use an address they can reach.",
            metavar="HOST",
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port. 0: any free one.", metavar="PORT")] = 8410,
    data: Annotated[Path, typer.Option(help="Directory for API keys and checkpoints.", metavar="DIR")] = Path(
        "tinker-data"
    ),
    max_rank: Annotated[
        int,
        typer.Option(
            min=1,
            help="Largest rank. Adapters are padded to this rank; larger values slow all clients.",
            metavar="N",
        ),
    ] = 32,
    user: Annotated[
        list[str] | None,
        typer.Option(
            help="Also print an API key for this user (repeatable). Users see only their own runs and checkpoints.",
            metavar="NAME",
        ),
    ] = None,
    engines: Annotated[
        list[str] | None,
        typer.Option(
            help="Sample with this vLLM engine of the same model, or its router (repeatable). "
            "PRIMESLURM_SECRET must be the engines' secret.",
            metavar="URL",
        ),
    ] = None,
) -> None:
    """Train LoRA adapters of one model, and sample from them, for clients of the Tinker API.

    The service runs on one GPU, or on the CPU if there is none, without Slurm. It prints the address and the key that
    clients need. Without --engines, sampling uses the trainer's model without a KV cache, so it is exact, and slow for
    long sequences.
    Ctrl-C or SIGTERM ends the service with exit code 0; checkpoints and keys stay in the data directory.

    Examples:
        primeslurm tinker serve --model /models/SmolLM2-135M-Instruct
        primeslurm tinker serve --model /models/Qwen3-8B --host gpu1 --port 9000 --data /shared/tinker
        primeslurm tinker serve --model /models/Qwen3-8B --data /shared/tinker --engines http://gpu2:8000
    """
    server = prepare(host, port, expanded(data).absolute(), user or (), engines or ())
    typer.echo(f"export TINKER_BASE_URL={server.url}")
    for name, key in server.keys.items():
        typer.echo(f"export TINKER_API_KEY={key}" + (f"  # {name}" if user else ""))
    if engines:
        note(f"Start engines with {ADAPTERS}={server.store.adapters}, --enable-lora and --max-lora-rank {max_rank}.")
    note(f"Loading {model}. Clients that connect now wait. Ctrl-C ends the service.")
    server.serve(model, max_rank)


@app.callback()
def _group() -> None:  # without it, typer would make `serve` the group itself
    pass


add_command(app, "serve", serve_command)
