"use strict";
// Data of the pages: from the server, or, in a report, from the page itself.

const exported = (() => {
  const element = document.getElementById("exported");
  return element ? JSON.parse(element.textContent) : null;
})();

// A report does not age: its "now" is the time of its writing.
const now = () => (exported ? exported.written : Date.now() / 1000);

const apiPath = (...parts) => parts.map(encodeURIComponent).join("/");

async function get(path) {
  if (exported) {
    if (path in exported.answers) return exported.answers[path];
    throw new Error("This report does not contain this page. `primeslurm dashboard` shows it.");
  }
  const response = await fetch(`/api/${path}`);
  if (response.status === 401) throw new Error("The dashboard was restarted: open the address that it printed.");
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error ?? `error ${response.status}`);
  return answer;
}

function hasExported(path) {
  return !exported || path in exported.answers;
}

// Call handlers[name] for each event of a stream until the signal aborts. `path` is called at each connection, so that
// a stream goes on where it was interrupted. Pages in the background have no stream: browsers allow six for a host.
function follow(path, handlers, signal) {
  if (exported || signal.aborted) return;
  let source = null;
  let timer = null;
  const close = () => {
    clearTimeout(timer);
    source?.close();
    source = null;
  };
  const open = () => {
    close();
    if (document.hidden) return;
    source = new EventSource(`/api/${path()}`);
    source.addEventListener("open", () => setConnection(true));
    source.addEventListener("error", () => {
      setConnection(false);
      close();
      timer = setTimeout(open, 3000);
    });
    for (const [name, handle] of Object.entries(handlers)) {
      source.addEventListener(name, (event) => handle(JSON.parse(event.data)));
    }
  };
  document.addEventListener("visibilitychange", open, { signal });
  signal.addEventListener("abort", close);
  open();
}

function setConnection(connected) {
  const light = document.getElementById("connection");
  if (!light) return;
  light.className = connected ? "connection live" : "connection lost";
  light.textContent = connected ? "live" : "disconnected";
}

// Call `action` now and every `seconds` while the page is visible, until the signal aborts.
function every(seconds, signal, action) {
  if (signal.aborted) return;
  action();
  if (exported) return;
  const timer = setInterval(() => document.hidden || action(), seconds * 1000);
  signal.addEventListener("abort", () => clearInterval(timer));
}

// Settings of this browser. A page that was opened as a file may have no storage.
const settings = {
  get(name, otherwise) {
    try {
      return localStorage.getItem(`primeslurm.${name}`) ?? otherwise;
    } catch {
      return otherwise;
    }
  },
  set(name, value) {
    try {
      localStorage.setItem(`primeslurm.${name}`, value);
    } catch {
      // It then counts until the page is closed.
    }
  },
};
