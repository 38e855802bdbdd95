"use strict";
// The recipe, and its difference to the recipe of another run.

async function recipeTab(panel, run, signal) {
  const recipe = await get(apiPath("runs", run.name, "recipe"));
  const others = exported ? [] : (await get("runs")).runs.filter((other) => other.run !== run.name);
  if (signal.aborted) return;
  const difference = h("div");
  const choice = h("select", { "aria-label": "Compare with", onchange: () => compare(choice.value) },
    h("option", { value: "" }, "compare with another run …"), others.map((other) => h("option", { value: other.run }, other.run)));

  async function compare(other) {
    if (!other) return void show(difference);
    try {
      const answer = await get(apiPath("runs", run.name, "diff", other));
      const table = (changes, where) => simpleTable([...(where ? ["Where"] : []), "Field", run.name, other],
        changes.map((change) => [...(where ? [change.where] : []), h("code", null, change.field),
          h("code", { class: "removed" }, change.a ?? "not set"), h("code", { class: "added" }, change.b ?? "not set")]));
      show(difference,
        h("h2", null, `Recipe: ${plural(answer.recipe.length, "difference")}`), answer.recipe.length ? table(answer.recipe, false) : note("The recipes ask for the same."),
        answer.plan.length ? h("details", { class: "more" }, h("summary", null, `Plan: ${plural(answer.plan.length, "difference")}`), table(answer.plan, true)) : null);
    } catch (error) {
      show(difference, note(error.message, "error"));
    }
  }
  show(panel, others.length ? h("div", { class: "toolbar" }, choice) : null, difference,
    h("section", null, h("h2", null, "As written"), h("pre", { class: "code", tabindex: 0 }, recipe.written || "There is no recipe.yaml.")),
    h("details", { class: "more" }, h("summary", null, "As resolved, with all defaults"), h("pre", { class: "code", tabindex: 0 }, JSON.stringify(recipe.resolved, null, 2))));
}
