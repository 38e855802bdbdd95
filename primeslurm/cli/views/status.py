"""The status of a run on a terminal of 80 columns and 40 lines, at any number of nodes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from primeslurm.base.units import count, duration
from primeslurm.cli.views.colours import EVENT_COLOURS, PROCESS_COLOURS
from primeslurm.records.state import FailedRollouts, Load
from primeslurm.run.status.run_status import EMULATED, ProcessStatus, ReplicaStatus, RlProgress, RunStatus

# Longest list of replicas and of unhealthy processes. Healthy ones are summed up.
MAX_LINES = 8
SPARK = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 24

# How a process is shown whose state is SILENT: it sends no heartbeat.
UNRESPONSIVE = "UNRESPONSIVE"
_SHOWN_OF_SFT = (
    ("loss", "trainer/loss", ".4f"),
    ("gradient norm", "trainer/grad_norm", ".3f"),
    ("lr", "trainer/lr", ".1e"),
    ("tokens/s", "trainer/tokens_per_s", ",.0f"),
    ("s/step", "throughput/step_seconds", ".1f"),
)
_SHOWN = (
    ("reward", "reward/mean", ".3f"),
    ("staleness", "staleness/mean", ".2f"),
    ("loss", "trainer/loss", ".4f"),
    ("mixed", "rollouts/mixed_version", ".0f"),
    ("KL", "trainer/mismatch_kl", ".1e"),
    ("entropy", "trainer/entropy", ".3f"),
    ("tokens/s", "throughput/tokens_per_s", ",.0f"),
    ("s/step", "throughput/step_seconds", ".1f"),
)


def view(status: RunStatus) -> Group:
    parts: list[RenderableType] = [_head(status), *_silence(status)]
    parts += [Text(EMULATED, style="yellow")] if status.emulated else []
    if status.task == "tenants":
        parts.append(Text(f"tenants: primeslurm tenant list {status.directory}", style="dim"))
    else:
        parts.append(_numbers(status))
    parts += _hindrances(status)
    if queue := _queue(status):
        parts.append(queue)
    parts += [*_failures(status), *_evaluation(status)]
    parts.append(_roles(status))
    if status.replicas and status.active:
        parts.append(_replicas(status.replicas))
    if status.unhealthy:
        parts.append(_unhealthy(status))
    if status.events:
        parts.append(_events(status))
    parts += [_advice(status)] if status.advice else []
    return Group(*parts)


def process_table(status: RunStatus) -> Table:
    """Return a table of all processes, if the status was read with `processes`."""
    return _processes("process", status.processes)


def one_line(status: RunStatus) -> str:
    """Return the progress in one line, for logs."""
    emulated = " (emulated)" if status.emulated else ""
    parts = [f"{status.run}{emulated} {phase_of(status)}", f"step {status.metrics.get('step', 0)}/{status.max_steps}"]
    parts += [f"{label} {value}" for label, value in numbers_of(status)]
    return "  ".join(parts)


def phase_of(status: RunStatus) -> str:
    """Return the word for a run's phase. The phase `silent` of `--json` means that the head sends no heartbeat."""
    return "unresponsive" if status.phase == "silent" else status.phase


def numbers_of(status: RunStatus) -> list[tuple[str, str]]:
    """Return label and value of the newest step's metrics, in display order."""
    shown = _SHOWN_OF_SFT if status.task == "sft" else _SHOWN
    values = [(label, status.metrics.get(key), form) for label, key, form in shown]
    return [(label, f"{value:{form}}") for label, value, form in values if value is not None]


def sparkline(values: Sequence[float]) -> str:
    """Return the newest values as a row of bars. Lowest and highest value span the height."""
    # NaN is not equal to itself.
    shown = [value for value in values if value == value][-SPARK_WIDTH:]
    if not shown:
        return ""
    low, span = min(shown), (max(shown) - min(shown)) or 1.0
    return "".join(SPARK[int((value - low) / span * (len(SPARK) - 1))] for value in shown)


def _head(status: RunStatus) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    job = f"job {status.job_id}" if status.job_id else "no job"
    reason = status.reason.removeprefix(f"{status.phase}: ")
    table.add_row(Text(status.run, style="bold"), phase_of(status), f"attempt {status.attempt}", job, reason)
    if status.task == "tenants":  # each tenant has its own steps
        return table
    step = status.metrics.get("step", status.step or 0)
    committed = status.committed_step if status.committed_step is not None else "-"
    times = [f"elapsed {duration(status.elapsed_s)}"] if status.elapsed_s is not None else []
    times += [f"ETA {duration(status.eta_s)}"] if status.eta_s is not None else []
    policy = f"policy v{status.version or 0}" if status.task != "sft" else ""
    table.add_row("step", f"{step}/{status.max_steps}", f"committed {committed}", policy, "  ".join(times))
    return table


def _hindrances(status: RunStatus) -> list[RenderableType]:
    """Return the reasons why the run waits, damaged checkpoints, and excluded nodes."""
    lines: list[RenderableType] = []
    if status.waits_for:
        lines.append(Text(f"waits for the shared file system: {status.waits_for}", style="red"))
    for each in status.obstacles[:MAX_LINES]:
        lines.append(Text(f"error: {each.component or 'the job'} {each.how}; {each.fix}", style="red"))
    lines += [Text(line, style="red") for line in status.damaged[:MAX_LINES]]
    for node in status.excluded[:MAX_LINES]:
        until = time.strftime("%Y-%m-%d %H:%M", time.localtime(node.expires))
        lines.append(Text(f"avoids {node.node} until {until}: {node.reason} (run {node.run})", style="yellow"))
    if (more := len(status.excluded) - MAX_LINES) > 0:
        lines.append(Text(f"avoids {more} more nodes: primeslurm nodes", style="yellow"))
    return lines


def _silence(status: RunStatus) -> list[Text]:
    """Return a headline if the rest of the status is out of date, with the causes."""
    if status.silence is None:
        return []
    causes = [Text(f"  {cause}", style="yellow") for cause in status.silence.causes]
    return [Text(status.silence.text, style="bold red"), *causes]


def _numbers(status: RunStatus) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    numbers = numbers_of(status)
    if not numbers:
        return Text("no step yet", style="dim")
    table.add_row(*[Text(label, style="dim") for label, _ in numbers])
    table.add_row(*[value for _, value in numbers])
    curves = Text()
    for label, key in (("reward", "reward/mean"), ("staleness", "staleness/mean"), ("loss", "trainer/loss")):
        if len(values := status.history.get(key, [])) > 1:
            curves.append(f"{label} ", style="dim").append(f"{sparkline(values)}  ", style="cyan")
    return Group(table, curves) if curves else table


def _queue(status: RunStatus) -> Text | None:
    progress = status.progress
    if not isinstance(progress, RlProgress):
        return None
    text = f"{progress.ready_groups} groups ready, {progress.open_groups} open, "
    if progress.unscored_groups:
        text += f"{progress.unscored_groups} waiting for the teacher, "
    text += f"{progress.inflight} rollouts in flight"
    if len(loads := progress.rollouts_by_node.values()) > 1:
        text += f", {min(loads)} to {max(loads)} on each of {len(loads)} environment nodes"
    return Text.assemble(("queue ", "dim"), text)


def _failures(status: RunStatus) -> list[Text]:
    failures = status.progress.failures if isinstance(status.progress, RlProgress) else {}
    return [Text(f"{label}: {failures_text(failed)}", style="yellow") for label, failed in sorted(failures.items())]


def failures_text(failed: FailedRollouts) -> str:
    """Count the failed rollouts of an environment, with the most frequent reason."""
    tasks = f"{count(failed.tasks_given_up, 'task')} given up" if failed.tasks_given_up else ""
    if not failed.failed:
        return f"{tasks}: {failed.reason}"
    text = f"{count(failed.failed, 'failed rollout')}, {failed.of_reason} with: {failed.reason}"
    return f"{text}; {tasks}" if tasks else text


def _evaluation(status: RunStatus) -> list[Text]:
    """Return the newest evaluation, the progress of the running one, and the best step."""
    evaluation = status.progress.evaluation if isinstance(status.progress, RlProgress) else None
    if evaluation is None:
        return []
    parts = []
    if evaluation.last is not None:
        results = "; ".join(result.words for result in evaluation.last.results)
        parts.append(f"step {evaluation.last.step}: {results}")
    if evaluation.step is not None:
        parts.append(f"step {evaluation.step} is running: {evaluation.ended}/{evaluation.total} samples")
    if evaluation.best is not None:
        parts.append(f"best step {evaluation.best.step}: {evaluation.best.metric} {evaluation.best.value:.3f}")
    return [Text.assemble(("evaluation ", "dim"), "  ".join(parts) or "none yet")]


def _roles(status: RunStatus) -> Table:
    table = _table("role", "processes")
    for role, states in status.roles.items():
        table.add_row(
            role,
            Text("  ").join(
                _state(f"{n} {UNRESPONSIVE if state == 'SILENT' else state}", state) for state, n in states.items()
            ),
        )
    return table


def _replicas(replicas: Sequence[ReplicaStatus]) -> Table:
    split = any("prefill" in replica.loads for replica in replicas)
    names = ("waiting", "running", "KV use", "KV hits", "tokens/s")
    held = ["in flight"] if any(replica.share for replica in replicas) else []
    table = _table("replica", "router", "engines", *names, *held, caption="a/b: prefill/decode" if split else None)
    for column in table.columns[2:]:
        column.justify = "right"
    shown = list(replicas)
    if len(replicas) > MAX_LINES:
        # One line sums up the healthy replicas, so that the others fit on the screen.
        shown = [each for each in replicas if each.router != "HEALTHY" or each.healthy < each.engines][: MAX_LINES - 1]
        well = [replica for replica in replicas if replica not in shown]
        table.add_row(f"{len(well)} healthy", "", _count(well), *_sums(well), *[_share(well)] * len(held))
    for replica in shown:
        router = _state(replica.router, replica.router)
        table.add_row(
            str(replica.index), router, _count([replica]), *_sums([replica]), *[_share([replica])] * len(held)
        )
    return table


def _count(replicas: Sequence[ReplicaStatus]) -> Text:
    healthy, engines = sum(r.healthy for r in replicas), sum(r.engines for r in replicas)
    return Text(f"{healthy}/{engines}", style="green" if healthy == engines else "red")


def _sums(replicas: Sequence[ReplicaStatus]) -> list[str]:
    """Return the cells of the load columns, summed over replicas, as `prefill/decode` if these roles are separate."""
    loads: dict[str, list[Load]] = {}
    for replica in replicas:
        for role, load in replica.loads.items():
            loads.setdefault(role, []).append(load)
    roles = [loads[role] for role in ("prefill", "decode", "engine") if role in loads]
    if not roles:
        return [""] * 5
    return [
        "/".join(f"{sum(load.waiting for load in role):.0f}" for role in roles),
        "/".join(f"{sum(load.running for load in role):.0f}" for role in roles),
        "/".join(f"{max(load.kv_usage for load in role):.0%}" for role in roles),
        "/".join(_hits(role) for role in roles),
        f"{sum(load.generated_per_s for load in roles[-1]):,.0f}",
    ]


def _share(replicas: Sequence[ReplicaStatus]) -> str:
    """Return rollouts in flight, their limit, and the most frequent reason for the limit."""
    shares = [replica.share for replica in replicas if replica.share]
    if not shares:
        return ""
    (limit, _), *_ = Counter(share.limit for share in shares).most_common(1)
    return f"{sum(share.inflight for share in shares)}/{sum(share.places for share in shares)} {limit}"


def _hits(loads: Sequence[Load]) -> str:
    rates = [load.prefix_hit_rate for load in loads if load.prefix_hit_rate is not None]
    return f"{sum(rates) / len(rates):.0%}" if rates else "-"


def _unhealthy(status: RunStatus) -> Table:
    table = _processes("unhealthy", status.unhealthy[:MAX_LINES])
    if (more := len(status.unhealthy) - MAX_LINES) > 0:
        table.add_row(f"and {more} more", "", "", "", "")
    return table


def _processes(title: str, processes: Sequence[ProcessStatus]) -> Table:
    table = _table(title, "state", "node", "pid", "restarts")
    for process in processes:
        pid = str(process.pid or "-")
        table.add_row(process.name, _state(_words(process), process.state), process.node, pid, str(process.restarts))
    return table


def _words(process: ProcessStatus) -> str:
    """Return its state, and for an unresponsive process also for how long and in which phase."""
    if process.since:
        return f"{process.state} since {time.strftime('%H:%M:%S', time.localtime(process.since))}"
    if process.state != "SILENT":
        return process.state
    return process.silent.replace("silent", UNRESPONSIVE, 1) if process.silent else UNRESPONSIVE


def _events(status: RunStatus) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()  # the only one that a narrow terminal cuts
    for event in status.events:
        clock = time.strftime("%H:%M:%S", time.localtime(event.time)) if event.time else "--:--:--"
        text = Text(event.text, style=EVENT_COLOURS[event.level], no_wrap=True, overflow="ellipsis")
        table.add_row(Text(clock, style="dim"), event.who, text)
    return table


def _advice(status: RunStatus) -> Group:
    lines = []
    for advice in status.advice:
        lines.append(Text(advice.text, style="yellow"))
        lines.append(Text(f"  {advice.reason}", style="dim"))
        lines += [Text(f"  {field}: {value}") for field, value in advice.changes.items()]
    return Group(*lines)


def _table(*columns: str, caption: str | None = None) -> Table:
    table = Table(*columns, box=None, padding=(0, 1, 0, 0), caption=caption, caption_justify="left")
    for column in table.columns:
        column.no_wrap = True
    return table


def _state(text: str, state: str) -> Text:
    return Text(text, style=PROCESS_COLOURS.get(state, "red"))
