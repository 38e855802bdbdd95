"""Start the service on this machine."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from primeslurm.base.errors import UsageError, Violation
from primeslurm.recipe.sections.trainer import Parallelism
from primeslurm.tinker.store import FIRST_USER, TinkerStore
from primeslurm.wire.transport import secret

if TYPE_CHECKING:
    from primeslurm.trainer.distributed.world import World


@dataclass(frozen=True)
class TinkerServer:
    """A service with an open port, whose model is not loaded yet."""

    url: str
    keys: dict[str, str]
    """API key of each user."""
    store: TinkerStore
    listener: socket.socket
    engines: tuple[str, ...] = ()
    """URLs of the engines that sample. None: the trainer's model samples."""

    def serve(
        self,
        model: str,
        max_rank: int,
        users: Mapping[str, str] | None = None,
        world: World | None = None,
        parallelism: Parallelism | None = None,
    ) -> None:
        """Load the model, and answer requests until SIGINT or SIGTERM. Raises UsageError if it cannot be trained.

        `users` has the user of each key. Default: those of `keys`. `world` has the ranks that train (None: this one
        alone), and `parallelism` how they share the work. Several ranks need engines that sample.
        """
        # These import torch, for seconds.
        from primeslurm.tinker.backbone import Backbone
        from primeslurm.tinker.engine_sampler import EngineSampler
        from primeslurm.tinker.routes import application
        from primeslurm.tinker.sampler import TrainerSampler
        from primeslurm.tinker.service import Service
        from primeslurm.trainer.distributed.world import alone

        world = world or alone()
        try:
            backbone = Backbone(model, max_rank, world, parallelism)
        except (OSError, ValueError) as error:
            raise UsageError([Violation("--model", model, str(error))]) from None
        engines = EngineSampler(self.engines, backbone.limits) if self.engines else None
        service = Service(self.store, backbone, TrainerSampler(backbone), engines=engines)
        config = uvicorn.Config(
            application(service, {key: user for user, key in self.keys.items()} if users is None else users),
            log_level="warning",
            lifespan="on",
            ws="none",
        )
        config.timeout_graceful_shutdown = 1  # clients that wait for a result ask again
        try:
            with contextlib.suppress(KeyboardInterrupt):
                # uvicorn ends on a signal, and raises it again. By default, SIGTERM would then skip the cleanup.
                signal.signal(signal.SIGTERM, signal.default_int_handler)
                uvicorn.Server(config).run(sockets=[self.listener])
        finally:
            service.close()
            backbone.ranks.close()
            world.close()


def prepare(host: str, port: int, data: Path, users: Sequence[str] = (), engines: Sequence[str] = ()) -> TinkerServer:
    """Open the data directory and the port. Raises UsageError if one of them, or `engines`, cannot be used.

    Only FIRST_USER and `users` can connect.
    """
    wrong = [url for url in engines if not re.fullmatch(r"http://[^/?#\s]+:\d+/?", url)]
    violations = [Violation("--engines", url, "is no URL such as http://gpu1:8000") for url in wrong]
    if engines and not secret.is_there():
        why = f"engines require the secret that they were started with; set {secret.VARIABLE}"
        violations.append(Violation("--engines", ", ".join(engines), why))
    if violations:
        raise UsageError(violations)
    store = TinkerStore(data)
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        store.close()
        raise UsageError([Violation("--port", str(port), f"cannot listen on {host}: {error.strerror}")]) from None
    address, number = listener.getsockname()[:2]
    if ipaddress.ip_address(address).is_unspecified:  # all addresses of this machine; clients need one
        host = socket.gethostname()
    name = f"[{host}]" if ":" in host else host
    keys = {user: store.key(user) for user in (FIRST_USER, *users)}
    return TinkerServer(f"http://{name}:{number}", keys, store, listener, tuple(engines))
