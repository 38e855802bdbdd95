"use strict";
// Logs of processes: the newest lines, older ones, and new ones as they are written.

const MOST_LINES = 5000;

async function logsTab(panel, run, signal, wanted) {
  const base = apiPath("runs", run.name);
  const names = h("ul", { class: "log-names", role: "list" });
  const search = h("input", { type: "search", placeholder: "Filter lines", "aria-label": "Filter lines", oninput: () => filterLines() });
  const tail = h("input", { type: "checkbox", checked: true, onchange: () => openLog() });
  const attemptChoice = h("select", { "aria-label": "Attempt", onchange: () => { wanted = null; list(Number(attemptChoice.value)); } });
  const older = h("button", { type: "button", onclick: () => loadOlder() }, "Older lines");
  const lines = h("div", { class: "log", role: "log", tabindex: 0, "aria-label": "Log" });
  const title = h("span", { class: "dim path" });
  let attempt = null;
  let name = wanted ?? null;
  let page = null;
  let partial = null;
  let stop = null;

  const parameters = (more) => new URLSearchParams({ attempt, name, ...more });
  const matches = (text) => text.toLowerCase().includes(search.value.toLowerCase());
  function row(text) {
    return h("div", { class: /\b(error|traceback|exception|critical)\b/i.test(text) ? "error" : /\bwarn(ing)?\b/i.test(text) ? "warning" : null, hidden: !matches(text) }, text || " ");
  }
  function filterLines() {
    for (const line of lines.children) line.hidden = !matches(line.textContent);
  }
  function showPartial(text) {
    partial?.remove();
    partial = text ? row(text) : null;
    if (partial) lines.append(partial);
  }
  function append(fresh) {
    const atEnd = lines.scrollHeight - lines.scrollTop - lines.clientHeight < 40;
    partial?.remove();
    lines.append(...fresh.lines.map(row));
    showPartial(fresh.partial);
    page.end = fresh.end;
    while (atEnd && lines.childElementCount > MOST_LINES) {
      lines.firstChild.remove();
      page.begin = null;
    }
    if (atEnd) lines.scrollTop = lines.scrollHeight;
    older.hidden = !page.begin;
  }
  async function loadOlder() {
    const before = await get(`${base}/log?${parameters({ before: page.begin })}`);
    const height = lines.scrollHeight;
    lines.prepend(...before.lines.map(row));
    lines.scrollTop += lines.scrollHeight - height;
    page.begin = before.begin;
    older.hidden = !page.begin;
  }
  async function openLog() {
    stop?.abort();
    stop = new AbortController();
    signal.addEventListener("abort", () => stop.abort());
    title.textContent = name;
    for (const item of names.querySelectorAll("button")) item.setAttribute("aria-current", String(item.dataset.name === name));
    try {
      page = await get(`${base}/log?${parameters({})}`);
    } catch (error) {
      show(lines, note(error.message, "error"));
      return;
    }
    partial = null;
    show(lines);
    append(page);
    lines.scrollTop = lines.scrollHeight;
    if (tail.checked) follow(() => `${base}/log/live?${parameters({ begin: page.end })}`, { lines: append }, stop.signal);
  }
  async function list(number) {
    const answer = await get(`${base}/logs${number ? `?attempt=${number}` : ""}`);
    if (signal.aborted) return;
    attempt = answer.attempt;
    show(attemptChoice, answer.attempts.map((each) => h("option", { value: String(each), selected: each === attempt }, `attempt ${each}`)));
    if (!answer.logs.length) {
      show(lines, emptyState("No process of this attempt has a log yet."));
      return;
    }
    show(names, answer.logs.map((log) => h("li", null, h("button", { type: "button", "data-name": log.name, onclick: () => { name = log.name; openLog(); } },
      h("span", null, log.name), h("small", null, bytes(log.bytes))))));
    if (!answer.logs.some((log) => log.name === name)) {
      name = (answer.logs.find((log) => log.name.startsWith("orchestrator") || log.name.startsWith("trainer")) ?? answer.logs[0]).name;
    }
    await openLog();
  }
  show(panel, h("div", { class: "logs" }, h("nav", { "aria-label": "Logs" }, attemptChoice, names),
    h("div", { class: "log-pane" }, h("div", { class: "toolbar" }, title, search, h("label", { class: "inline" }, tail, " follow"), older), lines)));
  await list(null);
}
