"""The readable record of single rollouts: the conversation, and facts about each token.

The orchestrator writes these records (`orchestrator.telemetry.rollout_archive`), and `run.rollouts` reads them. All
text in them comes from models and environments: a reader must escape it before it reaches a terminal or a page.
"""

from __future__ import annotations

from typing import Literal

import msgspec

# Outcome of a rollout. batched: in the batch of a step that is not trained.
# Files, which are written when the batch is formed, have `trained` for both: `run.rollouts.archive` tells them apart.
State = Literal["trained", "batched", "dropped", "failed", "evaluated"]


class RolloutSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One row of a list of rollouts."""

    id: str  # unique in the run, also over its attempts
    group: str  # rollouts of one group have the same prompt, and are compared with each other
    environment: str  # label of the environment
    state: State
    # The step that trained the rollout, or that was next when it was dropped or failed. For an evaluation, the step
    # whose policy was evaluated. None: the rollout waits for a batch.
    step: int | None = None
    attempt: int = 0  # attempt of the run; 0 if unknown
    example: int = 0  # position in the environment's task stream
    task: int | None = None  # index in the taskset, if a curriculum or an evaluation chose the task
    agents: list[str] = []  # names of the agents that acted
    reward: float | None = None  # from the environment; the mean if several agents acted. None: failed
    length_penalty: float = 0.0  # subtracted from the reward before advantages are computed
    reward_parts: dict[str, float] = {}  # weighted terms of the reward by name
    metrics: dict[str, float] = {}  # other numbers that the environment reported
    advantage: float | None = None  # mean over the trained tokens; None if it was not computed
    opened_version: int | None = None  # policy version when the group opened
    oldest_version: int | None = None  # oldest policy version that sampled a token
    newest_version: int | None = None  # newest policy version that sampled a token
    staleness: int | None = None  # versions between the opened one and the one that the step trains; None without both
    truncated: bool = False  # a limit on tokens ended the rollout
    evaluation: bool = False
    error: str = ""  # why the rollout failed
    dropped: str = ""  # why the rollout is not trained: a filter, `stale`, `zero_advantage`, ...
    tokens: int = 0  # tokens of all sequences
    sampled_tokens: int = 0  # tokens that the policy sampled
    trained_tokens: int = 0  # tokens that the policy loss trains
    turns: int = 0
    seconds: float = 0.0  # duration of the rollout
    time: float = 0.0  # Unix seconds when the record was made
    finish_reason: str = ""

    @property
    def failed(self) -> bool:
        return self.state == "failed"


class ToolCall(msgspec.Struct, frozen=True):
    """A call of a tool, as the model wrote it."""

    id: str
    name: str
    arguments: str  # JSON as text, perhaps invalid


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a conversation."""

    role: str  # system, user, assistant or tool
    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = []
    tool_call_id: str = ""  # the call that this result of a tool answers
    name: str = ""  # name of the tool that answered
    sampled: bool = False  # the policy wrote it
    images: int = 0  # images, which are not part of `content`
    omitted: int = 0  # characters in the middle of long texts that were left out
    # Seconds since the rollout began; for an answer of the policy, when its request began and ended. None: unknown.
    started_s: float | None = None
    ended_s: float | None = None


class MessageSpan(msgspec.Struct, frozen=True):
    """The tokens of one message in a sequence."""

    message: int  # index in `AgentConversation.messages`
    start: int  # first token
    end: int  # after the last token


class TokenSequence(msgspec.Struct, frozen=True, kw_only=True):
    """One token sequence. Lists have one entry per token; None in a list means that there is no value."""

    spans: list[MessageSpan] = []  # in order; empty if the conversation was not kept
    token_ids: list[int] = []
    pieces: list[str] = []  # text of each token; empty if the tokenizer was unknown
    sampled: list[bool] = []  # the policy sampled this token
    trained: list[bool] = []  # the policy loss trains this token
    versions: list[int | None] = []  # policy version that sampled the token
    logprobs: list[float | None] = []  # the engine's log-probability
    trainer_logprobs: list[float | None] | None = None  # the trainer's, before its step. None: unknown
    ref_logprobs: list[float | None] | None = None  # the teacher's. None: there is no teacher, or it has not scored
    advantages: list[float | None] | None = None  # None: not computed


class AgentConversation(msgspec.Struct, frozen=True, kw_only=True):
    """The messages of one agent. A conversation that was rewritten or branched has several sequences."""

    agent: str = ""
    reward: float | None = None
    messages: list[Message] = []  # empty if the conversation was not kept
    tools: list[str] = []  # names of the tools that the policy was offered
    sequences: list[TokenSequence] = []


class RolloutTranscript(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is kept about one rollout."""

    summary: RolloutSummary
    conversations: list[AgentConversation] = []
