"""The pages of one run as one HTML file, which needs neither a server nor a network."""

from __future__ import annotations

import base64
import contextlib
import hashlib
from typing import Any
from urllib.parse import quote

import msgspec

from primeslurm.base.errors import RunError
from primeslurm.dashboard import assets, charts
from primeslurm.dashboard.job_states import JobStates
from primeslurm.dashboard.run_data import RunData
from primeslurm.dashboard.text import encodable, encode
from primeslurm.run.directory import RunDirectory
from primeslurm.run.status.run_status import JobQuery

# Most evaluated examples in a report; those of the newest evaluations come first.
MAX_EXAMPLES = 2000
# Most rollouts in a report; the newest ones.
MAX_ROLLOUTS = 30
# Most tokens of these rollouts. A token takes about 60 bytes.
MAX_TOKENS = 50_000


def report(run: RunDirectory, job_state: JobQuery, now: float) -> str:
    """Return the pages of a run as one HTML document.

    Raises:
        RunError: the run has no attempt that can be read.
    """
    states = JobStates(lambda _: job_state)
    try:
        answers = _answers(RunData(run, states))
    finally:
        states.close()
    data = encode({"run": run.name, "written": now, "answers": answers}).decode()
    # JSON in a script element ends at "</script>", whatever is around it.
    data = data.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    style, script = assets.text(assets.STYLES), assets.text(assets.SCRIPTS)
    policy = f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:"
    return assets.page(run.name, {"style": style, "script": script, "data": data, "policy": policy})


def _answers(data: RunData) -> dict[str, Any]:
    """Return the answers of the server by the path for which the browser would ask."""
    table = data.metrics()
    evaluations = data.evaluations()
    answers: dict[str, Any] = {
        "status": data.status(),
        "curves": charts.curves(table, other=False),
        "curves?other=1": charts.curves(table, other=True),
        "fleet": data.fleet(),
        "events": data.attempts(),
        "evaluations": evaluations,
        "plan": data.plan(),
        "recipe": data.recipe(),
    }
    answers |= _rollouts(data)
    count = 0
    for record in reversed(evaluations["evaluations"]):
        for result in record["results"]:
            try:
                examples = data.evaluated_examples(record["step"], result["label"])
            except RunError:
                continue
            count += len(examples)
            if count <= MAX_EXAMPLES:
                answers[f"evaluations/{record['step']}/{_word(result['label'])}"] = examples
    return {f"runs/{_word(data.run.name)}/{path}": answer for path, answer in answers.items()}


def _rollouts(data: RunData) -> dict[str, Any]:
    try:
        page = data.rollouts.page({"limit": str(MAX_ROLLOUTS)})
    except RunError:  # rollouts cannot be read here; the report has everything else
        return {}
    transcripts, tokens = {}, 0
    for summary in page.rollouts:
        tokens += summary.tokens
        if tokens > MAX_TOKENS:
            break
        with contextlib.suppress(RunError):  # a damaged file, or one that was removed meanwhile
            transcripts[summary.id] = data.rollouts.transcript(summary.id)
    if not transcripts:
        return {}
    shown = [summary for summary in page.rollouts if summary.id in transcripts]
    by_path = {f"rollouts/{_word(rollout_id)}": transcript for rollout_id, transcript in transcripts.items()}
    return {"rollouts": msgspec.structs.replace(page, rollouts=shown), **by_path}


def _word(text: str) -> str:
    """Encode a part of a path as JavaScript's encodeURIComponent does."""
    return quote(encodable(text), safe="!'()*")


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
