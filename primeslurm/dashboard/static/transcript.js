"use strict";
// One rollout: its facts, its conversation, and its tokens in colour.

const MOST_TOKENS = 20000;
const COLOUR_LEVELS = 6; // of a colour scale, on each side of zero

// How tokens are coloured. `level` returns the class of a token.
const COLOURINGS = {
  logprob: {
    title: "log-probability",
    has: (sequence) => sequence.logprobs.some(isNumber),
    level: (sequence, i) => rarity(sequence.logprobs[i]),
    legend: () => scale("rare", "probability 1", "0"),
  },
  advantage: {
    title: "advantage",
    has: (sequence) => sequence.advantages?.some(isNumber),
    level: (sequence, i, { most }) => signed(sequence.advantages?.[i], most.advantage),
    legend: ({ most }) => signedScale(most.advantage, ""),
  },
  version: {
    title: "policy version",
    has: (sequence) => sequence.versions.some(isNumber),
    level: (sequence, i, { versions }) =>
      isNumber(sequence.versions[i]) ? `ver${versions.indexOf(sequence.versions[i]) % PALETTE}` : null,
    legend: ({ versions }) =>
      versions.map((version, i) => h("span", { class: `token ver${i % PALETTE}` }, `version ${version}`)),
  },
  mismatch: {
    title: "trainer − engine",
    has: (sequence) => sequence.trainer_logprobs?.some(isNumber),
    level: (sequence, i, { most }) => signed(difference(sequence, i), most.mismatch),
    legend: ({ most }) => signedScale(most.mismatch, " nats"),
  },
};

function difference(sequence, i) {
  const [trainer, engine] = [sequence.trainer_logprobs?.[i], sequence.logprobs[i]];
  return isNumber(trainer) && isNumber(engine) ? trainer - engine : null;
}

function rarity(logprob) {
  if (!isNumber(logprob)) return null;
  return `rare${Math.min(COLOUR_LEVELS, Math.round((1 - Math.exp(logprob)) * COLOUR_LEVELS))}`;
}

function signed(value, most) {
  if (!isNumber(value) || !most) return null;
  const level = Math.min(COLOUR_LEVELS, Math.round((Math.abs(value) / most) * COLOUR_LEVELS));
  return `${value < 0 ? "neg" : "pos"}${level}`;
}

function scale(name, first, last, { reversed = false } = {}) {
  const levels = Array.from({ length: COLOUR_LEVELS + 1 }, (_, i) => (reversed ? COLOUR_LEVELS - i : i));
  return h("span", { class: "scale" }, first, levels.map((level) => h("i", { class: `token ${name}${level}` }, " ")), last);
}

function signedScale(most, unit) {
  const end = `${number(most, 2)}${unit}`;
  return [scale("neg", `−${end}`, "", { reversed: true }), scale("pos", "", `+${end}`)];
}

function rolloutFacts(summary) {
  const maybe = (value, digits) => (isNumber(value) ? number(value, digits) : null);
  return [
    facts([
      ["Reward", number(summary.reward, 3)], ["Advantage", maybe(summary.advantage, 3)],
      ["Length penalty", summary.length_penalty ? number(summary.length_penalty, 3) : null],
      ["Step", String(summary.step)], ["Versions", versionRange(summary)],
      ["Staleness", maybe(summary.staleness)], ["Tokens", number(summary.tokens)],
      ["Sampled", number(summary.sampled_tokens)], ["Trained", number(summary.trained_tokens)],
      ["Turns", String(summary.turns)], ["Time", duration(summary.seconds)], ["End", visible(summary.finish_reason)],
    ]),
    summary.error ? note(`Failed: ${visible(summary.error)}`, "error") : null,
    summary.dropped ? note(`Not trained: ${visible(summary.dropped)}`, "warning") : null,
    summary.truncated ? note("A limit on tokens ended this rollout.", "warning") : null,
    namedChips("Parts of the reward", Object.entries(summary.reward_parts)),
    namedChips("Metrics", Object.entries(summary.metrics)),
  ];
}

// entries: [name, value?]
function namedChips(title, entries) {
  if (!entries.length) return null;
  const value = (each) => (isNumber(each) ? h("b", { class: "num" }, number(each, 3)) : null);
  return h("p", { class: "numbers" }, h("span", { class: "dim" }, `${title}: `),
    entries.map(([name, each]) => h("span", { class: "chip" }, visible(name), value(each))));
}

function transcriptView(transcript) {
  const sequences = transcript.conversations.flatMap((conversation) => conversation.sequences);
  const known = sequences.filter((sequence) => sequence.pieces.length);
  const names = Object.keys(COLOURINGS).filter((name) => known.some(COLOURINGS[name].has));
  const context = colourContext(sequences);
  const legend = h("div", { class: "legend-row" });
  const hint = h("div", { class: "token-hint num", role: "status" });
  const buttons = h("div", { class: "chips", role: "group", "aria-label": "Colour tokens by" });
  const body = h("div", { class: "conversation" });
  let chosen = names.includes(settings.get("colouring", "")) ? settings.get("colouring", "") : null;

  function choose(name) {
    chosen = name;
    settings.set("colouring", name ?? "");
    update();
  }
  function update() {
    const view = { colouring: chosen && COLOURINGS[chosen], context, hint };
    const title = (name) => (name ? COLOURINGS[name].title : "text");
    show(buttons, [null, ...names].map((name) =>
      button(title(name), () => choose(name), { "aria-pressed": String(name === chosen) })));
    show(legend, view.colouring?.legend(context));
    show(hint, chosen ? "Point at a token for its numbers." : null);
    show(body, transcript.conversations.map((conversation) => conversationView(conversation, view)));
  }
  update();
  const toolbar = h("div", { class: "toolbar colouring" }, h("span", { class: "dim" }, "Tokens"), buttons, legend, hint);
  return [names.length ? toolbar : null, body];
}

function colourContext(sequences) {
  const largest = (values) => values.reduce((most, value) => (isNumber(value) ? Math.max(most, Math.abs(value)) : most), 0);
  const versions = sequences.flatMap((sequence) => sequence.versions.filter(isNumber));
  const differences = (sequence) => sequence.logprobs.map((_, i) => difference(sequence, i));
  return {
    versions: [...new Set(versions)].sort((a, b) => a - b),
    most: {
      advantage: largest(sequences.map((sequence) => largest(sequence.advantages ?? []))),
      mismatch: largest(sequences.map((sequence) => largest(differences(sequence)))),
    },
  };
}

function conversationView({ agent, reward, tools, messages, sequences }, view) {
  const shown = sequences.filter((sequence) => sequence.pieces.length);
  const tokensOf = (message) => {
    for (const sequence of shown) {
      const span = sequence.spans.find((each) => each.message === message);
      if (span) return { sequence, span };
    }
    return null;
  };
  // Tokens of sequences whose messages were not kept.
  const loose = view.colouring || !messages.length ? shown.filter((sequence) => !sequence.spans.length) : [];
  const rewardText = isNumber(reward) ? h("small", null, ` reward ${number(reward, 3)}`) : null;
  return h("section", null,
    agent ? h("h3", null, visible(agent), rewardText) : null,
    namedChips("Tools", tools.map((tool) => [tool])),
    messages.map((message, index) => messageView(message, view.colouring ? tokensOf(index) : null, view)),
    loose.map((sequence) => h("article", { class: "message" },
      h("div", { class: "role" }, "tokens"), tokenText(sequence, 0, sequence.pieces.length, view))),
    messages.length || loose.length ? null : note("The conversation of this rollout was not kept."));
}

function messageView(message, tokens, view) {
  const role = ["system", "user", "assistant", "tool"].includes(message.role) ? message.role : "other";
  const ended = isNumber(message.ended_s) ? ` to ${duration(message.ended_s)}` : "";
  const timing = isNumber(message.started_s) ? `${duration(message.started_s)}${ended}` : "";
  return h("article", { class: `message ${role}` },
    h("div", { class: "role" },
      h("b", null, visible(message.role)), message.name ? h("code", null, visible(message.name)) : null,
      message.sampled ? badge("sampled", "busy") : null,
      h("span", { class: "space" }), h("span", { class: "dim num" }, timing)),
    tokens ? tokenText(tokens.sequence, tokens.span.start, tokens.span.end, view) : messageText(message),
    message.images ? note(plural(message.images, "image")) : null,
    message.omitted ? note(`${plural(message.omitted, "character")} in the middle were not kept.`) : null);
}

function messageText({ reasoning, content, tool_calls: calls }) {
  const text = (value) => h("div", { class: "text" }, visible(value));
  return [
    reasoning ? h("details", { class: "reasoning", open: reasoning.length < 1500 },
      h("summary", null, "reasoning"), text(reasoning)) : null,
    content ? text(content) : null,
    calls.map((call) => h("div", { class: "call" },
      h("code", null, visible(call.name)), h("pre", null, visible(readableJson(call.arguments))))),
  ];
}

function readableJson(text) {
  if (/\d{16}/.test(text)) return text; // JavaScript would round such numbers
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // a model may write anything
  }
}

function tokenText(sequence, start, end, view) {
  const shown = Math.min(end, start + MOST_TOKENS);
  const holder = h("div", { class: "text tokens" });
  for (let i = start; i < shown; i += 1) {
    const level = view.colouring?.level(sequence, i, view.context);
    const classes = ["token", level, sequence.sampled[i] ? null : "given"].filter(Boolean).join(" ");
    holder.append(h("span", { class: classes, "data-i": i }, visible(sequence.pieces[i] ?? "")));
  }
  holder.addEventListener("pointerover", (event) => {
    const i = Number(event.target.dataset?.i ?? NaN);
    if (Number.isInteger(i)) show(view.hint, tokenDetails(sequence, i));
  });
  if (shown === end) return holder;
  const showRest = () => rest.replaceWith(...present([tokenText(sequence, shown, end, view)]));
  const rest = button(`Show more of ${number(end - shown)} tokens`, showRest);
  return [holder, rest];
}

function tokenDetails(sequence, i) {
  const value = (name, values) => (isNumber(values?.[i]) ? `${name} ${number(values[i], 4)}` : null);
  const logprob = sequence.logprobs[i];
  return [
    JSON.stringify(visible(sequence.pieces[i] ?? "")), `id ${sequence.token_ids[i]}`,
    isNumber(logprob) ? `p ${number(Math.exp(logprob), 3)}` : null,
    value("log-prob", sequence.logprobs), value("trainer", sequence.trainer_logprobs),
    value("teacher", sequence.ref_logprobs), value("advantage", sequence.advantages), value("version", sequence.versions),
    sequence.trained[i] ? "trained" : sequence.sampled[i] ? "sampled, not trained" : "given",
  ].filter(Boolean).join(" · ");
}
