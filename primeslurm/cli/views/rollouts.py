"""Rollouts on a terminal. Their texts come from models and programs, so control characters are written out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean

from rich.table import Table
from rich.text import Text

from primeslurm.base.units import count, duration
from primeslurm.base.units import tokens as token_count
from primeslurm.cli.output import visible
from primeslurm.cli.views.colours import MESSAGE_COLOURS, ROLLOUT_COLOURS
from primeslurm.cli.views.tables import light_table
from primeslurm.records.rollouts import (
    AgentConversation,
    Message,
    RolloutSummary,
    RolloutTranscript,
    TokenSequence,
)

# Characters of a text that are shown without `--full`: its beginning and its end.
SHOWN_CHARACTERS = 8_000
LONGEST_REASON = 60


def rollout_table(rollouts: Iterable[RolloutSummary]) -> Table:
    """List rollouts, one per line."""
    table = light_table("rollout", "step", "reward", "advantage", "tokens", "turns", "versions", "time", "state")
    for each in rollouts:
        table.add_row(
            Text(visible(each.id)),
            "-" if each.step is None else str(each.step),
            "-" if each.reward is None else f"{each.reward:.3g}",
            "-" if each.advantage is None else f"{each.advantage:+.3f}",
            token_count(each.tokens),
            str(each.turns),
            versions_of(each.oldest_version, each.newest_version),
            duration(each.seconds),
            Text(visible(one_line(state_text(each), LONGEST_REASON)), style=_style(each)),
        )
    return table


def state_text(rollout: RolloutSummary) -> str:
    """Describe what became of a rollout, and why."""
    why = f": {rollout.error or rollout.dropped}" if rollout.error or rollout.dropped else ""
    evaluation = "evaluation " if rollout.evaluation and rollout.state != "evaluated" else ""
    return f"{evaluation}{rollout.state}{', truncated' if rollout.truncated else ''}{why}"


def versions_of(oldest: int | None, newest: int | None) -> str:
    """Format the range of policy versions: `4`, `4-5`, or `-` if nothing was sampled."""
    if oldest is None or newest is None:
        return "-"
    return str(oldest) if oldest == newest else f"{oldest}-{newest}"


def transcript_lines(rollout: RolloutTranscript, *, full: bool, tokens: bool) -> Iterator[Text]:
    yield from _head(rollout.summary)
    for conversation in rollout.conversations:
        yield Text()
        if len(rollout.conversations) > 1:
            yield Text(f"agent {visible(conversation.agent)}, reward {_number(conversation.reward)}", style="bold")
        if conversation.tools:
            yield Text(f"tools: {visible(', '.join(conversation.tools))}", style="dim")
        if not conversation.messages:
            yield Text("the messages of this rollout were not kept; its tokens:")
            for sequence in conversation.sequences:
                yield Text(
                    visible(_shortened("".join(sequence.pieces) or " ".join(map(str, sequence.token_ids)), full))
                )
        yield from _messages(conversation, full)
        if tokens:
            for number, sequence in enumerate(conversation.sequences):
                yield from _tokens(sequence, number)


def _head(summary: RolloutSummary) -> Iterator[Text]:
    yield Text(visible(summary.id), style="bold")
    yield Text(visible(state_text(summary)), style=_style(summary))
    step = "-" if summary.step is None else str(summary.step)
    task = f"example {summary.example}" + ("" if summary.task is None else f", task {summary.task}")
    facts = [
        ("step", f"{step} (attempt {summary.attempt})"),
        ("environment", f"{summary.environment}, {task}"),
        ("group", summary.group),
        ("reward", _reward(summary)),
        ("metrics", _named(summary.metrics)),
        ("advantage", "unknown" if summary.advantage is None else f"{summary.advantage:+.4f} (mean of trained tokens)"),
        ("policy versions", _versions(summary)),
        ("tokens", _token_facts(summary)),
        ("time", f"{duration(summary.seconds)}, {count(summary.turns, 'turn')}"),
        ("finish reason", summary.finish_reason),
    ]
    for name, value in facts:
        if value:
            yield Text.assemble((f"{name}: ", "dim"), visible(value).replace("\n", " "))


def _reward(summary: RolloutSummary) -> str:
    parts = f" = {_named(summary.reward_parts)}" if summary.reward_parts else ""
    penalty = f", minus a length penalty of {summary.length_penalty:.4g}" if summary.length_penalty else ""
    return f"{_number(summary.reward)}{parts}{penalty}"


def _versions(summary: RolloutSummary) -> str:
    text = versions_of(summary.oldest_version, summary.newest_version)
    opened = "" if summary.opened_version is None else f", group opened at {summary.opened_version}"
    return f"{text}{opened}, staleness {'unknown' if summary.staleness is None else summary.staleness}"


def _token_facts(summary: RolloutSummary) -> str:
    return f"{summary.tokens:,}, of these {summary.sampled_tokens:,} sampled and {summary.trained_tokens:,} trained"


def _messages(conversation: AgentConversation, full: bool) -> Iterator[Text]:
    facts = _facts_by_message(conversation)
    turn = 0
    for number, message in enumerate(conversation.messages):
        turn += message.sampled
        title = message.role + (f" {message.name}" if message.name else "")
        title += f", turn {turn}" if message.sampled else ""
        details = [*_timing(message), *facts.get(number, [])]
        yield Text()
        yield Text.assemble(
            (visible(title), f"bold {MESSAGE_COLOURS.get(message.role, '')}"),
            (visible(f"  {'  '.join(details)}"), "dim"),
        )
        if message.reasoning:
            yield Text(visible(_shortened(message.reasoning, full)), style="italic dim")
        if message.content:
            yield Text(visible(_shortened(message.content, full)))
        for call in message.tool_calls:
            yield Text(visible(f"-> {call.name} {_shortened(call.arguments, full)}"), style="blue")
        if message.images:
            yield Text(f"[{count(message.images, 'image')}]", style="dim")
        if message.omitted:
            yield Text(f"[{message.omitted:,} characters were not kept]", style="dim")


def _timing(message: Message) -> list[str]:
    if message.started_s is None or message.ended_s is None:
        return []
    return [f"at {duration(message.started_s)}, took {duration(message.ended_s - message.started_s)}"]


def _facts_by_message(conversation: AgentConversation) -> dict[int, list[str]]:
    """Return facts about the tokens of each message. A message counts in the first sequence that has it."""
    facts: dict[int, list[str]] = {}
    for number, sequence in enumerate(conversation.sequences):
        for span in sequence.spans:
            where = slice(span.start, span.end)
            if span.message not in facts:
                facts[span.message] = _facts(sequence, where)
                if number:
                    facts[span.message].append(f"sequence {number + 1}")
    return facts


def _facts(sequence: TokenSequence, where: slice) -> list[str]:
    facts = [count(len(sequence.token_ids[where]), "token")]
    versions = [version for version in sequence.versions[where] if version is not None]
    if not versions:
        return facts
    trained = sum(sequence.trained[where])
    facts += [] if trained == len(versions) else [f"{trained} trained"]
    facts.append(f"version {versions_of(min(versions), max(versions))}")
    facts.append(f"log-probability {_mean(sequence.logprobs[where])}")
    trainer = sequence.trainer_logprobs
    facts.append(f"trainer {'unknown' if trainer is None else _mean(trainer[where])}")
    if sequence.ref_logprobs is not None:
        facts.append(f"teacher {_mean(sequence.ref_logprobs[where])}")
    if sequence.advantages is not None:
        facts.append(f"advantage {_mean(sequence.advantages[where], '+.4f')}")
    return facts


def _tokens(sequence: TokenSequence, number: int) -> Iterator[Text]:
    yield Text()
    yield Text(f"sequence {number + 1}: {count(len(sequence.token_ids), 'token')}", style="bold")
    heading = ("position", "id", "trained", "version", "log-prob", "trainer", "advantage", "text")
    yield Text("{:>8} {:>8} {:>7} {:>7} {:>9} {:>9} {:>9} {}".format(*heading), style="dim")
    for i, token in enumerate(sequence.token_ids):
        piece = sequence.pieces[i] if sequence.pieces else ""
        yield Text(
            f"{i:>8} {token:>8} {'yes' if sequence.trained[i] else '':>7} {_cell(sequence.versions, i):>7} "
            f"{_cell(sequence.logprobs, i):>9} {_cell(sequence.trainer_logprobs, i):>9} "
            f"{_cell(sequence.advantages, i):>9} {visible(repr(piece))}",
            style="" if sequence.sampled[i] else "dim",
        )


def _cell(values: Sequence[float | None] | None, index: int) -> str:
    value = values[index] if values is not None else None
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.4f}"


def one_line(text: str, longest: int) -> str:
    """Return the beginning of a text as one line."""
    line = " ".join(text[: 4 * longest].split())
    return line if len(line) <= longest else f"{line[: longest - 3]}..."


def _shortened(text: str, full: bool) -> str:
    if full or len(text) <= SHOWN_CHARACTERS:
        return text
    half = SHOWN_CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters: --full shows them ...]\n{text[-half:]}"


def _mean(values: Sequence[float | None], form: str = ".4f") -> str:
    known = [value for value in values if value is not None]
    return f"{fmean(known):{form}}" if known else "unknown"


def _named(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _style(rollout: RolloutSummary) -> str:
    return ROLLOUT_COLOURS.get(rollout.state, "")
