"use strict";
// Elements and texts. Strings become text nodes: nothing that a run has written is ever parsed as HTML.

function h(tag, props, ...children) {
  return fill(document.createElement(tag), props, children);
}

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each);
    else if (name === "value" || name === "checked" || name === "selected") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...present(children));
  return element;
}

// Replace everything in an element.
function show(element, ...children) {
  element.replaceChildren(...present(children));
  return element;
}

// Children may be nested lists, and null for none.
function present(children) {
  return children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
}

function button(text, onclick, props) {
  return h("button", { type: "button", onclick, ...props }, text);
}

// A link to an address within the page.
function link(text, ...parts) {
  return h("a", { href: route(...parts) }, text);
}

function section(title, ...children) {
  return h("section", null, h("h2", null, title), children);
}

function searchField(label, oninput) {
  return h("input", { type: "search", placeholder: label, "aria-label": label, oninput });
}

// options: [value, text]
function choices(label, options, onchange, chosen = "", props = {}) {
  return h("select", { "aria-label": label, onchange: (event) => onchange(event.target.value), ...props },
    options.map(([value, text]) => h("option", { value, selected: value === chosen }, text)));
}

function more(title, ...children) {
  return h("details", { class: "more" }, h("summary", null, title), children);
}

// Text with its control characters and direction marks made visible, so that it cannot pretend to be other text.
const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;

function visible(text) {
  return text.replace(CONTROL, (char) => {
    const code = char.codePointAt(0);
    return code < 32 ? String.fromCodePoint(0x2400 + code) : `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

// Addresses within the page, for example route("run", "my-run", "logs").
function route(...parts) {
  return "#/" + parts.map(encodeURIComponent).join("/");
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

function number(value, digits = 4) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size >= 10000 && Number.isInteger(value)) return value.toLocaleString("en-US");
  if (size >= 1000) return value.toLocaleString("en-US", { maximumFractionDigits: 0 });
  if (size !== 0 && size < 0.001) return value.toExponential(1).replace(".0e", "e");
  return String(Number(value.toPrecision(digits)));
}

function percent(value) {
  return isNumber(value) ? `${Math.round(value * 100)}%` : "–";
}

// The two largest units, as `primeslurm.base.units.duration` writes them.
function duration(seconds) {
  if (!isNumber(seconds)) return "–";
  if (seconds < 10) return `${Number(Math.max(0, seconds).toFixed(1))} s`;
  const smallest = Math.round(seconds) < 3600 ? 1 : Math.round(seconds / 60) < 1440 ? 60 : 3600;
  let rest = Math.round(seconds / smallest) * smallest;
  const parts = [];
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]]) {
    if (size < smallest) break;
    const count = Math.floor(rest / size);
    rest -= count * size;
    if (count) parts.push(`${count} ${unit}`);
  }
  return parts.join(" ");
}

function ago(time) {
  if (!time) return "–";
  const seconds = now() - time;
  return seconds < 60 ? "just now" : `${duration(seconds).split(" ").slice(0, 2).join(" ")} ago`;
}

function clock(time) {
  if (!time) return "–";
  const two = (value) => String(value).padStart(2, "0");
  const date = new Date(time * 1000);
  const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  return `${day} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let value = count;
  let unit = 0;
  while (value >= 999.5 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${value < 10 && unit ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

function plural(count, word) {
  return `${count.toLocaleString("en-US")} ${word}${count === 1 ? "" : "s"}`;
}

const PHASE_LEVEL = {
  running: "good", completed: "done", starting: "busy", pending: "idle", requeued: "idle", ending: "busy",
  silent: "bad", failed: "bad", lost: "bad", damaged: "bad", cancelled: "idle", preempted: "warn",
};

function badge(text, level) {
  return h("span", { class: `badge ${level}` }, text);
}

function phaseBadge(phase) {
  return badge(phase, PHASE_LEVEL[phase] ?? "idle");
}

function progressBar(step, most) {
  const share = most ? Math.min(1, (step ?? 0) / most) : 0;
  const bar = h("span", { class: "bar", style: { width: `${share * 100}%` } });
  return h("span", { class: "progress", role: "img", "aria-label": `${percent(share)} of the steps` }, bar);
}

function note(text, level = "") {
  return h("p", { class: `note ${level}` }, text);
}

function emptyState(title, text) {
  return h("div", { class: "empty" }, h("strong", null, title), text ? h("p", null, text) : null);
}
