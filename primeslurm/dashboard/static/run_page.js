"use strict";
// One run: a header that stays current, and a tab for each kind of information.

const TABS = [
  ["curves", "Curves", curvesTab, "curves"],
  ["rollouts", "Rollouts", rolloutsTab, "rollouts"],
  ["evaluations", "Evaluations", evaluationsTab, "evaluations"],
  ["fleet", "Fleet", fleetTab, "fleet"],
  ["events", "Events", eventsTab, "events"],
  ["logs", "Logs", logsTab, "logs"],
  ["plan", "Plan", planTab, "plan"],
  ["recipe", "Recipe", recipeTab, "recipe"],
];

async function runPage(main, signal, name, tab = "curves", ...rest) {
  const base = apiPath("runs", name);
  const status = await get(`${base}/status`);
  if (signal.aborted) return;
  // A tab that shows curves sets `known` to the rows that it has, and the handlers to get new ones.
  const run = { name, status, known: null, onRows: null, onReset: null };
  const header = h("header", { class: "page run" });
  const messages = h("div", { role: "status" });
  const panel = h("div", { class: "panel", id: "panel", tabindex: -1 });
  const tabs = TABS.filter(([, , , path]) => hasExported(`${base}/${path}`));
  const [, title, render] = tabs.find(([id]) => id === tab) ?? tabs[0];

  function update(current) {
    run.status = current;
    show(header, runHeader(current));
    const isOpen = messages.querySelector("details")?.open;
    show(messages, runMessages(current));
    messages.querySelector("details")?.toggleAttribute("open", Boolean(isOpen));
    document.title = `${name}: ${current.phase} · primeslurm`;
  }
  show(main, header, messages, h("nav", { class: "tabs", "aria-label": "Views of the run" }, tabs.map(([id, text]) =>
    h("a", { href: route("run", name, id), "aria-current": text === title ? "page" : null }, text))), panel);
  update(status);
  show(panel, note("Loading …"));
  try {
    await render(panel, run, signal, ...rest);
  } catch (error) {
    show(panel, note(error.message, "error"));
  }
  follow(() => `${base}/live${run.known ? `?rows=${run.known.rows}&generation=${run.known.generation}` : ""}`, {
    status: update,
    rows: (fresh) => run.onRows?.(fresh),
    reset: () => run.onReset?.(),
    problem: (text) => show(messages, note(text, "error")),
  }, signal);
}

function runHeader(status) {
  const metrics = status.metrics ?? {};
  const progress = status.progress ?? {};
  const step = status.step ?? metrics.step ?? 0;
  const sft = status.task === "sft";
  const failed = Object.values(progress.failures ?? {}).reduce((sum, each) => sum + each.failed, 0);
  const job = status.job_id ? `job ${status.job_id}` : "no job";
  return [
    h("div", { class: "title" },
      h("h1", null, status.run), phaseBadge(status.phase), status.emulated ? badge("emulated", "warn") : null,
      h("span", { class: "dim" }, `${status.task} · attempt ${status.attempt} · ${job}`)),
    h("div", { class: "headline" },
      progressBar(step, status.max_steps), h("span", { class: "num" }, `step ${step} of ${status.max_steps}`),
      isNumber(status.eta_s) ? h("span", { class: "dim" }, `${duration(status.eta_s)} left`) : null),
    facts([
      sft ? ["Loss", number(metrics["trainer/loss"])] : ["Reward", number(metrics["reward/mean"], 3)],
      sft ? null : ["KL", number(metrics["trainer/mismatch_kl"], 2)],
      sft ? null : ["Entropy", number(metrics["trainer/entropy"], 3)],
      sft ? null : ["Staleness", number(metrics["staleness/mean"], 3)],
      ["Step time", duration(metrics["throughput/step_seconds"])],
      ["Tokens/s", number(metrics["throughput/tokens_per_s"] ?? metrics["trainer/tokens_per_s"], 3)],
      isNumber(metrics["trainer/mfu"]) ? ["MFU", percent(metrics["trainer/mfu"])] : null,
      isActive(status.phase) && isNumber(progress.inflight) ? ["In flight", plural(progress.inflight, "rollout")] : null,
      status.committed_step === null ? null : ["Committed", `step ${status.committed_step}`],
      failed ? ["Failed rollouts", number(failed), "warning"] : null,
      isNumber(status.elapsed_s) ? ["Elapsed", duration(status.elapsed_s)] : null,
    ].filter(Boolean)),
  ];
}

function runMessages(status) {
  const level = ["failed", "lost", "silent"].includes(status.phase) ? "error" : "";
  const obstacle = ({ component, never, text, reason, fix }) =>
    `${component || "The job"} ${never ? "cannot" : "does not"} start: ${text} (${reason}). ${fix}`;
  const failures = ([label, { failed, of_reason: same, reason }]) =>
    `${label}: ${plural(failed, "rollout")} failed, ${same} with: ${reason}`;
  const advice = ({ text, reason, changes }) => h("div", { class: "note warning" },
    h("strong", null, text), h("p", null, reason),
    Object.entries(changes).map(([field, value]) => h("code", null, `${field}: ${value}`)));
  const warnings = present([
    status.damaged.map((text) => note(text, "warning")),
    Object.entries(status.progress?.failures ?? {}).map((each) => note(failures(each), "warning")),
  ]);
  return [
    status.emulated ? note("Emulated: stand-ins made up all rewards, losses and speeds.", "warning") : null,
    status.reason && status.phase !== "completed" ? note(status.reason, level) : null,
    status.silence ? note([status.silence.text, ...status.silence.causes].join(". "), "error") : null,
    status.waits_for ? note(status.waits_for, "warning") : null,
    status.invalid.map((problem) => note(`Invalid: ${problem}`, "error")),
    status.obstacles.map((each) => note(obstacle(each), "warning")),
    status.advice.map(advice),
    warnings.length > 1 ? more(plural(warnings.length, "warning"), warnings) : warnings,
  ];
}
