"use strict";
// Curves of several runs over each other.

async function comparePage(main, signal, names) {
  const answers = await Promise.all(names.map((name) => get(apiPath("runs", name, "curves"))));
  if (signal.aborted) return;
  document.title = `${names.join(" and ")} · primeslurm`;
  const controls = plotControls((state) => plots.forEach((plot) => plot.set(state)));
  const charts = chartPerMetric(answers).map((metric) => overlaid(metric, names));
  const drawn = (charts) =>
    h("div", { class: "charts" }, charts.map((chart) => new Plot(chart, controls.state).element));
  const titles = [...new Set(charts.map((chart) => chart.section))];

  signal.addEventListener("abort", destroyPlots);
  show(main,
    h("header", { class: "page" }, h("h1", null, "Compare"), h("div", { class: "chips" }, names.map(runChip))),
    h("div", { class: "toolbar" }, controls.element),
    names.length === 2 ? section("Recipes", await recipeDifference(names)) : null,
    titles.map((title) => section(title, drawn(charts.filter((chart) => chart.section === title)))),
    charts.length ? null : emptyState("These runs have no metrics yet."));
}

function runChip(name, index) {
  return h("a", { class: "chip", href: route("run", name) }, h("i", { class: `swatch c${index % PALETTE}` }), name);
}

// Each metric of each chart, with its series in all runs that have it.
function chartPerMetric(answers) {
  const metrics = new Map();
  answers.forEach((answer, run) => {
    for (const chart of answer.charts) {
      chart.lines.forEach((line, i) => {
        const key = JSON.stringify([chart.section, chart.title, line.metric]);
        const { section, unit, log } = chart;
        const title = chart.lines.length > 1 ? `${chart.title}: ${line.label}` : chart.title;
        if (!metrics.has(key)) metrics.set(key, { section, title, unit, log, metric: line.metric, runs: [] });
        metrics.get(key).runs.push({ run, steps: chart.steps, times: chart.times, values: chart.values[i] });
      });
    }
  });
  return [...metrics.values()];
}

// One x axis with the steps of all runs. Times count from each run's first step.
function overlaid({ runs, ...chart }, names) {
  const points = new Map();
  runs.forEach(({ steps, times, values }, position) => {
    const start = times.find(isNumber) ?? 0;
    steps.forEach((step, i) => {
      if (!points.has(step)) points.set(step, { step, time: null, values: runs.map(() => null) });
      const point = points.get(step);
      point.values[position] = values[i];
      if (point.time === null && isNumber(times[i])) point.time = times[i] - start;
    });
  });
  const ordered = [...points.values()].sort((a, b) => a.step - b.step);
  return {
    ...chart,
    stacked: false,
    steps: ordered.map((point) => point.step),
    times: ordered.map((point) => point.time),
    lines: runs.map(({ run }) => ({ label: names[run], metric: chart.metric, colour: run })),
    values: runs.map((_, position) => ordered.map((point) => point.values[position])),
  };
}

async function recipeDifference([a, b]) {
  try {
    const changes = await get(apiPath("runs", a, "diff", b));
    return changes.length ? differenceTable(changes, a, b) : note("The recipes ask for the same.");
  } catch (error) {
    return note(error.message, "error");
  }
}

// changes: {field, a, b}
function differenceTable(changes, a, b) {
  const rows = changes.map((change) => [
    h("code", null, change.field),
    h("code", { class: "removed" }, change.a ?? "not set"),
    h("code", { class: "added" }, change.b ?? "not set"),
  ]);
  return simpleTable(["Field", a, b], rows);
}
