"use strict";
// One rollout: its facts, its conversation, and its tokens in colour.

const MOST_TOKENS = 20000;
const LEVELS = 6; // of a colour scale, on each side of zero

// How tokens are coloured: {title, level(sequence, index, context) -> class or null, legend(context) -> nodes}.
const COLOURINGS = {
  logprob: {
    title: "log-probability",
    has: (sequence) => sequence.logprobs.some(isNumber),
    level: (sequence, i) => isNumber(sequence.logprobs[i]) ? `rare${Math.min(LEVELS, Math.round((1 - Math.exp(sequence.logprobs[i])) * LEVELS))}` : null,
    legend: () => scale("rare", ["probability 1", "0"]),
  },
  advantage: {
    title: "advantage",
    has: (sequence) => sequence.advantages?.some(isNumber),
    level: (sequence, i, { most }) => signed(sequence.advantages?.[i], most.advantage),
    legend: ({ most }) => [scale("neg", [`−${number(most.advantage, 2)}`, ""], true), scale("pos", ["", `+${number(most.advantage, 2)}`])],
  },
  version: {
    title: "policy version",
    has: (sequence) => sequence.versions.some(isNumber),
    level: (sequence, i, { versions }) => isNumber(sequence.versions[i]) ? `ver${versions.indexOf(sequence.versions[i]) % PALETTE}` : null,
    legend: ({ versions }) => versions.map((version, i) => h("span", { class: `token ver${i % PALETTE}` }, `version ${version}`)),
  },
  mismatch: {
    title: "trainer − engine",
    has: (sequence) => sequence.trainer_logprobs?.some(isNumber),
    level: (sequence, i, { most }) => signed(difference(sequence, i), most.mismatch),
    legend: ({ most }) => [scale("neg", [`−${number(most.mismatch, 2)} nats`, ""], true), scale("pos", ["", `+${number(most.mismatch, 2)} nats`])],
  },
};

function difference(sequence, i) {
  const [trainer, engine] = [sequence.trainer_logprobs?.[i], sequence.logprobs[i]];
  return isNumber(trainer) && isNumber(engine) ? trainer - engine : null;
}

function signed(value, most) {
  if (!isNumber(value) || !most) return null;
  const level = Math.min(LEVELS, Math.round((Math.abs(value) / most) * LEVELS));
  return `${value < 0 ? "neg" : "pos"}${level}`;
}

function scale(name, [first, last], reversed = false) {
  const levels = Array.from({ length: LEVELS + 1 }, (_, i) => (reversed ? LEVELS - i : i));
  return h("span", { class: "scale" }, first, levels.map((level) => h("i", { class: `token ${name}${level}` }, " ")), last);
}

function rolloutFacts(summary) {
  const range = summary.oldest_version === null ? null
    : summary.oldest_version === summary.newest_version ? String(summary.newest_version) : `${summary.oldest_version} to ${summary.newest_version}`;
  return [
    facts([
      ["Reward", number(summary.reward, 3)], ["Advantage", isNumber(summary.advantage) ? number(summary.advantage, 3) : null],
      ["Step", summary.step === null ? "waiting" : String(summary.step)], ["Versions", range],
      ["Staleness", summary.staleness === null ? null : String(summary.staleness)],
      ["Tokens", `${number(summary.tokens)}`], ["Sampled", number(summary.sampled_tokens)], ["Trained", number(summary.trained_tokens)],
      ["Turns", String(summary.turns)], ["Time", duration(summary.seconds)], ["End", summary.finish_reason],
      ["Length penalty", summary.length_penalty ? number(summary.length_penalty, 3) : null],
    ]),
    summary.error ? note(`Failed: ${visible(summary.error)}`, "error") : null,
    summary.dropped ? note(`Not trained: ${visible(summary.dropped)}`, "warning") : null,
    summary.truncated ? note("A limit on tokens ended this rollout.", "warning") : null,
    numbersList("Parts of the reward", summary.reward_parts), numbersList("Metrics", summary.metrics),
  ];
}

function numbersList(title, values) {
  const entries = Object.entries(values);
  if (!entries.length) return null;
  return h("p", { class: "numbers" }, h("span", { class: "dim" }, `${title}: `),
    entries.map(([name, value]) => h("span", { class: "chip" }, visible(name), h("b", { class: "num" }, number(value, 3)))));
}

function transcriptView(transcript) {
  const sequences = transcript.conversations.flatMap((conversation) => conversation.sequences);
  const context = colourContext(sequences);
  const names = Object.keys(COLOURINGS).filter((name) => sequences.some((sequence) => sequence.pieces.length && COLOURINGS[name].has(sequence)));
  let colouring = names.includes(settings.get("colouring", "")) ? settings.get("colouring", "") : null;
  const legend = h("div", { class: "legend-row" });
  const body = h("div", { class: "conversation" });
  const buttons = h("div", { class: "chips", role: "group", "aria-label": "Colour tokens by" });
  const hint = h("div", { class: "token-hint num", role: "status" });

  function update() {
    show(buttons, [null, ...names].map((name) => h("button", { type: "button", "aria-pressed": String(name === colouring), onclick: () => {
      colouring = name;
      settings.set("colouring", name ?? "");
      update();
    } }, name ? COLOURINGS[name].title : "text")));
    show(legend, colouring ? COLOURINGS[colouring].legend(context) : null);
    show(hint, colouring ? "Point at a token for its numbers." : null);
    show(body, transcript.conversations.map((conversation) => conversationView(conversation, colouring, context, hint)));
  }
  update();
  return [names.length ? h("div", { class: "toolbar colouring" }, h("span", { class: "dim" }, "Tokens"), buttons, legend, hint) : null, body];
}

function colourContext(sequences) {
  const largest = (values) => values.reduce((most, value) => (isNumber(value) ? Math.max(most, Math.abs(value)) : most), 0);
  return {
    versions: [...new Set(sequences.flatMap((sequence) => sequence.versions.filter(isNumber)))].sort((a, b) => a - b),
    most: {
      advantage: Math.max(0, ...sequences.map((sequence) => largest(sequence.advantages ?? []))),
      mismatch: Math.max(0, ...sequences.map((sequence) => largest(sequence.logprobs.map((_, i) => difference(sequence, i))))),
    },
  };
}

function conversationView(conversation, colouring, context, hint) {
  const title = conversation.agent ? h("h3", null, visible(conversation.agent), isNumber(conversation.reward) ? h("small", null, ` reward ${number(conversation.reward, 3)}`) : null) : null;
  const tools = conversation.tools.length ? h("p", { class: "numbers" }, h("span", { class: "dim" }, "Tools: "), conversation.tools.map((tool) => h("span", { class: "chip" }, visible(tool)))) : null;
  const tokensOf = (message) => {
    for (const sequence of conversation.sequences) {
      const span = sequence.pieces.length ? sequence.spans.find((each) => each.message === message) : null;
      if (span) return { sequence, span };
    }
    return null;
  };
  const messages = conversation.messages.map((message, index) => messageView(message, colouring ? tokensOf(index) : null, colouring, context, hint));
  const loose = colouring || !messages.length
    ? conversation.sequences.filter((sequence) => sequence.pieces.length && !sequence.spans.length).map((sequence) =>
      h("div", { class: "message" }, h("div", { class: "role" }, "tokens"), tokenText(sequence, 0, sequence.pieces.length, colouring, context, hint))) : [];
  return h("section", null, title, tools, messages, loose,
    !messages.length && !loose.length ? note("The conversation of this rollout was not kept.") : null);
}

function messageView(message, tokens, colouring, context, hint) {
  const timing = isNumber(message.started_s) ? `${duration(message.started_s)}${isNumber(message.ended_s) ? ` to ${duration(message.ended_s)}` : ""}` : "";
  const head = h("div", { class: "role" }, h("b", null, visible(message.role)), message.name ? h("code", null, visible(message.name)) : null,
    message.sampled ? badge("sampled", "busy") : null, h("span", { class: "space" }), h("span", { class: "dim num" }, timing));
  const omitted = message.omitted ? note(`${plural(message.omitted, "character")} in the middle were not kept.`) : null;
  const content = tokens ? tokenText(tokens.sequence, tokens.span.start, tokens.span.end, colouring, context, hint) : [
    message.reasoning ? h("details", { class: "reasoning", open: message.reasoning.length < 1500 }, h("summary", null, "reasoning"), h("div", { class: "text" }, visible(message.reasoning))) : null,
    message.content ? h("div", { class: "text" }, visible(message.content)) : null,
    message.tool_calls.map((call) => h("div", { class: "call" }, h("code", null, visible(call.name)), h("pre", null, visible(readableJson(call.arguments))))),
    message.images ? note(plural(message.images, "image")) : null,
  ];
  const role = ["system", "user", "assistant", "tool"].includes(message.role) ? message.role : "other";
  return h("article", { class: `message ${role}` }, head, content, omitted);
}

function readableJson(text) {
  if (/\d{16}/.test(text)) return text; // JavaScript would round such numbers
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // a model may write anything
  }
}

function tokenText(sequence, start, end, colouring, context, hint) {
  const shown = Math.min(end, start + MOST_TOKENS);
  const holder = h("div", { class: "text tokens" });
  const level = colouring ? COLOURINGS[colouring].level : () => null;
  for (let i = start; i < shown; i += 1) {
    const classes = ["token", level(sequence, i, context), sequence.sampled[i] ? null : "given"].filter(Boolean).join(" ");
    holder.append(h("span", { class: classes, "data-i": i }, visible(sequence.pieces[i] ?? "")));
  }
  holder.addEventListener("pointerover", (event) => {
    const i = Number(event.target.dataset?.i ?? NaN);
    if (Number.isInteger(i)) show(hint, tokenDetails(sequence, i));
  });
  if (shown === end) return holder;
  const more = h("button", { type: "button", onclick: () => more.replaceWith(tokenText(sequence, shown, end, colouring, context, hint)) },
    `Show ${number(Math.min(MOST_TOKENS, end - shown))} more of ${number(end - shown)} tokens`);
  return [holder, more];
}

function tokenDetails(sequence, i) {
  const value = (name, values) => isNumber(values?.[i]) ? `${name} ${number(values[i], 4)}` : null;
  const probability = isNumber(sequence.logprobs[i]) ? `p ${number(Math.exp(sequence.logprobs[i]), 3)}` : null;
  return [JSON.stringify(visible(sequence.pieces[i] ?? "")), `id ${sequence.token_ids[i]}`, probability, value("log-prob", sequence.logprobs), value("trainer", sequence.trainer_logprobs),
    value("teacher", sequence.ref_logprobs), value("advantage", sequence.advantages), value("version", sequence.versions),
    sequence.trained[i] ? "trained" : sequence.sampled[i] ? "sampled, not trained" : "given"].filter(Boolean).join(" · ");
}
