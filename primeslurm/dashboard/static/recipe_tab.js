"use strict";
// The recipe, and its difference to the recipe of another run.

async function recipeTab(panel, run, signal) {
  const recipe = await get(apiPath("runs", run.name, "recipe"));
  const others = exported ? [] : (await get("runs")).runs.map((other) => other.run).filter((name) => name !== run.name);
  if (signal.aborted) return;
  const difference = h("div");
  const options = [["", "compare with another run …"], ...others.map((name) => [name, name])];

  async function compare(other) {
    if (!other) return void show(difference);
    try {
      const changes = await get(apiPath("runs", run.name, "diff", other));
      show(difference,
        h("h2", null, plural(changes.length, "difference")),
        changes.length ? differenceTable(changes, run.name, other) : note("The recipes ask for the same."));
    } catch (error) {
      show(difference, note(error.message, "error"));
    }
  }
  const code = (text) => h("pre", { class: "code", tabindex: 0 }, text);
  show(panel,
    others.length ? h("div", { class: "toolbar" }, choices("Compare with", options, compare)) : null,
    difference,
    section("As written", code(recipe.written || "There is no recipe.yaml.")),
    more("As resolved, with all defaults", code(JSON.stringify(recipe.resolved, null, 2))));
}
