"use strict";
// Results of evaluations, and their samples.

async function evaluationsTab(panel, run, signal) {
  const answer = await get(apiPath("runs", run.name, "evaluations"));
  if (signal.aborted) return;
  const estimate = (each) => each ? `${number(each.value, 3)}${each.stderr === null ? "" : ` ± ${number(each.stderr, 2)}`}` : "–";
  if (!answer.evaluations.length) {
    show(panel, emptyState("This run has no complete evaluation.", "The section `evaluation` of a recipe asks for them."));
    return;
  }
  const detail = h("section");
  const rows = answer.evaluations.toReversed().flatMap((record) => record.results.map((result) => [
    [h("b", null, `step ${record.step}`), answer.best?.step === record.step ? badge(`best ${answer.best.metric}`, "good") : null],
    result.label, `${result.examples} × ${result.samples}`, h("b", null, estimate(result.reward)),
    Object.entries(result.pass_at).map(([k, each]) => `pass@${k} ${estimate(each)}`).join(", ") || "–",
    percent(result.failed), percent(result.truncated), number(result.length, 3),
    `${record.oldest_version}–${record.newest_version}`, duration(record.seconds),
    [h("button", { type: "button", onclick: () => samples(record.step, result.label) }, "Samples"), exported ? null : transcripts(record.step, result.label)],
  ]));
  function transcripts(step, label) {
    const filters = new URLSearchParams({ evaluation: "true", first_step: step, last_step: step, environment: label });
    return [" ", h("a", { href: route("run", run.name, "rollouts", filters.toString()) }, "Transcripts")];
  }
  async function samples(step, label) {
    const path = apiPath("runs", run.name, "evaluations", step, label);
    let examples;
    try {
      examples = await get(path);
    } catch (error) {
      show(detail, note(error.message, "error"));
      return;
    }
    const rewards = (each) => h("span", { class: "chips" }, each.samples.map((sample) => h("span", {
      class: `chip ${sample.error ? "bad" : sample.reward >= 1 ? "good" : sample.reward > 0 ? "warn" : "idle"}`,
      title: [`sample ${sample.sample}`, `${sample.tokens} tokens`, plural(sample.turns, "turn"), sample.finish_reason, duration(sample.seconds),
        `versions ${sample.oldest_version} to ${sample.newest_version}`, sample.error ?? ""].filter(Boolean).join(", "),
    }, h("i"), number(sample.reward, 3))));
    const table = sortableTable([
      { title: "Example", class: "num", sort: (each) => each.example, cell: (each) => String(each.example) },
      { title: "Mean reward", class: "num", sort: (each) => each.reward, cell: (each) => number(each.reward, 3) },
      { title: "Samples", cell: rewards },
      { title: "Error", class: "text", cell: (each) => h("span", { class: "error" }, each.samples.find((sample) => sample.error)?.error ?? "") },
    ], { caption: `Examples of ${label} at step ${step}` });
    table.update(examples);
    show(detail, h("h2", null, `${label}, step ${step}`), note(`${plural(examples.length, "example")}. Point at a sample for its details.`), table.element);
    detail.scrollIntoView({ block: "nearest" });
  }
  show(panel, h("section", null, h("h2", null, "Evaluations"), simpleTable(["Step", "Environment", "Examples", "Reward", "pass@k", "Failed",
    "Truncated", "Tokens", "Versions", "Time", ""], rows)), detail);
}
