// Questions and answers: a history of questions, each with a card a model. One answer is under way at a time.
import { drawChart, markPoint } from "./chart.js";
import { address, asCommand, byId, fromTemplate, inWords, isSamePoint, on, showTrouble, tell } from "./elements.js";
import { asData, asMarkdown, marked, nameOf, SETS } from "./history.js";
import { showRows } from "./rows.js";
import { makeSliders } from "./sliders.js";

const entries = [];
const queue = []; // cards that wait
let [run, showStrengths, refreshRows] = [];
let current = null; // the card whose answer is under way
let follows = null; // the question that the next one goes on with
let strengths = null; // null: the model that the run wrote

const isOpen = ({ blind, choice }) => blind && !choice; // whose answer is whose must not be told
const isBusy = (card) => card === current || queue.includes(card);
const isThere = ({ seconds }) => seconds !== undefined;

function ask(text, row = run.rows.find(({ question }) => question && question.trim() === text.trim())) {
  if (!text.trim() || !byId("ask").reportValidity()) return;
  const [system, tokens, blind] = [byId("system").value.trim(), Number(byId("tokens").value), byId("blind").checked];
  const entry = { number: entries.length + 1, text, row, follows, system, tokens, blind, cards: [], place: fromTemplate("entry") };
  const [title, about, answers, goOn] = entry.place.children;
  title.textContent = `${entry.number}. ${text}`;
  about.textContent = (follows ? `Goes on with question ${follows.number}. ` : "") + (system && `System message: ${system}`);
  goOn.addEventListener("click", () => follow(entry));
  if (row) answers.append(fill(fromTemplate("card"), "expected", `row ${row.index}, ${SETS[row.set]}`, row.expected || row.text.slice(text.length)));
  entries.push(entry);
  const names = run.models.filter(({ missing }) => !missing).map(({ name }) => ({ name, at: blind ? Math.random() : 0 }));
  for (const { name } of names.sort((a, b) => a.at - b.at)) add(entry, name, name === "unlearned" ? strengths : null);
  if (follows) follow(entry);
  showHistory();
}

function fill(place, ...texts) {
  texts.forEach((text, at) => place.children[at].replaceChildren(...[text].flat()));
  return place;
}

function add(entry, model, at) {
  const card = { entry, model, strengths: at, text: "", state: "waits", place: fromTemplate("card"), abort: new AbortController() };
  card.place.lastElementChild.addEventListener("click", () => choose(card));
  entry.place.children[2].append(card.place);
  for (const list of [entry.cards, queue]) list.push(card);
  work();
}

async function work() {
  for (const { entry } of queue) show(entry);
  while (!current && queue.length) {
    const card = (current = queue.shift());
    byId("stop").disabled = false;
    showTrouble();
    await answer(card).catch((error) => {
      const { aborted } = card.abort.signal;
      card.state = aborted ? "stopped" : "no answer";
      showTrouble(aborted ? null : error);
    });
    current = null;
    show(card.entry);
  }
  byId("stop").disabled = !current;
}

async function answer(card) {
  const { entry: { text, system, tokens, follows: before }, model, strengths: at, abort: { signal } } = card;
  const body = JSON.stringify({ model, text, system, tokens, strengths: at, earlier: turns(before, model) });
  const response = await fetch(address("answers"), { method: "POST", body, headers: { "Content-Type": "application/json" }, signal });
  if (!response.ok) throw new Error((await response.json()).error);
  for await (const event of events(response.body)) {
    signal.throwIfAborted(); // an event that came before the stop is not shown after it
    if (event.error) throw new Error(event.error);
    if (event.ahead) card.state = `waits: ${event.ahead} before it, from any page`;
    Object.assign(card, event); // its state, or its text so far
    if (isThere(event)) Object.assign(card, { text: event.answer || "(nothing)", state: `${event.seconds.toFixed(1)} s` });
    show(card.entry);
  }
  if (!isThere(card)) throw new TypeError("the server has ended");
  byId("spoken").textContent = `${card.place.firstElementChild.textContent}: ${card.text}`; // for screen readers, once it is whole
}

async function* events(body) {
  let rest = "";
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let piece = await reader.read(); !piece.done; piece = await reader.read()) {
    const lines = (rest + piece.value).split("\n\n");
    rest = lines.pop();
    yield* lines.map((line) => JSON.parse(line.replace(/^data: /, "")));
  }
}

// The conversation so far, as one model knows it.
const turns = (entry, model) => !entry ? [] : [
  ...turns(entry.follows, model), [entry.text, entry.cards.findLast((card) => card.model === model && isThere(card))?.answer ?? ""],
];

// Show the answers of a question as far as they are; once all are there, the differences, or the buttons of a choice.
function show(entry) {
  const [open, busy] = [isOpen(entry), entry.cards.some(isBusy)];
  const target = !open && !busy && entry.cards.find((card) => card.model === "target" && isThere(card));
  for (const [at, card] of entry.cards.entries()) {
    const label = open ? `Answer ${"ABC"[at]}` : nameOf(card);
    const compared = target && card !== target && isThere(card);
    const note = compared ? (card.text === target.text ? "; the same as the target's" : "; underlined: not in the target's") : "";
    const state = open ? (isBusy(card) ? "answering" : isThere(card) ? "answered" : "stopped") : card.state + note; // a time would tell
    fill(card.place, label, state, compared ? marked(card.text, target.text) : card.text, `Choose ${label}`);
    card.place.className = `answer ${open ? "" : card.model} ${isBusy(card) ? "busy" : ""}`;
    card.place.lastElementChild.hidden = !open || busy;
  }
  entry.place.lastElementChild.hidden = open || busy || run.continues;
}

function choose({ entry, model }) {
  entry.choice = model;
  const counts = run.models.map(({ name }) => `${name} ${entries.filter(({ choice }) => choice === name).length}`);
  tell("tally", `Chosen blind so far: ${counts.join(", ")}.`);
  show(entry);
  showHistory();
  entry.place.lastElementChild.focus();
}

// While a blind question is open, nothing of others is on the page: they may have the same answers, with names.
function showHistory() {
  const open = entries.filter(isOpen);
  byId("history").replaceChildren(...(open.length ? open : entries).map(({ place }) => place).reverse());
  byId("tools").hidden = open.length > 0;
  refreshRows();
}

function follow(entry) {
  follows = entry;
  byId("follows").hidden = !entry;
  tell("before", entry && `Goes on with question ${entry.number}.`);
  if (entry) byId("question").focus();
}

function stop() {
  for (const card of queue.splice(0)) show(Object.assign(card, { state: "stopped" }).entry);
  current?.abort.abort();
}

function setStrengths(values, again = true) {
  const { chosen, command } = run.strengths;
  const [now, last] = [values || chosen, entries.at(-1)];
  strengths = values;
  showStrengths(now);
  markPoint(byId("chart"), now);
  tell("point", inWords(now));
  tell("own", inWords(chosen));
  for (const id of ["merged", "keep"]) byId(id).hidden = !values;
  tell("command", asCommand(command, now));
  if (!again || !last || isOpen(last)) return;
  for (const card of last.cards.filter((one) => one.model === "unlearned" && !isThere(one))) {
    for (const list of [last.cards, queue].filter((one) => one.includes(card))) list.splice(list.indexOf(card), 1);
    card.place.remove();
    card.abort.abort();
  }
  const isSame = (card) => card.model === "unlearned" && isSamePoint(card.strengths || chosen, now) && !card.strengths === !values;
  if (!last.cards.some(isSame)) add(last, "unlearned", values);
}

export function showAsking(facts) {
  run = facts;
  const missing = run.models.filter((model) => model.missing).map(({ name, missing: why }) => ` No ${name}: ${why}.`);
  byId("hint").textContent += ` ${run.continues ? "What you write is continued" : `Prompt: ${run.prompt}`}; greedy.${missing.join("")}`;
  byId("tokens").value = run.tokens;
  byId("system").disabled = !run.takes_system;
  refreshRows = showRows(run, () => byId("blind").checked || entries.some(isOpen), (question, row) => {
    byId("question").value = question;
    byId("ask-title").scrollIntoView();
    ask(question, row, follow(null));
  });
  tell("point", `They cannot be changed here: ${run.fixed}.`);
  if (run.chart && run.strengths) drawChart(byId("chart"), run.chart, setStrengths);
  if (run.strengths) showStrengths = makeSliders(run.strengths, run.chart?.spots || [], setStrengths);
  if (run.strengths) setStrengths(null, false);
  const send = (event) => event.preventDefault() ?? ask(byId("question").value);
  on("ask", "submit", send);
  on("question", "keydown", (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing && send(event));
  on("blind", "change", refreshRows);
  on("anew", "click", () => follow(null));
  on("stop", "click", stop);
  document.addEventListener("keydown", (event) => event.key === "Escape" && stop());
  const save = (ending, text) =>
    Object.assign(document.createElement("a"), { download: `${run.name}.${ending}`, href: URL.createObjectURL(new Blob([text])) }).click();
  on("save-md", "click", () => save("md", asMarkdown(run, entries)));
  on("save-json", "click", () => save("json", JSON.stringify(asData(run, entries), null, 2)));
  const said = (words) => () => tell("copied", words);
  on("copy", "click", () => navigator.clipboard.writeText(asMarkdown(run, entries)).then(said("Copied."), said("The browser refused it.")));
}
