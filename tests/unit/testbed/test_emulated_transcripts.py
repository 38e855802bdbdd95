"""Emulated rollouts can be read like real ones: each token is a word."""

from __future__ import annotations

from primeslurm.orchestrator.rollouts import transcripts
from primeslurm.orchestrator.worker.generate_endpoint import Completion
from primeslurm.testbed.emulated.environment import Conversation
from primeslurm.wire.batches.rollout import RolloutInfo


def test_emulated_rollout_has_a_transcript() -> None:
    talk = Conversation()
    talk.given([3, 4])
    talk.sampled(Completion([5, 6, 7], [-0.5] * 3, [2, 2, 3], "stop"))
    talk.given([8])
    info = RolloutInfo("r", "g", "e", 2, 1.0, turns=talk.turns, transcript=talk.transcript())
    summary, kept = transcripts.stored([talk.rollout(info, needs_observed=False)], {"state": "waiting"})
    (conversation,) = kept.shown(summary, {}).conversations
    shown = [(message.role, message.content, message.sampled) for message in conversation.messages]
    assert shown == [("user", "w3 w4", False), ("assistant", "w5 w6 w7", True), ("tool", "w8", False)]
    (sequence,) = conversation.sequences
    assert [(span.start, span.end) for span in sequence.spans] == [(0, 2), (2, 5), (5, 6)]
    assert "".join(sequence.pieces) == " w3 w4 w5 w6 w7 w8" and (summary.oldest_version, summary.newest_version) == (
        2,
        3,
    )
