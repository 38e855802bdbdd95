"""Recipe + Site -> Plan: which node does what, with which ports, GPUs and commands. Pure and deterministic."""

from __future__ import annotations

from pathlib import Path

from primeslurm.errors import UsageError, Violation
from primeslurm.plan import jobs
from primeslurm.plan.control import environment_command, orchestrator_command, trainer_command
from primeslurm.plan.engines import place_inference
from primeslurm.plan.model import Plan, Replica, Totals
from primeslurm.plan.needs import Need, local_problems, needs_of
from primeslurm.plan.slots import Slot
from primeslurm.plan.teacher import place_teacher
from primeslurm.recipe import Recipe, Site
from primeslurm.recipe.teacher import ServedTeacher


def derive(recipe: Recipe, site: Site, run_dir: Path, *, local: bool = False) -> Plan:
    """Work out the whole run. `local`: without Slurm, all nodes are agents on this one machine and share its GPUs.

    Raises:
        UsageError: the recipe cannot be placed on this site; every reason at once.
    """
    needs, problems = asked_of(recipe, site, local=local)
    if problems:
        raise UsageError(problems)
    return place(recipe, site, run_dir, needs, local=local)


def asked_of(recipe: Recipe, site: Site, *, local: bool) -> tuple[list[Need], list[Violation]]:
    """What each role gets (nothing, if the site cannot give it), and every reason why the recipe cannot be placed."""
    problems, needs = jobs.problems(recipe, site), []
    try:
        needs = needs_of(recipe, site)
    except UsageError as error:
        problems += error.violations
    return needs, problems + (local_problems(site, needs) if local else [])


def place(recipe: Recipe, site: Site, run_dir: Path, needs: list[Need], *, local: bool) -> Plan:
    """The run with all its processes, on the nodes that each role gets."""
    slots = _slots(recipe, site, needs, local)
    replicas = place_inference(recipe, site, slots)
    teachers = place_teacher(recipe, site, slots)
    trainer_gpus = _trainer(recipe, site, slots)
    if recipe.task == "rl":
        _control(recipe, slots, replicas, teachers)
    return Plan(
        schema=1,
        run=recipe.name,
        run_dir=str(run_dir),
        task=recipe.task,
        layout=recipe.deployment.layout,
        executor="local" if local else "slurm",
        device=site.device,
        python=site.python or "python3",
        job=jobs.job_options(recipe, site, run_dir),
        groups=jobs.groups(recipe, needs),
        nodes=tuple(slot.node() for slot in slots),
        replicas=tuple(replicas),
        totals=_totals(slots, needs, replicas, trainer_gpus, len(teachers)),
        env=jobs.environment(site),
        library_path=site.library_path,
        interface=site.network.interface,
        hcas=site.network.hcas,
        addresses=site.network.addresses,
        pass_env=tuple(dict.fromkeys((*site.pass_env, *recipe.pass_env, *_key(recipe)))),
        node_silent_s=site.node_silent_s,
        bad_node_hours=site.bad_node_hours,
        stall_timeout_s=recipe.orchestrator.stall_timeout_s,
        max_attempts=recipe.slurm.max_attempts if recipe.slurm.requeue else 1,
    )


def _slots(recipe: Recipe, site: Site, needs: list[Need], local: bool) -> list[Slot]:
    single = recipe.deployment.layout == "single"
    slots: list[Slot] = []
    for group, need in enumerate(needs):
        for i in range(need.nodes):
            slots.append(
                Slot(
                    index=len(slots),
                    group=0 if single else group,
                    role=need.role,
                    index_in_group=i,
                    replica=i // need.nodes_per_replica if need.nodes_per_replica else None,
                    gpus=need.gpus,
                    first_gpu=sum(slot.gpus for slot in slots) if local else 0,
                    port_base=site.port_base,
                    port=site.port_base,
                )
            )
    return slots


def _trainer(recipe: Recipe, site: Site, slots: list[Slot]) -> int:
    nodes = [slot for slot in slots if slot.role == "train"]
    world = sum(slot.gpus for slot in nodes)
    rank = 0
    for slot in nodes:
        for local in range(slot.gpus):
            slot.add(
                f"trainer-rank-{rank}",
                "trainer",
                trainer_command(recipe, site, rank=rank, local_rank=local, world=world),
                gpus=(local,),
                restart="attempt",
                unit="trainer" if world > 1 else None,
                after=("orchestrator",) if recipe.task == "rl" else (),
            )
            rank += 1
    return world


def _control(recipe: Recipe, slots: list[Slot], replicas: list[Replica], teachers: list[str]) -> None:
    head = slots[0]
    engines = [name for replica in replicas for name in replica.engines]
    routers = [replica.router for replica in replicas]
    head.add("orchestrator", "orchestrator", orchestrator_command(engines, routers, teachers))
    for environment in recipe.environments:
        for worker in range(environment.workers):
            name = f"environment-{environment.label}-{worker}"
            head.add(name, "environment", environment_command(environment.label, worker), after=("orchestrator",))


def _key(recipe: Recipe) -> tuple[str, ...]:
    """The variable that holds the key of a teacher served elsewhere."""
    teacher = recipe.teacher
    return (teacher.key_env,) if isinstance(teacher, ServedTeacher) and teacher.key_env else ()


def _totals(
    slots: list[Slot], needs: list[Need], replicas: list[Replica], trainer_gpus: int, teacher_engines: int
) -> Totals:
    return Totals(
        nodes=len(slots),
        spares=sum(need.spares for need in needs),
        gpus=sum(slot.gpus for slot in slots),
        trainer_gpus=trainer_gpus,
        engines=sum(len(replica.engines) for replica in replicas),
        inference_nodes=sum(slot.role in ("inference", "prefill", "decode") for slot in slots),
        routers=len(replicas),
        teacher_engines=teacher_engines,
    )
