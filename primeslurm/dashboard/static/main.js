"use strict";
// Routes addresses to pages, and switches between light and dark.

const THEMES = { auto: "◐ System", light: "○ Light", dark: "● Dark" };
let page = new AbortController();

function applyTheme(name) {
  if (name === "auto") document.documentElement.removeAttribute("data-theme");
  else document.documentElement.setAttribute("data-theme", name);
  const button = document.getElementById("theme");
  button.textContent = THEMES[name];
  button.setAttribute("aria-label", `Theme: ${THEMES[name].slice(2)}`);
  redrawPlots();
}

function breadcrumbs(parts) {
  const home = exported ? null : link("Runs");
  const place = parts[0] === "run" ? parts[1] : parts[0] === "compare" ? "Compare" : null;
  const separator = home && place ? h("span", { class: "dim" }, "/") : null;
  show(document.getElementById("crumbs"), home, separator, place ? h("span", null, place) : null);
}

async function navigate() {
  page.abort();
  page = new AbortController();
  destroyPlots();
  const { signal } = page;
  const main = document.getElementById("main");
  let parts = [];
  try {
    parts = location.hash.replace(/^#\/?/, "").split("/").filter(Boolean).map(decodeURIComponent);
  } catch {
    // A damaged address shows the list.
  }
  if (exported && parts[0] !== "run") parts = ["run", exported.run];
  breadcrumbs(parts);
  const sameRun = parts[0] === "run" && main.dataset.run === parts[1];
  main.dataset.run = parts[0] === "run" ? parts[1] : "";
  if (!sameRun) show(main, note("Loading …"));
  try {
    if (parts[0] === "run" && parts[1]) await runPage(main, signal, ...parts.slice(1));
    else if (parts[0] === "compare" && parts.length > 1) await comparePage(main, signal, parts.slice(1));
    else await runsPage(main, signal);
  } catch (error) {
    if (!signal.aborted) show(main, note(error.message, "error"), exported ? null : link("All runs"));
  }
}

function nextTheme() {
  const names = Object.keys(THEMES);
  const next = names[(names.indexOf(settings.get("theme", "auto")) + 1) % names.length];
  settings.set("theme", next);
  applyTheme(next);
}

function start() {
  const main = h("main", { id: "main", tabindex: -1 });
  const skip = (event) => {
    event.preventDefault();
    main.focus();
  };
  const status = exported ? h("span", { class: "dim" }, `report of ${clock(exported.written)}`)
    : h("span", { id: "connection", class: "connection", role: "status" });
  document.body.append(
    h("a", { class: "skip", href: "#main", onclick: skip }, "Skip to content"),
    h("div", { class: "top" },
      h("a", { class: "brand", href: "#/" }, "primeslurm"), h("nav", { id: "crumbs", "aria-label": "Place" }),
      h("span", { class: "space" }), status, button("", nextTheme, { id: "theme", class: "quiet" })),
    main);
  applyTheme(settings.get("theme", "auto") in THEMES ? settings.get("theme", "auto") : "auto");
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawPlots);
  addEventListener("hashchange", navigate);
  addEventListener("keydown", (event) => {
    const typing = event.target.closest("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey;
    const search = document.querySelector("#main input[type=search]");
    if (event.key !== "/" || typing || !search) return;
    event.preventDefault();
    search.focus();
  });
  navigate();
}

start();
