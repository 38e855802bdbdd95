"use strict";
// Charts, drawn by uPlot.

const PALETTE = 8;
const PLOT_HEIGHT = 190;
const MINUTE = 60;
const HOUR = 3600;
const DAY = 86400;
// Distances of marks on an axis of durations.
const TIME_STEPS = [
  1, 2, 5, 10, 20, 30, ...[1, 2, 5, 10, 20, 30].map((count) => count * MINUTE),
  ...[1, 2, 4, 6, 12].map((count) => count * HOUR), ...[1, 2, 5, 10, 20, 50, 100].map((count) => count * DAY),
];
const plots = new Set();

// The colours that custom properties have in the current theme. Asking the browser for each one is slow.
const colours = new Map();

function themeColour(name, alpha = 1) {
  if (!colours.has(name)) {
    const probe = h("span", { hidden: true, style: { color: `var(--${name})` } });
    document.body.append(probe);
    colours.set(name, getComputedStyle(probe).color);
    probe.remove();
  }
  const colour = colours.get(name);
  return alpha === 1 ? colour : colour.replace(/^rgb\((.*)\)$/, `rgba($1, ${alpha})`);
}

function smoothed(values, weight) {
  let mean = 0;
  let share = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    share = weight * share + (1 - weight);
    return mean / share;
  });
}

// Marks of a logarithmic axis, at most about six.
function powersOfTen(plot, axis, low, high) {
  const [first, last] = [Math.ceil(Math.log10(low) - 1e-9), Math.floor(Math.log10(high) + 1e-9)];
  const step = Math.max(1, Math.ceil((last - first) / 5));
  return Array.from({ length: Math.max(0, Math.floor((last - first) / step) + 1) }, (_, i) => 10 ** (last - i * step)).reverse();
}

const LOG_AXIS = { splits: powersOfTen, filter: (plot, splits) => splits };

// One chart. `chart`: {title, unit, log, stacked, lines: [{label, metric, colour?}], steps, times, values}.
class Plot {
  constructor(chart, { smoothing = 0, axis = "step", sync = "page" } = {}) {
    Object.assign(this, { chart, smoothing, axis, sync, hidden: new Set() });
    this.legend = h("div", { class: "legend" });
    this.canvas = h("div", { class: "canvas", role: "img" });
    const unit = chart.unit ? h("small", null, chart.unit) : null;
    this.element = h("figure", { class: "chart" },
      h("figcaption", null, h("span", null, chart.title), unit), this.canvas, this.legend);
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.canvas);
    plots.add(this);
  }

  get width() {
    return Math.floor(this.canvas.clientWidth);
  }

  resize() {
    if (this.width < 50) return;
    if (!this.uplot) this.draw();
    else if (this.uplot.width !== this.width) this.uplot.setSize({ width: this.width, height: PLOT_HEIGHT });
  }

  draw() {
    this.uplot?.destroy();
    this.uplot = null;
    if (this.width < 50) return;
    this.uplot = new uPlot(this.options(), this.data(), this.canvas);
    this.showValues();
  }

  set(changes) {
    Object.assign(this, changes);
    this.draw();
  }

  destroy() {
    plots.delete(this);
    this.observer.disconnect();
    this.uplot?.destroy();
  }

  // Add rows of metrics: {step, time, <metric>: value}.
  append(rows) {
    const metrics = this.chart.lines.map((line) => line.metric);
    for (const row of rows) {
      if (!metrics.some((metric) => metric in row)) continue;
      this.chart.steps.push(row.step);
      this.chart.times.push(row.time ?? null);
      metrics.forEach((metric, index) => this.chart.values[index].push(row[metric] ?? null));
    }
    this.uplot?.setData(this.data());
    this.showValues();
  }

  visible(index) {
    return !this.hidden.has(this.chart.lines[index].label);
  }

  data() {
    const { steps, times, values, log, stacked } = this.chart;
    const start = times.find(isNumber) ?? 0;
    const x = this.axis === "step" ? steps : times.map((time) => (time === null ? null : time - start));
    let lines = log ? values.map((line) => line.map((value) => (value > 0 ? value : null))) : values;
    if (stacked) {
      const sums = steps.map(() => 0);
      lines = lines.map((line, index) =>
        line.map((value, i) => (this.visible(index) ? (sums[i] += value ?? 0) : null)));
      return [x, ...lines.toReversed()];
    }
    if (!this.smoothing) return [x, ...lines];
    return [x, ...lines, ...lines.map((line) => smoothed(line, this.smoothing))];
  }

  colour(index, alpha) {
    const number = this.chart.lines[index].colour ?? index;
    return themeColour(`c${number % PALETTE}`, alpha);
  }

  series() {
    const { lines, stacked, steps } = this.chart;
    const points = (index) => ({ show: steps.length <= 40, size: 4, fill: this.colour(index) });
    const common = (index) => ({ show: this.visible(index), spanGaps: true, points: points(index) });
    if (stacked) {
      return lines.map((_, index) => ({
        ...common(index), points: { show: false }, stroke: this.colour(index), fill: this.colour(index, 0.55), width: 1,
      })).toReversed();
    }
    const raw = lines.map((_, index) => ({
      ...common(index), stroke: this.colour(index, this.smoothing ? 0.25 : 1), width: 1.5,
    }));
    if (!this.smoothing) return raw;
    return [...raw, ...lines.map((_, index) => ({
      ...common(index), points: { show: false }, stroke: this.colour(index), width: 1.8,
    }))];
  }

  scale() {
    if (this.chart.log) return { distr: 3 };
    return this.chart.stacked ? { range: (_, low, high) => [0, (high ?? 1) * 1.05] } : {};
  }

  options() {
    const text = themeColour("dim");
    const grid = { stroke: themeColour("grid"), width: 1 };
    const font = `11px ${getComputedStyle(document.body).fontFamily}`;
    const axis = { stroke: text, grid, ticks: { show: false }, font };
    const steps = this.axis === "step";
    const labels = (text) => (_, splits) => splits.map((value) => (value === null ? "" : text(value)));
    return {
      width: this.width,
      height: PLOT_HEIGHT,
      padding: [8, 14, 0, 0],
      legend: { show: false },
      cursor: { sync: { key: `${this.sync}-${this.axis}` }, y: false, points: { size: 6 } },
      scales: {
        x: { time: false },
        y: this.scale(),
      },
      axes: [
        { ...axis, size: 26, space: 60, values: labels(steps ? number : duration), ...(steps ? {} : { incrs: TIME_STEPS }) },
        { ...axis, size: 52, space: 32, values: labels((value) => number(value, 3)), ...(this.chart.log ? LOG_AXIS : {}) },
      ],
      series: [{}, ...this.series()],
      hooks: { setCursor: [(plot) => this.showValues(plot.cursor.idx)] },
    };
  }

  // The values at an index, or the newest ones.
  showValues(index) {
    const { lines, values, steps, times } = this.chart;
    const at = index ?? steps.length - 1;
    const where = at < 0 ? "" : this.axis === "step" ? `step ${steps[at]}` : clock(times[at]);
    const texts = lines.map((line, i) => {
      const column = values[i];
      let row = at;
      if (index === null || index === undefined) while (row > 0 && column[row] === null) row -= 1;
      return number(column[row]);
    });
    if (this.legend.childElementCount !== lines.length + 1) this.buildLegend();
    [...this.legend.children].forEach((item, i) => {
      if (i < lines.length) item.lastChild.textContent = texts[i];
      else item.textContent = where;
    });
    const summary = lines.map((line, i) => `${line.label} ${texts[i]}`).join(", ");
    this.canvas.setAttribute("aria-label", `${this.chart.title}, ${where}: ${summary}`);
  }

  buildLegend() {
    const toggle = (label, button) => {
      if (!this.hidden.delete(label)) this.hidden.add(label);
      button.setAttribute("aria-pressed", String(!this.hidden.has(label)));
      this.draw();
    };
    show(this.legend, this.chart.lines.map((line, index) => {
      const swatch = h("i", { class: `swatch c${(line.colour ?? index) % PALETTE}` });
      return h("button", {
        type: "button", "aria-pressed": String(!this.hidden.has(line.label)), title: line.metric,
        onclick: (event) => toggle(line.label, event.currentTarget),
      }, swatch, h("span", null, line.label), h("b", null, ""));
    }), h("span", { class: "where" }, ""));
  }
}

function redrawPlots() {
  colours.clear();
  for (const plot of plots) plot.draw();
}

function destroyPlots() {
  for (const plot of [...plots]) plot.destroy();
}

// Controls for smoothing and the x axis. `change` gets {smoothing, axis}.
function plotControls(change) {
  const state = { smoothing: Number(settings.get("smoothing", "0")), axis: settings.get("axis", "step") };
  const set = (name, value) => {
    state[name] = value;
    settings.set(name, String(value));
    change({ ...state });
  };
  const slider = h("input", {
    type: "range", min: 0, max: 0.95, step: 0.05, value: state.smoothing,
    oninput: (event) => set("smoothing", Number(event.target.value)),
  });
  const axis = h("select", { onchange: (event) => set("axis", event.target.value) },
    h("option", { value: "step", selected: state.axis === "step" }, "steps"),
    h("option", { value: "time", selected: state.axis === "time" }, "time"));
  const element = h("div", { class: "controls" },
    h("label", null, "Smoothing ", slider), h("label", null, "Over ", axis));
  return { element, state };
}
