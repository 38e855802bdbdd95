"use strict";
// Attempts over time, and events.

async function eventsTab(panel, run, signal) {
  const path = apiPath("runs", run.name, "events");
  const timeline = h("div");
  const list = h("div");
  let attempts = [];
  const level = h("select", { "aria-label": "Level", onchange: () => update() },
    h("option", { value: "info" }, "all events"), h("option", { value: "warning" }, "warnings and errors"), h("option", { value: "error" }, "errors"));
  const search = h("input", { type: "search", placeholder: "Filter events", "aria-label": "Filter events", oninput: () => update() });

  function bar(attempt, begin, end) {
    const percentAt = (time) => `${Math.min(100, Math.max(0, ((time - begin) / (end - begin || 1)) * 100))}%`;
    const from = attempt.begin ?? begin;
    const to = attempt.end ?? end;
    const width = `${Math.max(0.4, ((to - from) / (end - begin || 1)) * 100)}%`;
    const words = `attempt ${attempt.number}, ${duration(to - from)}: ${attempt.reason || attempt.outcome || "running"}`;
    const marks = attempt.events.filter((event) => event.level !== "info").slice(-200).map((event) =>
      h("i", { class: `mark ${event.level}`, style: { left: percentAt(event.time) }, title: `${clock(event.time)} ${event.who} ${event.text}` }));
    return h("div", { class: "lane" }, h("span", { class: "lane-name" }, `attempt ${attempt.number}`),
      h("div", { class: "lane-track", role: "img", "aria-label": words },
        h("span", { class: `span ${attempt.outcome || "running"}`, title: words, style: { left: percentAt(from), width } }), marks));
  }
  function update() {
    const begin = Math.min(...attempts.map((attempt) => attempt.begin ?? Infinity));
    const end = Math.max(...attempts.map((attempt) => attempt.end ?? now()));
    show(timeline, attempts.length && Number.isFinite(begin) ? [attempts.map((attempt) => bar(attempt, begin, end)),
      h("div", { class: "lane scale dim" }, h("span"), h("span", null, h("span", null, clock(begin)), h("span", null, clock(end))))] : null);
    const levels = { info: ["info", "warning", "error"], warning: ["warning", "error"], error: ["error"] }[level.value];
    const words = search.value.toLowerCase();
    const events = attempts.flatMap((attempt) => attempt.events.map((event) => ({ ...event, attempt: attempt.number })))
      .filter((event) => levels.includes(event.level) && `${event.who} ${event.text}`.toLowerCase().includes(words)).reverse();
    const hidden = attempts.reduce((sum, attempt) => sum + attempt.hidden, 0);
    const rows = events.slice(0, 1000).map((event) => [
      h("span", { class: "num" }, clock(event.time)), String(event.attempt), event.who, h("span", { class: event.level }, event.text)]);
    show(list, rows.length ? simpleTable(["Time", "Attempt", "Who", "What"], rows, { class: "events" }) : note("No event matches."),
      hidden ? note(`${plural(hidden, "older event")} not shown.`) : null);
  }
  show(panel, h("section", null, h("h2", null, "Attempts"), timeline),
    h("section", null, h("h2", null, "Events"), h("div", { class: "toolbar" }, search, level), list));
  every(10, signal, async () => {
    try {
      attempts = await get(path);
      if (!signal.aborted) update();
    } catch (error) {
      show(list, note(error.message, "error"));
    }
  });
}
