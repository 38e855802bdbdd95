"use strict";
// The plan: components, nodes, processes, and the software of the run.

async function planTab(panel, run, signal) {
  const plan = await get(apiPath("runs", run.name, "plan"));
  if (signal.aborted) return;
  const detail = h("pre", { class: "code", hidden: true, tabindex: 0 });
  async function process(name) {
    try {
      detail.textContent = JSON.stringify(await get(apiPath("runs", run.name, "processes", name)), null, 2);
    } catch (error) {
      detail.textContent = error.message;
    }
    detail.hidden = false;
    detail.scrollIntoView({ block: "nearest" });
  }
  const nodes = plan.nodes.map((node) => [String(node.index), `${node.role}[${node.index_in_group}]`,
    h("span", { class: "chips" }, node.processes.map((each) => {
      const gpus = each.gpus?.length ? ` GPU ${each.gpus.join(",")}` : "";
      return exported ? h("span", { class: "chip idle" }, each.name, gpus ? h("small", null, gpus) : null)
        : h("button", { type: "button", class: "chip idle", onclick: () => process(each.name) }, each.name, gpus ? h("small", null, gpus) : null);
    }))]);
  const totals = plan.totals ?? {};
  const findings = (plan.findings ?? []).map((finding) => [badge(finding.level, { error: "bad", blocked: "bad", warning: "warn" }[finding.level] ?? "idle"),
    h("code", null, finding.field), finding.text, finding.fix]);
  show(panel,
    facts([["Layout", plan.layout], ["Executor", plan.executor], ["Nodes", totals.nodes && String(totals.nodes)], ["Spares", totals.spares ? String(totals.spares) : ""],
      ["GPUs", String(totals.gpus ?? "–")], ["Trainer GPUs", String(totals.trainer_gpus ?? "–")], ["Engines", String(totals.engines ?? "–")], ["Time limit", plan.job?.time]]),
    findings.length ? h("section", null, h("h2", null, "Findings"), simpleTable(["", "Field", "Finding", "Fix"], findings)) : null,
    h("section", null, h("h2", null, "Components"), simpleTable(["Name", "Nodes", "Partition", "GPUs per node", "Cores per node"],
      (plan.groups ?? []).map((group) => [group.name, String(group.nodes), group.partition, group.gres ?? group.gpus_per_node ?? "–", String(group.cpus_per_task)]))),
    h("section", null, h("h2", null, `Nodes (${nodes.length})`), exported ? null : note("Select a process for its command line, environment and ports."),
      simpleTable(["Node", "Role", "Processes"], nodes), detail),
    h("section", null, h("h2", null, "Made with"), simpleTable(["Package", "Version"], [
      ["run id", plan.lock.run_id], ["git", plan.lock.git], ["python", plan.lock.python], ["recipe hash", plan.lock.recipe_hash], ["plan hash", plan.lock.plan_hash],
      ...Object.entries(plan.lock.packages),
    ].filter(([, value]) => value).map(([name, value]) => [name, h("code", null, value)]))));
}
