"use strict";
// The plan: components, nodes, processes, and the software of the run.

const FINDING_LEVEL = { error: "bad", blocked: "bad", warning: "warn" };

async function planTab(panel, run, signal) {
  const plan = await get(apiPath("runs", run.name, "plan"));
  if (signal.aborted) return;
  const { groups = [], findings = [], totals = {}, lock } = plan;
  const detail = h("pre", { class: "code", hidden: true, tabindex: 0 });

  async function showProcess(name) {
    try {
      detail.textContent = JSON.stringify(await get(apiPath("runs", run.name, "processes", name)), null, 2);
    } catch (error) {
      detail.textContent = error.message;
    }
    detail.hidden = false;
    detail.scrollIntoView({ block: "nearest" });
  }
  function processChip({ name, gpus }) {
    const content = [name, gpus?.length ? h("small", null, `GPU ${gpus.join(",")}`) : null];
    if (exported) return h("span", { class: "chip idle" }, content);
    return button(content, () => showProcess(name), { class: "chip idle" });
  }
  const nodes = plan.nodes.map((node) => [
    String(node.index), `${node.role}[${node.index_in_group}]`,
    h("span", { class: "chips" }, node.processes.map(processChip)),
  ]);
  const components = groups.map((group) => [
    group.name, String(group.nodes), group.partition, group.gres ?? group.gpus_per_node, String(group.cpus_per_task),
  ]);
  const checks = findings.map((finding) => [
    badge(finding.level, FINDING_LEVEL[finding.level] ?? "idle"), h("code", null, finding.field), finding.text, finding.fix,
  ]);
  const identity = [
    ["run id", lock.run_id], ["git", lock.git], ["python", lock.python],
    ["recipe hash", lock.recipe_hash], ["plan hash", lock.plan_hash],
  ];
  const versions = [...identity, ...Object.entries(lock.packages)]
    .filter(([, value]) => value)
    .map(([name, value]) => [name, h("code", null, value)]);
  const count = (value) => (isNumber(value) ? String(value) : null);
  show(panel,
    facts([
      ["Layout", plan.layout], ["Executor", plan.executor], ["Nodes", count(totals.nodes)],
      ["Spares", totals.spares ? count(totals.spares) : null], ["GPUs", count(totals.gpus)],
      ["Trainer GPUs", count(totals.trainer_gpus)], ["Engines", count(totals.engines)], ["Time limit", plan.job?.time],
    ]),
    checks.length ? section("Findings", simpleTable(["", "Field", "Finding", "Fix"], checks)) : null,
    section("Components", simpleTable(["Name", "Nodes", "Partition", "GPUs per node", "Cores per node"], components)),
    section(`Nodes (${nodes.length})`,
      exported ? null : note("Select a process for its command line, environment and ports."),
      simpleTable(["Node", "Role", "Processes"], nodes), detail),
    section("Made with", simpleTable(["Package", "Version"], versions)));
}
