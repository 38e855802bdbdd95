"use strict";
// The metrics of a run as charts.

async function curvesTab(panel, run, signal) {
  const path = apiPath("runs", run.name, "curves");
  const controls = plotControls((state) => plots.forEach((plot) => plot.set(state)));
  const search = searchField("Filter charts", () => filter());
  const body = h("div");
  let drawn = [];

  function chartSection(title, charts) {
    const made = charts.map((chart) => new Plot(chart, controls.state));
    drawn.push(...made);
    return h("section", { class: "charts-section" }, h("h2", null, title),
      h("div", { class: "charts" }, made.map((plot) => plot.element)));
  }
  function filter() {
    const words = search.value.toLowerCase();
    for (const plot of drawn) {
      const text = `${plot.chart.title} ${plot.chart.lines.map((line) => `${line.label} ${line.metric}`).join(" ")}`;
      plot.element.hidden = !text.toLowerCase().includes(words);
    }
    for (const section of body.querySelectorAll(".charts-section")) {
      section.hidden = [...section.querySelectorAll(".chart")].every((chart) => chart.hidden);
    }
  }
  function otherMetrics(count) {
    const inside = h("div");
    const details = h("details", { class: "more" }, h("summary", null, plural(count, "more metric")), inside);
    details.addEventListener("toggle", async () => {
      if (!details.open || inside.childElementCount) return;
      try {
        const answer = await get(`${path}?other=1`);
        show(inside, chartSection("Other metrics", answer.charts));
        filter();
      } catch (error) {
        show(inside, note(error.message, "error"));
      }
    });
    return details;
  }
  async function load() {
    const answer = await get(path);
    if (signal.aborted) return;
    destroyPlots();
    drawn = [];
    run.known = { rows: answer.rows, generation: answer.generation };
    const titles = [...new Set(answer.charts.map((chart) => chart.section))];
    if (!titles.length) {
      show(body, emptyState("No step has been trained yet.", "The curves appear with the first step."));
      return;
    }
    show(body, titles.map((title) => chartSection(title, answer.charts.filter((chart) => chart.section === title))),
      answer.other ? otherMetrics(answer.other) : null);
    filter();
  }

  show(panel, h("div", { class: "toolbar" }, search, controls.element), body);
  signal.addEventListener("abort", destroyPlots);
  await load();
  run.onRows = ({ begin, rows }) => {
    const fresh = rows.slice(Math.max(0, run.known.rows - begin));
    if (!fresh.length) return;
    run.known.rows = begin + rows.length;
    const shown = new Set(drawn.flatMap((plot) => plot.chart.lines.map((line) => line.metric)));
    if (!drawn.length || drawn.some((plot) => plot.chart.steps.length > 2000) || shown.size === 0) load();
    else for (const plot of drawn) if (!plot.chart.evaluation) plot.append(fresh);
  };
  run.onReset = load;
  }
