"""A node of the plan while processes are added: it hands out GPUs and preferred ports in order.

Each role has its own builders. With `layout: one_node` all of them are parts of node 0: they share its ports, and each
uses the GPUs after those of the previous builder, unless the recipe colocates engines and trainer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from primeslurm.plan.commands.command import RENDEZVOUS_PORT, Command
from primeslurm.plan.model import Node, NodeRole, Process, Role
from primeslurm.plan.supervision import Health, HeartbeatLimits, Restart

# torch listens for its ranks on every address of the host, so no node of an emulated cluster may prefer that port
RENDEZVOUS_OFFSET = 500


@dataclass
class NodeBuilder:
    """A node to which processes are added."""

    index: int
    group: int
    role: NodeRole
    index_in_group: int
    replica: int | None
    gpus: int
    first_gpu: int
    port_base: int
    free_ports: Iterator[int]  # preferred ports that no process of the node has yet
    engine_ports: Iterator[int] = field(default_factory=lambda: iter(()))
    """Fixed ports for the next engines of the node. Empty: engines get preferred ports."""
    processes: list[Process] = field(default_factory=list)

    def add(
        self,
        name: str,
        role: Role,
        command: Command,
        *,
        gpus: Iterable[int] = (),
        replica: int | None = None,
        restart: Restart = "in_place",
        restart_group: str | None = None,
        health: Health | None = None,
        heartbeats: HeartbeatLimits | None = None,
        after: Iterable[str] = (),
        http_port: int | None = None,
    ) -> None:
        """Add a process. Arguments without an entry are as in `Process`.

        Args:
            gpus: indices that count from the builder's first GPU.
            http_port: number that the port `http` must have. None: any number.
        """
        fixed = {} if http_port is None else {"http": http_port}
        self.processes.append(
            Process(
                name=name,
                role=role,
                node=self.index,
                replica=replica,
                argv=command.argv,
                env=command.env,
                log=f"logs/{role}/{name}.log",
                ports={port: fixed[port] if port in fixed else self._port(port) for port in command.ports},
                fixed_ports=tuple(fixed),
                gpus=tuple(self.first_gpu + gpu for gpu in gpus),
                restart=restart,
                restart_group=restart_group,
                health=health,
                heartbeats=heartbeats,
                files=command.files,
                scratch=command.scratch,
                imports=command.imports,
                after=tuple(after),
            )
        )

    def holds(self, process: str | None) -> bool:
        return any(placed.name == process for placed in self.processes)

    def _port(self, name: str) -> int:
        return self.port_base + RENDEZVOUS_OFFSET if name == RENDEZVOUS_PORT else next(self.free_ports)


def finish(builders: Sequence[NodeBuilder]) -> tuple[Node, ...]:
    """Return the nodes of a plan. Builders of the same index become one node of role `all`."""
    parts: dict[int, list[NodeBuilder]] = {}
    for builder in builders:
        parts.setdefault(builder.index, []).append(builder)
    return tuple(
        Node(
            index=index,
            group=part[0].group,
            role=part[0].role if len(part) == 1 else "all",
            index_in_group=part[0].index_in_group,
            processes=tuple(process for builder in part for process in builder.processes),
        )
        for index, part in parts.items()
    )
