// A run that is going on, looked at every two seconds; and the list of the runs in a folder.
import { drawChart, drawLoss } from "./chart.js";
import { address, byId, element, load, showTrouble, tell } from "./elements.js";

const line = (name, ...cells) => element("tr", name, ...cells.map((cell) => element("td", "", cell ?? "")));
const clock = (at) => (at ? new Date(1000 * at).toLocaleString([], { dateStyle: "short", timeStyle: "medium" }) : "");
const lasting = (seconds) => (seconds < 90 ? `${Math.round(seconds)} s` : `${Math.round(seconds / 60)} min`);

export function showList({ runs }) {
  tell("sentence", runs.length === 1 ? "One run." : `${runs.length} runs.`);
  byId("runs").tBodies[0].replaceChildren(...runs.map(({ name, outcome, day, model, note }) => {
    const link = Object.assign(element("a", "", name), { href: `?${new URLSearchParams({ run: name })}` });
    return line("", link, outcome, day, model, note);
  }));
}

export function watch(facts, former = {}) {
  if (JSON.stringify(facts) !== JSON.stringify({ ...former, now: facts.now })) show(facts); // else a reader's marks stay
  const again = () => load({ watch: "" }).then((next) => showTrouble() && next);
  const wait = (error) => showTrouble(error) && facts; // a file may be in the middle of a change: the next look tells
  setTimeout(async () => watch(await again().catch(wait), facts), 2000);
}

function show({ began, now, works, can_ask: canAsk, stages, losses, chart, command }) {
  const isDone = (stage) => stage.done >= began;
  const passed = stages.findLastIndex((stage) => isDone(stage) && stage.kind !== "attack"); // attacks have another order
  const states = stages.map((stage, at) => {
    if (stage.begun) return works ? "under way" : "stopped";
    if (stage.done) return isDone(stage) ? "done" : "done earlier";
    return at < passed ? "done, and removed" : "to do";
  });
  if (works && !states.includes("under way") && states.includes("to do")) states[states.indexOf("to do")] = "under way";
  const ends = [began, ...stages.map(({ done }) => done)].filter(Boolean).sort((a, b) => a - b);
  byId("stages").tBodies[0].replaceChildren(...stages.map(({ name, begun, done }, at) => {
    const took = states[at] === "done" ? lasting(done - ends[ends.indexOf(done) - 1]) : "";
    return line(states[at].replaceAll(" ", "-"), name, states[at], clock(begun || done), took);
  }));
  const [current, done] = [stages[states.indexOf("under way")]?.name, states.filter((state) => state.startsWith("done"))];
  const [isWhole, earlier] = [canAsk && done.length === stages.length, done.filter((state) => state === "done earlier").length];
  const goes = works ? "This run is going on" : isWhole ? "This run has ended" : "No process of this machine works on this run";
  tell("sentence", `${goes}: ${done.length} of ${stages.length} stages are done${earlier ? `, ${earlier} of them earlier` : ""}${current ? `; under way: ${current}` : ""}.`);
  tell("begun", `Begun ${clock(began)}, ${lasting(now - began)} ago.${stages.length ? "" : " Models and data are prepared first."}`);
  tell("next", works ? (canAsk ? "The model is there; attacks go on." : "") : isWhole ? "The run has ended." : `It goes on with: ${command}`);
  Object.assign(byId("to-ask"), { hidden: !canAsk, href: address("./") });
  const curves = Object.entries(losses).filter(([, steps]) => steps.length > 1);
  byId("losses").replaceChildren(...curves.map(([name, steps]) => drawLoss(name, steps)));
  if (chart) drawChart(byId("points"), chart);
}
