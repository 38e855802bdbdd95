"use strict";
// Attempts over time, and events.

const LEVELS = { info: ["info", "warning", "error"], warning: ["warning", "error"], error: ["error"] };
const LEVEL_NAMES = [["info", "all events"], ["warning", "warnings and errors"], ["error", "errors"]];
const SHOWN_EVENTS = 1000;

async function eventsTab(panel, run, signal) {
  const path = apiPath("runs", run.name, "events");
  const timeline = h("div");
  const list = h("div");
  const search = searchField("Filter events", () => update());
  let level = "info";
  let attempts = [];

  function update() {
    show(timeline, attemptLanes(attempts));
    const words = search.value.toLowerCase();
    const matches = (event) =>
      LEVELS[level].includes(event.level) && `${event.who} ${event.text}`.toLowerCase().includes(words);
    const events = attempts
      .flatMap((attempt) => attempt.events.map((event) => ({ ...event, attempt: attempt.number })))
      .filter(matches)
      .reverse();
    const rows = events.slice(0, SHOWN_EVENTS).map((event) => [
      h("span", { class: "num" }, clock(event.time)), String(event.attempt), event.who,
      h("span", { class: event.level }, event.text),
    ]);
    const table = simpleTable(["Time", "Attempt", "Who", "What"], rows, { class: "events" });
    const hidden = attempts.reduce((sum, attempt) => sum + attempt.hidden, 0) + events.length - rows.length;
    show(list, rows.length ? table : note("No event matches."),
      hidden ? note(`${plural(hidden, "older event")} not shown.`) : null);
  }
  const choice = choices("Level", LEVEL_NAMES, (value) => { level = value; update(); });
  show(panel, section("Attempts", timeline), section("Events", h("div", { class: "toolbar" }, search, choice), list));
  every(10, signal, async () => {
    try {
      attempts = await get(path);
      if (!signal.aborted) update();
    } catch (error) {
      show(list, note(error.message, "error"));
    }
  });
}

// A bar for each attempt, with marks for warnings and errors.
function attemptLanes(attempts) {
  const begin = Math.min(...attempts.map((attempt) => attempt.begin ?? Infinity));
  const end = Math.max(...attempts.map((attempt) => attempt.end ?? now()));
  if (!Number.isFinite(begin)) return null;
  const length = end - begin || 1;
  const percentAt = (time) => `${Math.min(100, Math.max(0, ((time - begin) / length) * 100))}%`;

  function lane(attempt) {
    const from = attempt.begin ?? begin;
    const to = attempt.end ?? end;
    const outcome = attempt.outcome || "running";
    const words = `attempt ${attempt.number}, ${duration(to - from)}: ${attempt.reason || outcome}`;
    const width = `${Math.max(0.4, ((to - from) / length) * 100)}%`;
    const marks = attempt.events.filter((event) => event.level !== "info").slice(-200).map((event) => {
      const title = `${clock(event.time)} ${event.who} ${event.text}`;
      return h("i", { class: `mark ${event.level}`, style: { left: percentAt(event.time) }, title });
    });
    return h("div", { class: "lane" },
      h("span", { class: "lane-name" }, `attempt ${attempt.number}`),
      h("div", { class: "lane-track", role: "img", "aria-label": words },
        h("span", { class: `span ${outcome}`, title: words, style: { left: percentAt(from), width } }), marks));
  }
  const ends = h("span", null, h("span", null, clock(begin)), h("span", null, clock(end)));
  return [attempts.map(lane), h("div", { class: "lane scale dim" }, h("span"), ends)];
}
