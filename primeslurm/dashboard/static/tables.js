"use strict";
// Tables whose columns sort, and lists of names and values.

// columns: {title, cell(row), sort?(row), class?, hint?}. Returns {element, update(rows)}.
function sortableTable(columns, { caption, initial = -1, rowProps = () => null } = {}) {
  let by = initial;
  let descending = true;
  let shown = [];
  const body = h("tbody");
  const heads = columns.map((column, index) => {
    if (!column.sort) return h("th", { class: column.class, scope: "col", title: column.hint }, column.title);
    const button = h("button", { type: "button", class: "sort", onclick: () => sortBy(index) }, column.title);
    return h("th", { class: column.class, scope: "col", title: column.hint }, button);
  });
  function sortBy(index) {
    descending = by === index ? !descending : true;
    by = index;
    update(shown);
  }
  function update(rows) {
    shown = rows;
    const key = by >= 0 ? columns[by].sort : null;
    const ordered = key ? [...rows].sort((a, b) => compareValues(key(a), key(b)) * (descending ? -1 : 1)) : rows;
    heads.forEach((head, index) => {
      head.setAttribute("aria-sort", index !== by ? "none" : descending ? "descending" : "ascending");
    });
    show(body, ordered.map((row) =>
      h("tr", rowProps(row), columns.map((column) => h("td", { class: column.class }, column.cell(row))))));
  }
  const table = h("table", null, caption ? h("caption", { class: "hidden" }, caption) : null,
    h("thead", null, h("tr", null, heads)), body);
  return { element: h("div", { class: "wide" }, table), update };
}

function compareValues(a, b) {
  if (a === null || a === undefined) return b === null || b === undefined ? 0 : -1;
  if (b === null || b === undefined) return 1;
  return a < b ? -1 : a > b ? 1 : 0;
}

function simpleTable(titles, rows, props) {
  const head = h("thead", null, h("tr", null, titles.map((title) => h("th", { scope: "col" }, title))));
  const body = rows.map((cells) => h("tr", null, cells.map((cell) => h("td", null, cell ?? "–"))));
  return h("div", { class: "wide" }, h("table", props, head, h("tbody", null, body)));
}

// pairs: [name, value, level?]. Pairs without a value are left out.
function facts(pairs) {
  const shown = pairs.filter(([, value]) => ![null, undefined, "", "–"].includes(value));
  return h("dl", { class: "facts" }, shown.map(([name, value, level]) =>
    h("div", null, h("dt", null, name), h("dd", { class: level }, value))));
}
