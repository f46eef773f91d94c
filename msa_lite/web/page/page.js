// The page: what it shows of the run, and the answers to a question as they come. All texts are set as text, never as HTML.
import { drawChart, markPoint } from "./chart.js";
import { showRows } from "./rows.js";
import { makeSliders } from "./sliders.js";
import { asCommand, byId, element, inWords } from "./elements.js";

const JSON_BODY = { "Content-Type": "application/json" };
const MARKS = { target: "■", unlearned: "●", ideal: "◆" };
const run = await load();
const cards = {};
let strengths = null; // null: the model that the run wrote
let asked = ""; // the question whose answers are on the page
let request = null; // that of the answers that are under way

async function load() {
  const response = await fetch("run.json");
  const facts = await response.json().catch(() => ({}));
  if (response.ok) return facts;
  byId("sentence").textContent = facts.error || "The run cannot be read; the terminal of msa-lite web says why.";
  throw new Error(facts.error);
}

function showRun() {
  document.title = `${run.name} – msa-lite`;
  byId("name").textContent = run.name;
  byId("sentence").textContent = run.sentence;
  byId("outcome").textContent = run.outcome || "";
  byId("outcome").classList.add((run.outcome || "").toLowerCase());
  byId("outcome").hidden = !run.outcome;
  byId("report").hidden = !run.has_report;
  byId("attacks").hidden = !(run.has_report && run.attacks);
  byId("attacks").title = run.attacks || "";
  const how = run.continues ? "What you write is continued" : `Prompt: ${run.prompt}`;
  byId("hint").textContent += ` ${how}; at most ${run.tokens} tokens, greedy.`;
  for (const { name, missing } of run.models) {
    const state = element("span", "muted", missing ? "" : "not asked yet");
    const text = element("p", "text", missing ? `Not there: ${missing}` : "");
    text.dir = "auto";
    const card = element("article", `answer ${name}`, element("h2", "", `${MARKS[name]} ${name}`), state, text);
    byId("answers").append(card);
    cards[name] = { card, state, text, missing };
  }
  byId("send").disabled = false;
}

function showStrengths() {
  if (!run.strengths) {
    byId("point").textContent = `They cannot be changed here: ${run.fixed}.`;
    byId("sliders").hidden = byId("chart").hidden = true;
    return;
  }
  if (run.chart) drawChart(byId("chart"), run.chart, setStrengths);
  else byId("chart").hidden = true;
  sliders = makeSliders(byId("sliders"), run.strengths, setStrengths);
  setStrengths(null, false);
}
let sliders = null;

function setStrengths(values, again = true) {
  strengths = values;
  sliders.show(values || run.strengths.chosen);
  markPoint(byId("chart"), values || run.strengths.chosen);
  byId("point").textContent = values
    ? `${inWords(values)}, merged in memory; nothing is written. Verdict and rows on this page are of ${inWords(run.strengths.chosen)}.`
    : `${inWords(run.strengths.chosen)}: the model that the run wrote. Click on a point, or move a slider, for any other.`;
  byId("keep").hidden = !values;
  if (values) byId("command").textContent = asCommand(run.strengths.command, values);
  if (!again || !asked) return;
  const waiting = Object.keys(cards).filter((name) => cards[name].card.classList.contains("busy"));
  ask(asked, [...new Set([...waiting, "unlearned"])]); // the answers that this stops begin again
}

async function ask(question, models) {
  request?.abort();
  request = new AbortController();
  const mine = request;
  asked = question;
  byId("trouble").hidden = true;
  byId("stop").disabled = false;
  for (const name of models) setState(name, "waits", true, "");
  try {
    const body = JSON.stringify({ question, strengths, models });
    const response = await fetch("answers", { method: "POST", body, headers: JSON_BODY, signal: mine.signal });
    if (!response.ok) throw new Error((await response.json()).error);
    for await (const event of events(response.body)) {
      mine.signal.throwIfAborted(); // an event that came before the stop is not shown after it
      show(event, models);
    }
  } catch (error) {
    if (mine.signal.aborted) return settle(models, "stopped", mine);
    const lost = error instanceof TypeError; // the word of fetch for a server that is gone
    showTrouble(lost ? "msa-lite web has ended. Start it again, and open the address that it prints." : error.message);
  }
  settle(models, "no answer", mine);
}

async function* events(body) {
  let rest = "";
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let piece = await reader.read(); !piece.done; piece = await reader.read()) {
    const lines = (rest + piece.value).split("\n\n");
    rest = lines.pop();
    for (const line of lines) yield JSON.parse(line.replace(/^data: /, ""));
  }
}

function show(event, models) {
  if (event.error) throw new Error(event.error);
  if (event.ahead) for (const name of models) setState(name, `waits: ${event.ahead} before it, from any page`, true);
  if (event.state) setState(event.model, event.state, true);
  if (event.text !== undefined) cards[event.model].text.textContent = event.text;
  if (event.answer === undefined) return;
  cards[event.model].text.textContent = event.answer || "(nothing)";
  setState(event.model, `${event.seconds.toFixed(1)} s`, false);
  byId("spoken").textContent = `${event.model}: ${cards[event.model].text.textContent}`; // for screen readers, once it is whole
}

function setState(name, state, busy, text) {
  const { card, state: place, text: answer } = cards[name];
  place.textContent = state;
  card.classList.toggle("busy", busy);
  if (text !== undefined) answer.textContent = text;
}

function settle(models, state, mine) {
  if (mine !== request) return; // a later question has taken its place
  for (const name of models) if (cards[name].card.classList.contains("busy")) setState(name, state, false);
  byId("stop").disabled = true;
}

function showTrouble(message) {
  byId("trouble").textContent = message;
  byId("trouble").hidden = false;
}

function askAll() {
  const question = byId("question").value;
  if (question.trim()) ask(question, run.models.filter(({ missing }) => !missing).map(({ name }) => name));
}

function askRow(question) {
  byId("question").value = question;
  byId("ask-title").scrollIntoView();
  askAll();
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  askAll();
});
byId("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  askAll();
});
byId("stop").addEventListener("click", () => request?.abort());
document.addEventListener("keydown", (event) => event.key === "Escape" && request?.abort());

showRun();
showStrengths();
showRows(run, askRow);
