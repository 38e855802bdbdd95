"use strict";
// The rollouts of a run: a list with filters, and one of them.

const ROLLOUT_LEVEL = { trained: "good", batched: "busy", evaluated: "busy", dropped: "warn", failed: "bad" };
const ROLLOUT_PAGE = 100;
const YES_NO = [["", "any"], ["true", "yes"], ["false", "no"]];
let listed = []; // ids of the list that was shown last, for the way to the next one

const rolloutBadge = (state) => badge(state, ROLLOUT_LEVEL[state] ?? "idle");

// `place` is a rollout's id, or the filters as a query string.
async function rolloutsTab(panel, run, signal, place = "") {
  if (place && !place.includes("=")) await rolloutPage(panel, run, signal, place);
  else await rolloutList(panel, run, signal, new URLSearchParams(place));
}

async function rolloutList(panel, run, signal, filters) {
  const path = apiPath("runs", run.name, "rollouts");
  const body = h("div");
  const table = rolloutTable(run);
  let offset = 0;
  let requests = 0;

  function filterBy(name, value) {
    if (value) filters.set(name, value);
    else filters.delete(name);
    history.replaceState(null, "", route("run", run.name, "rollouts", ...(filters.size ? [filters.toString()] : [])));
    load(0);
  }
  async function load(from) {
    offset = from;
    requests += 1;
    const request = requests;
    const parameters = new URLSearchParams([...filters, ["offset", offset], ["limit", ROLLOUT_PAGE]]);
    let answer;
    try {
      answer = await get(exported ? path : `${path}?${parameters}`);
    } catch (error) {
      show(body, note(error.message, "error"));
      return;
    }
    if (signal.aborted || request !== requests) return; // a later filter was answered first
    const last = offset + answer.rollouts.length;
    const range = `${number(offset + 1)} to ${number(last)} of ${plural(answer.total, "rollout")}`;
    const pages = h("div", { class: "toolbar" },
      h("span", { class: "dim num", role: "status" }, answer.total ? range : "No rollout matches."),
      button("Previous", () => load(Math.max(0, offset - ROLLOUT_PAGE)), { disabled: offset === 0 }),
      button("Next", () => load(last), { disabled: Boolean(exported) || last >= answer.total }),
      exported ? null : button("Refresh", () => load(offset)));
    listed = answer.rollouts.map((rollout) => rollout.id);
    table.update(answer.rollouts);
    show(body, answer.problems.map((problem) => note(visible(problem), "warning")),
      answer.total || filters.size ? [pages, table.element]
        : emptyState("This run has kept no rollouts.", "Rollouts appear here once a group is complete."));
  }
  show(panel, exported ? null : rolloutFilters(filters, filterBy), body);
  await load(0);
}

function rolloutFilters(filters, filterBy) {
  const field = (name, label, control) => h("label", { class: "field" }, h("span", null, label), control);
  const input = (name, label, props) => field(name, label, h("input", {
    name, value: filters.get(name) ?? "", onchange: (event) => filterBy(name, event.target.value.trim()), ...props,
  }));
  const whole = { type: "number", min: 0 };
  const decimal = { type: "number", step: "any" };
  const flag = (name, label, options = YES_NO) =>
    field(name, label, choices(label, options, (value) => filterBy(name, value), filters.get(name) ?? "", { name }));
  return h("form", { class: "filters", onsubmit: (event) => event.preventDefault() },
    input("first_step", "From step", whole), input("last_step", "To step", whole),
    input("environment", "Environment"), input("group", "Group"), input("version", "Version", whole),
    input("min_reward", "Reward from", decimal), input("max_reward", "Reward to", decimal),
    flag("evaluation", "Evaluation"), flag("truncated", "Truncated"), flag("failed", "Failed"), flag("dropped", "Dropped"),
    flag("order", "Order", [["", "newest first"], ["oldest", "oldest first"]]));
}

function rolloutTable(run) {
  const numeric = (title, value, text = (rollout) => number(value(rollout), 3)) =>
    ({ title, class: "num", sort: value, cell: text });
  return sortableTable([
    numeric("Step", ({ step }) => step ?? Infinity, ({ step }) => (step === null ? "–" : String(step))),
    { title: "Rollout", class: "name", cell: ({ id }) => link(id, "run", run.name, "rollouts", id) },
    { title: "Environment", cell: ({ environment }) => visible(environment) },
    { title: "State", cell: ({ state }) => rolloutBadge(state) },
    numeric("Reward", ({ reward }) => reward),
    numeric("Advantage", ({ advantage }) => advantage),
    numeric("Tokens", ({ sampled_tokens }) => sampled_tokens, ({ sampled_tokens }) => number(sampled_tokens)),
    numeric("Turns", ({ turns }) => turns),
    numeric("Versions", ({ oldest_version }) => oldest_version, versionRange),
    numeric("Time", ({ seconds }) => seconds, ({ seconds }) => duration(seconds)),
    { title: "Remark", class: "text", cell: rolloutRemark },
  ], { caption: "Rollouts" });
}

function rolloutRemark({ error, dropped, truncated }) {
  const text = visible(error || dropped || (truncated ? "truncated" : ""));
  return h("span", { class: error ? "error" : "warning", title: text }, text);
}

function versionRange({ oldest_version: oldest, newest_version: newest }) {
  return oldest === null ? "–" : oldest === newest ? String(oldest) : `${oldest}–${newest}`;
}

async function rolloutPage(panel, run, signal, id) {
  const transcript = await get(apiPath("runs", run.name, "rollouts", id));
  if (signal.aborted) return;
  const { summary } = transcript;
  const { step } = summary;
  const position = listed.indexOf(summary.id);
  const neighbour = (text, offset) =>
    position >= 0 && listed[position + offset] ? link(text, "run", run.name, "rollouts", listed[position + offset]) : null;
  const filtered = (text, parameters) =>
    exported ? null : link(text, "run", run.name, "rollouts", new URLSearchParams(parameters).toString());
  show(panel,
    h("div", { class: "title rollout-title" },
      link("← Rollouts", "run", run.name, "rollouts"), h("h2", null, visible(summary.id)), rolloutBadge(summary.state),
      h("span", { class: "dim" }, visible(summary.environment)),
      filtered("its group", { group: summary.group }),
      step === null ? null : filtered(`step ${step}`, { first_step: step, last_step: step }),
      h("span", { class: "space" }), neighbour("previous", -1), neighbour("next", 1)),
    rolloutFacts(summary), transcriptView(transcript));
}
