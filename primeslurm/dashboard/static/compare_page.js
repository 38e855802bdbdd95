"use strict";
// Curves of several runs over each other.

async function comparePage(main, signal, names) {
  const answers = await Promise.all(names.map((name) => get(apiPath("runs", name, "curves"))));
  if (signal.aborted) return;
  document.title = `${names.join(" and ")} · primeslurm`;
  const controls = plotControls((state) => plots.forEach((plot) => plot.set(state)));
  const key = (chart, line) => JSON.stringify([chart.section, chart.title, line.metric]);
  const combined = new Map();
  answers.forEach((answer, index) => {
    for (const chart of answer.charts) {
      chart.lines.forEach((line, i) => {
        const title = chart.lines.length > 1 || line.label !== chart.title.toLowerCase() ? `${chart.title}: ${line.label}` : chart.title;
        const entry = combined.get(key(chart, line)) ?? { section: chart.section, title, unit: chart.unit, log: chart.log, metric: line.metric, runs: [] };
        entry.runs.push({ index, steps: chart.steps, times: chart.times, values: chart.values[i] });
        combined.set(key(chart, line), entry);
      });
    }
  });
  const charts = [...combined.values()].map(overlaid);

  // One x axis with the steps of all runs. Times count from each run's first step.
  function overlaid(entry) {
    const points = new Map();
    entry.runs.forEach((run, position) => {
      const start = run.times.find(isNumber) ?? 0;
      run.steps.forEach((step, i) => {
        const point = points.get(step) ?? { step, time: null, values: entry.runs.map(() => null) };
        point.values[position] = run.values[i];
        if (point.time === null && isNumber(run.times[i])) point.time = run.times[i] - start;
        points.set(step, point);
      });
    });
    const ordered = [...points.values()].sort((a, b) => a.step - b.step);
    return {
      ...entry, stacked: false, steps: ordered.map((point) => point.step), times: ordered.map((point) => point.time),
      lines: entry.runs.map((run) => ({ label: names[run.index], metric: entry.metric, colour: run.index })),
      values: entry.runs.map((_, position) => ordered.map((point) => point.values[position])),
    };
  }
  signal.addEventListener("abort", destroyPlots);
  const sections = [...new Set(charts.map((chart) => chart.section))];
  show(main, h("header", { class: "page" }, h("h1", null, "Compare"),
    h("div", { class: "chips" }, names.map((name, index) => h("a", { class: "chip", href: route("run", name) }, h("i", { class: `swatch c${index % PALETTE}` }), name)))),
  h("div", { class: "toolbar" }, controls.element),
  names.length === 2 ? h("section", null, h("h2", null, "Recipes"), await recipeDifference(names)) : null,
  charts.length ? sections.map((section) => h("section", { class: "charts-section" }, h("h2", null, section),
    h("div", { class: "charts" }, charts.filter((chart) => chart.section === section).map((chart) => new Plot(chart, controls.state).element))))
    : emptyState("These runs have no metrics yet."));
}

async function recipeDifference([a, b]) {
  try {
    const { recipe } = await get(apiPath("runs", a, "diff", b));
    if (!recipe.length) return note("The recipes ask for the same.");
    return simpleTable(["Field", a, b], recipe.map((change) => [h("code", null, change.field),
      h("code", { class: "removed" }, change.a ?? "not set"), h("code", { class: "added" }, change.b ?? "not set")]));
  } catch (error) {
    return note(error.message, "error");
  }
}
