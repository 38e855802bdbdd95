"use strict";
// The rollouts of a run: a list with filters, and one of them.

const STATE_OF_ROLLOUT = { trained: "good", evaluated: "busy", waiting: "idle", dropped: "warn", failed: "bad" };
const ROLLOUT_PAGE = 100;
let listed = []; // ids of the list that was shown last, for the way to the next one

// `place` is a rollout's id, or the filters as a query string.
async function rolloutsTab(panel, run, signal, place = "") {
  if (place && !place.includes("=")) await rolloutPage(panel, run, signal, place);
  else await rolloutList(panel, run, signal, new URLSearchParams(place));
}

async function rolloutList(panel, run, signal, filters) {
  const path = apiPath("runs", run.name, "rollouts");
  const body = h("div");
  let offset = 0;

  function filterBy(name, value) {
    if (value) filters.set(name, value);
    else filters.delete(name);
    offset = 0;
    const query = filters.toString();
    history.replaceState(null, "", query ? route("run", run.name, "rollouts", query) : route("run", run.name, "rollouts"));
    load();
  }
  const field = (name, label, type, props) => h("label", { class: "field" }, h("span", null, label),
    h("input", { type, value: filters.get(name) ?? "", onchange: (event) => filterBy(name, event.target.value.trim()), ...props }));
  const choice = (name, label, options) => h("label", { class: "field" }, h("span", null, label),
    h("select", { onchange: (event) => filterBy(name, event.target.value) }, [["", "any"], ...options].map(([value, text]) =>
      h("option", { value, selected: (filters.get(name) ?? "") === value }, text))));
  const yesNo = [["true", "yes"], ["false", "no"]];
  const form = h("form", { class: "filters", onsubmit: (event) => event.preventDefault() },
    field("first_step", "From step", "number", { min: 0 }), field("last_step", "To step", "number", { min: 0 }),
    field("environment", "Environment", "text"), field("min_reward", "Reward from", "number", { step: "any" }), field("max_reward", "Reward to", "number", { step: "any" }),
    field("group", "Group", "text"), field("version", "Version", "number", { min: 0 }),
    choice("evaluation", "Evaluation", yesNo), choice("truncated", "Truncated", yesNo), choice("failed", "Failed", yesNo), choice("dropped", "Dropped", yesNo),
    choice("order", "Order", [["oldest", "oldest first"]]));

  const table = sortableTable([
    { title: "Step", class: "num", sort: (each) => each.step ?? Infinity, cell: (each) => each.step === null ? "–" : String(each.step) },
    { title: "Rollout", class: "name", cell: (each) => h("a", { href: route("run", run.name, "rollouts", each.id) }, each.id) },
    { title: "Environment", cell: (each) => visible(each.environment) },
    { title: "State", cell: (each) => badge(each.state, STATE_OF_ROLLOUT[each.state] ?? "idle") },
    { title: "Reward", class: "num", sort: (each) => each.reward, cell: (each) => number(each.reward, 3) },
    { title: "Advantage", class: "num", sort: (each) => each.advantage, cell: (each) => number(each.advantage, 3) },
    { title: "Tokens", class: "num", sort: (each) => each.sampled_tokens, cell: (each) => number(each.sampled_tokens) },
    { title: "Turns", class: "num", sort: (each) => each.turns, cell: (each) => String(each.turns) },
    { title: "Versions", class: "num", cell: (each) => each.oldest_version === null ? "–" : each.oldest_version === each.newest_version ? String(each.newest_version) : `${each.oldest_version}–${each.newest_version}` },
    { title: "Time", class: "num", sort: (each) => each.seconds, cell: (each) => duration(each.seconds) },
    { title: "Remark", class: "text", cell: (each) => remark(each) },
  ], { caption: "Rollouts" });

  const remark = (each) => {
    const text = visible(each.error || each.dropped || (each.truncated ? "truncated" : ""));
    return h("span", { class: each.error ? "error" : "warning", title: text }, text);
  };
  async function load() {
    let answer;
    try {
      answer = await get(exported ? path : `${path}?${new URLSearchParams([...filters, ["offset", offset], ["limit", ROLLOUT_PAGE]])}`);
    } catch (error) {
      show(body, note(error.message, "error"));
      return;
    }
    if (signal.aborted) return;
    const last = offset + answer.rollouts.length;
    const pages = h("div", { class: "toolbar" },
      h("span", { class: "dim num", role: "status" }, answer.total ? `${number(offset + 1)} to ${number(last)} of ${plural(answer.total, "rollout")}` : "No rollout matches."),
      h("button", { type: "button", disabled: offset === 0, onclick: () => { offset = Math.max(0, offset - ROLLOUT_PAGE); load(); } }, "Newer"),
      h("button", { type: "button", disabled: exported || last >= answer.total, onclick: () => { offset = last; load(); } }, "Older"),
      h("button", { type: "button", onclick: load, hidden: Boolean(exported) }, "Refresh"));
    listed = answer.rollouts.map((each) => each.id);
    table.update(answer.rollouts);
    const unfiltered = ![...filters.keys()].length;
    show(body, answer.problems.map((problem) => note(visible(problem), "warning")),
      !answer.total && unfiltered ? emptyState("This run has kept no rollouts.", "Rollouts appear here once a group is complete.") : [pages, table.element]);
  }
  show(panel, exported ? null : form, body);
  await load();
}

async function rolloutPage(panel, run, signal, id) {
  const transcript = await get(apiPath("runs", run.name, "rollouts", id));
  if (signal.aborted) return;
  const { summary } = transcript;
  const place = listed.indexOf(summary.id);
  const neighbour = (text, offset) => place < 0 || !listed[place + offset] ? null : h("a", { href: route("run", run.name, "rollouts", listed[place + offset]) }, text);
  const filter = (text, parameters) => h("a", { href: route("run", run.name, "rollouts", new URLSearchParams(parameters).toString()) }, text);
  show(panel, h("div", { class: "title rollout-title" }, h("a", { href: route("run", run.name, "rollouts") }, "← Rollouts"), h("h2", null, visible(summary.id)),
    badge(summary.state, STATE_OF_ROLLOUT[summary.state] ?? "idle"), h("span", { class: "dim" }, visible(summary.environment)),
    exported ? null : [filter("its group", { group: summary.group }), summary.step === null ? null : filter(`step ${summary.step}`, { first_step: summary.step, last_step: summary.step })],
    h("span", { class: "space" }), neighbour("previous", -1), neighbour("next", 1)),
  rolloutFacts(summary), transcriptView(transcript));
}
