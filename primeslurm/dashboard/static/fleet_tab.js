"use strict";
// Nodes, processes and inference replicas.

const STATE_LEVEL = {
  HEALTHY: "good", DONE: "done", STARTING: "busy", LOADING: "busy", STALE: "warn", SILENT: "warn", SUSPECT: "warn",
  RESTARTING: "warn", LOST: "bad", DEAD: "bad", UNKNOWN: "idle",
};
const FINE_STATES = ["HEALTHY", "DONE", "STARTING", "LOADING"];

const stateLevel = (state) => STATE_LEVEL[state] ?? "idle";
const isUnhealthy = (process) => !FINE_STATES.includes(process.state);

async function fleetTab(panel, run, signal) {
  const path = apiPath("runs", run.name, "fleet");
  const body = h("div");
  const only = h("input", { type: "checkbox", onchange: () => update() });
  let fleet = null;

  function nodesTable() {
    const shown = (process) => !only.checked || isUnhealthy(process);
    const nodes = fleet.nodes.filter((node) => node.processes.some(shown));
    const rows = nodes.map((node) => [
      h("b", null, node.name), node.role,
      h("span", { class: "chips" }, node.processes.filter(shown).map((process) => processChip(run, process))),
    ]);
    return rows.length ? simpleTable(["Node", "Role", "Processes"], rows) : note("No process is unhealthy.");
  }
  function update() {
    const excluded = fleet.excluded.map((bad) => [bad.node, clock(bad.time), bad.reason]);
    show(body,
      fleet.silence ? note(fleet.silence.text, "error") : null,
      h("div", { class: "columns" },
        section("Roles", rolesTable(fleet.roles)),
        fleet.replicas.length ? section("Inference replicas", replicasTable(fleet.replicas)) : null),
      section(`Nodes (${fleet.nodes.length})`,
        h("label", { class: "inline" }, only, " only with unhealthy processes"), nodesTable()),
      excluded.length ? section("Excluded nodes", simpleTable(["Node", "Since", "Reason"], excluded)) : null);
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

// A process with its state. It leads to its log.
function processChip(run, process) {
  const { name, role, state, restarts } = process;
  const details = [state, restarts && plural(restarts, "restart"), process.silent, process.pid && `pid ${process.pid}`];
  const props = { class: `chip ${stateLevel(state)}`, title: details.filter(Boolean).join(", ") };
  const content = [
    h("i"), name,
    restarts ? h("small", null, `↻ ${restarts}`) : null,
    isUnhealthy(process) ? h("small", null, state.toLowerCase()) : null,
  ];
  if (exported) return h("span", props, content);
  return h("a", { ...props, href: route("run", run.name, "logs", `${role}/${name}`) }, content);
}

function rolesTable(roles) {
  const rows = Object.entries(roles).map(([role, states]) => {
    const total = Object.values(states).reduce((sum, count) => sum + count, 0);
    const stateBadge = ([state, count]) => badge(`${count} ${state.toLowerCase()}`, stateLevel(state));
    return [role, String(total), h("span", { class: "chips" }, Object.entries(states).map(stateBadge))];
  });
  return simpleTable(["Role", "Processes", "States"], rows);
}

function replicasTable(replicas) {
  const titles = ["Replica", "Router", "Healthy engines", "Running/waiting", "KV cache", "Tokens/s", "Rollouts"];
  const rows = replicas.map(({ index, router, healthy, engines, loads, share }) => {
    const perRole = (text) => Object.entries(loads).map(([role, load]) => `${role} ${text(load)}`).join(", ") || "–";
    return [
      String(index), badge(router.toLowerCase(), stateLevel(router)), `${healthy} of ${engines}`,
      perRole((load) => `${load.running}/${load.waiting}`),
      perRole((load) => percent(load.kv_usage)),
      perRole((load) => number(load.generated_per_s, 3)),
      share ? `${share.inflight} of ${share.places} (${share.limit})` : null,
    ];
  });
  return simpleTable(titles, rows);
}
