"use strict";
// The list of all runs.

const PHASE_FILTERS = [
  ["all", "All", () => true],
  ["active", "Active", (run) => isActive(run.phase)],
  ["problems", "With problems", (run) => run.health !== "ok"],
  ["ended", "Ended", (run) => !isActive(run.phase)],
];

const RUN_COLUMNS = [
  { title: "Run", class: "name", sort: (run) => run.run, cell: (run) => link(run.run, "run", run.run) },
  { title: "State", sort: (run) => run.phase, cell: (run) => phaseBadge(run.phase) },
  { title: "Progress", sort: (run) => (run.max_steps ? (run.step ?? 0) / run.max_steps : 0), cell: runProgress },
  { title: "Reward", class: "num", sort: (run) => run.reward, cell: (run) => number(run.reward, 3) },
  { title: "Loss", class: "num", sort: (run) => run.loss, cell: (run) => number(run.loss, 3) },
  { title: "s/step", class: "num", sort: (run) => run.seconds_per_step, cell: (run) => number(run.seconds_per_step, 3) },
  { title: "Tokens/s", class: "num", sort: (run) => run.tokens_per_s, cell: (run) => number(run.tokens_per_s, 3) },
  { title: "Updated", class: "num", sort: (run) => run.updated_at, cell: (run) => moment(run.updated_at) },
  { title: "Created", class: "num", sort: (run) => run.created_at, cell: (run) => moment(run.created_at) },
  { title: "Health", class: "text", sort: (run) => ["ok", "warning", "error"].indexOf(run.health), cell: runHealth },
];

function runProgress(run) {
  return [progressBar(run.step, run.max_steps), h("span", { class: "num dim" }, ` ${run.step ?? 0}/${run.max_steps}`)];
}

function runHealth(run) {
  if (run.health === "ok") return h("span", { class: "dim" }, "ok");
  return h("span", { class: run.health, title: run.problem }, run.problem);
}

function moment(time) {
  return h("span", { title: clock(time) }, ago(time));
}

function isActive(phase) {
  return ["pending", "starting", "running", "silent", "ending", "requeued"].includes(phase);
}

async function runsPage(main, signal) {
  const answer = await get("runs");
  let runs = answer.runs;
  const chosen = new Set();
  let filter = "all";

  const select = (run) => h("input", {
    type: "checkbox", "aria-label": `compare ${run.run}`, checked: chosen.has(run.run),
    onchange: (event) => choose(run.run, event.target.checked),
  });
  const table = sortableTable([{ title: "", class: "check", cell: select }, ...RUN_COLUMNS], {
    caption: "Runs", initial: 1 + RUN_COLUMNS.findIndex((column) => column.title === "Created"),
  });
  const count = h("span", { class: "dim", role: "status" });
  const compare = button("Compare", () => { location.hash = route("compare", ...chosen); }, { disabled: true });
  const filters = h("div", { class: "chips", role: "group", "aria-label": "Filter by state" });
  const search = searchField("Filter runs", () => update());

  function choose(name, on) {
    if (on) chosen.add(name);
    else chosen.delete(name);
    compare.disabled = chosen.size < 2;
    compare.textContent = chosen.size < 2 ? "Compare" : `Compare ${chosen.size} runs`;
  }
  function filterButton([name, title, test]) {
    const content = [title, h("small", null, String(runs.filter(test).length))];
    return button(content, () => { filter = name; update(); }, { "aria-pressed": String(name === filter) });
  }
  function update() {
    const [, , matches] = PHASE_FILTERS.find(([name]) => name === filter);
    const words = search.value.toLowerCase();
    const shown = runs.filter((run) => matches(run) && run.run.toLowerCase().includes(words));
    show(filters, PHASE_FILTERS.map(filterButton));
    count.textContent = `${shown.length === runs.length ? "" : `${shown.length} of `}${plural(runs.length, "run")}`;
    table.update(shown);
  }

  document.title = "Runs · primeslurm";
  show(main, h("header", { class: "page" }, h("h1", null, "Runs"), h("span", { class: "dim path" }, answer.directory)),
    runs.length ? [h("div", { class: "toolbar" }, filters, search, count, compare), table.element]
      : emptyState("There are no runs here yet.", "`primeslurm submit` starts one. This page shows it by itself."));
  update();
  let empty = !runs.length;
  follow(() => "live", {
    runs: ({ changed, names }) => {
      const known = new Map([...runs, ...changed].map((run) => [run.run, run]));
      runs = names.map((name) => known.get(name)).filter(Boolean);
      if (empty && runs.length) { empty = false; runsPage(main, signal); return; }
      if (!main.contains(document.activeElement) || document.activeElement === search) update();
      else keepFocus(main, update);
    },
  }, signal);
}

// Rebuild a part of the page, and keep the focus on the element at the same place of it.
function keepFocus(root, rebuild) {
  const focusable = () => [...root.querySelectorAll("a, button, input, select")];
  const index = focusable().indexOf(document.activeElement);
  rebuild();
  if (index >= 0) focusable()[index]?.focus({ preventScroll: true });
}
