// A history of questions: which words of an answer are others than the target's, and its forms as a file.
import { element, inWords } from "./elements.js";

export const SETS = { forget: "to forget", retain: "to keep", holdout: "holdout, never trained on" };
const words = (text) => [...new Intl.Segmenter(undefined, { granularity: "word" }).segment(text)];

export const nameOf = ({ model, strengths }) => (strengths ? `${model}, ${inWords(strengths)}` : model);

// The pieces of an answer; words that the target's has not are marked.
export function marked(text, target) {
  const known = new Set(words(target).map(({ segment }) => segment));
  return words(text).map(({ segment, isWordLike }) => (isWordLike && !known.has(segment) ? element("mark", "", segment) : segment));
}

export const asData = ({ name, outcome, day, names }, entries) => ({
  run: name, outcome, day, models: names,
  questions: entries.map(({ number, text, row, system, follows, tokens, choice, cards }) => ({
    number, question: text, follows: follows?.number, system, tokens, chosen_blind: choice,
    row: row && { set: row.set, index: row.index, expected: row.expected || row.text },
    answers: cards.map(({ model, strengths, text, answer = text, state, seconds }) => ({ model, strengths, answer, state, seconds })),
  })),
});

export function asMarkdown(run, entries) {
  const quoted = (text) => `> ${text.replaceAll("<", "&lt;").replaceAll("\n", "\n> ")}\n`;
  const lines = [`# ${run.name}: ${run.outcome || "no verdict"}\n`, ...Object.entries(run.names).map((pair) => `- ${pair.join(": ")}`)];
  for (const { number, question, follows, system, row, chosen_blind: choice, answers } of asData(run, entries).questions) {
    lines.push(`\n## Question ${number}${follows ? `, after question ${follows}` : ""}\n`, quoted(question));
    if (system) lines.push("**system message**\n", quoted(system));
    if (row) lines.push(`**expected** (row ${row.index}, ${SETS[row.set]})\n`, quoted(row.expected));
    for (const card of answers) lines.push(`**${nameOf(card)}** (${card.state})\n`, quoted(card.answer));
    if (choice) lines.push(`Chosen blind: ${choice}`);
  }
  return `${lines.join("\n")}\n`;
}
