"use strict";
// Results of evaluations, and their samples.

async function evaluationsTab(panel, run, signal) {
  const { evaluations, best } = await get(apiPath("runs", run.name, "evaluations"));
  if (signal.aborted) return;
  if (!evaluations.length) {
    show(panel, emptyState("This run has no complete evaluation.", "The section `evaluation` of a recipe asks for them."));
    return;
  }
  const detail = h("section");

  async function showSamples(step, label) {
    try {
      const examples = await get(apiPath("runs", run.name, "evaluations", step, label));
      const table = examplesTable(label, step);
      table.update(examples);
      show(detail, h("h2", null, `${label}, step ${step}`),
        note(`${plural(examples.length, "example")}. Point at a sample for its details.`), table.element);
    } catch (error) {
      show(detail, note(error.message, "error"));
    }
    detail.scrollIntoView({ block: "nearest" });
  }
  function transcripts(step, label) {
    const filters = new URLSearchParams({ evaluation: "true", first_step: step, last_step: step, environment: label });
    return exported ? null : link("Transcripts", "run", run.name, "rollouts", filters.toString());
  }
  const row = (record, result) => [
    [h("b", null, `step ${record.step} `), best?.step === record.step ? badge(`best ${best.metric}`, "good") : null],
    result.label, `${result.examples} × ${result.samples}`, h("b", null, estimate(result.reward)),
    Object.entries(result.pass_at).map(([k, each]) => `pass@${k} ${estimate(each)}`).join(", "),
    percent(result.failed), percent(result.truncated), number(result.length, 3),
    versionRange(record), duration(record.seconds),
    h("span", { class: "chips" }, button("Samples", () => showSamples(record.step, result.label)),
      transcripts(record.step, result.label)),
  ];
  const titles = ["Step", "Environment", "Examples", "Reward", "pass@k"];
  titles.push("Failed", "Truncated", "Tokens", "Versions", "Time", "");
  const rows = evaluations.toReversed().flatMap((record) => record.results.map((result) => row(record, result)));
  show(panel, section("Evaluations", simpleTable(titles, rows)), detail);
}

function estimate({ value, stderr }) {
  return `${number(value, 3)}${isNumber(stderr) ? ` ± ${number(stderr, 2)}` : ""}`;
}

function examplesTable(label, step) {
  const firstError = (example) => example.samples.find((sample) => sample.error)?.error ?? "";
  return sortableTable([
    { title: "Example", class: "num", sort: (each) => each.example, cell: (each) => String(each.example) },
    { title: "Mean reward", class: "num", sort: (each) => each.reward, cell: (each) => number(each.reward, 3) },
    { title: "Samples", cell: (each) => h("span", { class: "chips" }, each.samples.map(sampleChip)) },
    { title: "Error", class: "text", cell: (each) => h("span", { class: "error" }, visible(firstError(each))) },
  ], { caption: `Examples of ${label} at step ${step}` });
}

function sampleChip(sample) {
  const level = sample.error ? "bad" : sample.reward >= 1 ? "good" : sample.reward > 0 ? "warn" : "idle";
  const title = [
    `sample ${sample.sample}`, plural(sample.tokens, "token"), plural(sample.turns, "turn"), sample.finish_reason,
    duration(sample.seconds), `versions ${versionRange(sample)}`, sample.error,
  ].filter(Boolean).join(", ");
  return h("span", { class: `chip ${level}`, title }, h("i"), number(sample.reward, 3));
}
