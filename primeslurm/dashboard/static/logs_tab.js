"use strict";
// Logs of processes: the newest lines, older ones, and new ones as they are written.

const MOST_LINES = 5000;
const ERROR_WORDS = /\b(error|traceback|exception|critical)\b/i;
const WARNING_WORDS = /\bwarn(ing)?\b/i;

// `wanted` is the name of the log to open.
async function logsTab(panel, run, signal, wanted) {
  const base = apiPath("runs", run.name);
  const attemptPlace = h("div");
  const names = h("ul", { class: "log-names", role: "list" });
  const title = h("span", { class: "dim path" });
  const search = searchField("Filter lines", () => filterLines());
  const tail = h("input", { type: "checkbox", checked: true, onchange: () => openLog() });
  const older = button("Older lines", () => loadOlder());
  const lines = h("div", { class: "log", role: "log", tabindex: 0, "aria-label": "Log" });
  let attempt = null;
  let name = wanted ?? null;
  let page = null; // bytes of the log that are shown
  let partial = null; // the element of an incomplete last line
  let stream = new AbortController();

  const address = (kind, more) => `${base}/${kind}?${new URLSearchParams({ attempt, name, ...more })}`;
  const matches = (text) => text.toLowerCase().includes(search.value.toLowerCase());

  function row(text) {
    const level = ERROR_WORDS.test(text) ? "error" : WARNING_WORDS.test(text) ? "warning" : null;
    return h("div", { class: level, hidden: !matches(text) }, text || " ");
  }
  function filterLines() {
    for (const line of lines.children) line.hidden = !matches(line.textContent);
  }
  function append(fresh) {
    const atEnd = lines.scrollHeight - lines.scrollTop - lines.clientHeight < 40;
    partial?.remove();
    partial = fresh.partial ? row(fresh.partial) : null;
    lines.append(...fresh.lines.map(row), ...(partial ? [partial] : []));
    page.end = fresh.end;
    // Whoever reads older lines keeps them.
    while (atEnd && lines.childElementCount > MOST_LINES) {
      lines.firstChild.remove();
      page.begin = 0;
    }
    if (atEnd) lines.scrollTop = lines.scrollHeight;
    older.hidden = !page.begin;
  }
  async function loadOlder() {
    const before = await get(address("log", { before: page.begin }));
    const height = lines.scrollHeight;
    lines.prepend(...before.lines.map(row));
    lines.scrollTop += lines.scrollHeight - height;
    page.begin = before.begin;
    older.hidden = !page.begin;
  }
  async function openLog() {
    stream.abort();
    stream = new AbortController();
    const { signal: replaced } = stream;
    title.textContent = name;
    for (const item of names.querySelectorAll("button")) {
      item.setAttribute("aria-current", String(item.dataset.name === name));
    }
    let newest;
    try {
      newest = await get(address("log", {}));
    } catch (error) {
      show(lines, note(error.message, "error"));
      return;
    }
    if (replaced.aborted) return; // another log was opened meanwhile
    page = newest;
    partial = null;
    show(lines);
    append(page);
    lines.scrollTop = lines.scrollHeight;
    if (tail.checked) follow(() => address("log/live", { begin: page.end }), { lines: append }, replaced);
  }
  async function list(number) {
    const answer = await get(`${base}/logs${number ? `?attempt=${number}` : ""}`);
    if (signal.aborted) return;
    attempt = answer.attempt;
    const attempts = answer.attempts.map((each) => [String(each), `attempt ${each}`]);
    show(attemptPlace, choices("Attempt", attempts, (value) => list(Number(value)), String(attempt)));
    if (!answer.logs.length) {
      show(lines, emptyState("No process of this attempt has a log yet."));
      return;
    }
    const open = (log) => () => {
      name = log.name;
      openLog();
    };
    show(names, answer.logs.map((log) => h("li", null,
      button([h("span", null, log.name.split("/").pop()), h("small", null, bytes(log.bytes))], open(log),
        { "data-name": log.name, title: log.name }))));
    if (!answer.logs.some((log) => log.name === name)) {
      const first = answer.logs.find((log) => /^(orchestrator|trainer)\//.test(log.name));
      name = (first ?? answer.logs[0]).name;
    }
    await openLog();
  }

  signal.addEventListener("abort", () => stream.abort());
  const toolbar = h("div", { class: "toolbar" }, title, search, h("label", { class: "inline" }, tail, " follow"), older);
  show(panel, h("div", { class: "logs" },
    h("nav", { "aria-label": "Logs" }, attemptPlace, names), h("div", { class: "log-pane" }, toolbar, lines)));
  await list(null);
}
