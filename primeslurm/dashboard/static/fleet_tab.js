"use strict";
// Nodes, processes and inference replicas.

const STATE_LEVEL = {
  HEALTHY: "good", DONE: "done", STARTING: "busy", LOADING: "busy", STALE: "warn", SILENT: "warn", SUSPECT: "warn",
  RESTARTING: "warn", LOST: "bad", DEAD: "bad", UNKNOWN: "idle",
};
const FINE_STATES = ["HEALTHY", "DONE", "STARTING", "LOADING"];

async function fleetTab(panel, run, signal) {
  const path = apiPath("runs", run.name, "fleet");
  const body = h("div");
  const only = h("input", { type: "checkbox", onchange: () => update() });
  let fleet = null;

  function processChip(process) {
    const details = [process.state, process.restarts ? plural(process.restarts, "restart") : "", process.silent,
      process.pid ? `pid ${process.pid}` : ""].filter(Boolean).join(", ");
    const log = exported ? null : route("run", run.name, "logs", `${process.role}/${process.name}`);
    return h(log ? "a" : "span", { class: `chip ${STATE_LEVEL[process.state] ?? "idle"}`, title: details, href: log }, h("i"), process.name,
      process.restarts ? h("small", null, `↻${process.restarts}`) : null,
      FINE_STATES.includes(process.state) ? null : h("small", null, process.state.toLowerCase()));
  }
  function rolesTable() {
    const rows = Object.entries(fleet.roles).map(([role, states]) => [role,
      Object.values(states).reduce((sum, count) => sum + count, 0),
      h("span", { class: "chips" }, Object.entries(states).map(([state, count]) => badge(`${count} ${state.toLowerCase()}`, STATE_LEVEL[state] ?? "idle")))]);
    return simpleTable(["Role", "Processes", "States"], rows);
  }
  function replicasTable() {
    const load = (replica, text) => Object.entries(replica.loads).map(([role, each]) => `${role} ${text(each)}`).join(", ") || "–";
    const rows = fleet.replicas.map((replica) => [String(replica.index), badge(replica.router.toLowerCase(), STATE_LEVEL[replica.router] ?? "idle"),
      `${replica.healthy} of ${replica.engines}`, load(replica, (each) => `${each.running}/${each.waiting}`),
      load(replica, (each) => percent(each.kv_usage)), load(replica, (each) => number(each.generated_per_s, 3)),
      replica.share ? `${replica.share.inflight} of ${replica.share.places} (${replica.share.limit})` : "–"]);
    return simpleTable(["Replica", "Router", "Healthy engines", "Running/waiting", "KV cache", "Tokens/s", "Rollouts"], rows);
  }
  function update() {
    const ill = (process) => !FINE_STATES.includes(process.state);
    const nodes = fleet.nodes.filter((node) => !only.checked || node.processes.some(ill));
    const rows = nodes.map((node) => [h("b", null, node.name), node.role,
      h("span", { class: "chips" }, node.processes.filter((process) => !only.checked || ill(process)).map(processChip))]);
    show(body,
      fleet.silence ? note(fleet.silence.text, "error") : null,
      h("div", { class: "columns" }, h("section", null, h("h2", null, "Roles"), rolesTable()),
        fleet.replicas.length ? h("section", null, h("h2", null, "Inference replicas"), replicasTable()) : null),
      h("section", null, h("h2", null, `Nodes (${fleet.nodes.length})`),
        h("label", { class: "inline" }, only, " only with unhealthy processes"),
        rows.length ? simpleTable(["Node", "Role", "Processes"], rows) : note("No process is unhealthy.")),
      fleet.excluded.length ? h("section", null, h("h2", null, "Excluded nodes"),
        simpleTable(["Node", "Since", "Reason"], fleet.excluded.map((bad) => [bad.node, clock(bad.time), bad.reason]))) : null);
  }
  show(panel, body);
  every(5, signal, async () => {
    try {
      fleet = await get(path);
      if (!signal.aborted) keepFocus(body, update);
    } catch (error) {
      show(body, note(error.message, "error"));
    }
  });
}
