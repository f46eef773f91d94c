// The rows, those that failed first, as the server sorts them; searched and filtered here. A row's button asks it.
import { SETS } from "./history.js";
import { byId, element, on, tell } from "./elements.js";

const [PAGE, CUT] = [50, 400]; // rows that are shown at first; signs of a long text

const textOf = (row) =>
  [row.question, row.expected, row.text, ...Object.values(row.answers)].filter(Boolean).join(" ").toLowerCase();
const cut = (text) => (text.length > CUT ? `${text.slice(0, CUT)} …` : text);
// The word for a row on which the unlearned model fails; nothing for others.
const failure = ({ set, failed: { target, unlearned } }, run) =>
  unlearned && set === "forget" ? run.failed : unlearned && set === "retain" && target === false ? "lost" : "";

// Return a function that shows them anew. isBlind: tells whether the models' answers must not be seen.
export function showRows(run, isBlind, ask) {
  tell("headline", run.no_rows || run.headline);
  const tests = [["all rows", () => true], ...Object.entries(SETS).map(([set, words]) => [words, (row) => row.set === set])];
  for (const word of [run.failed, "lost"]) tests.push([word, (row) => failure(row, run) === word]);
  for (const [kind, label] of Object.entries(run.kinds || {})) tests.push([label, (row) => row.kind === kind]);
  for (const [at, [label, test]] of tests.entries()) byId("filter").append(new Option(`${label} (${run.rows.filter(test).length})`, at));
  let most = PAGE;
  const refresh = () => {
    const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const [, test] = tests[byId("filter").value];
    const found = run.rows.filter((row) => test(row) && words.every((word) => textOf(row).includes(word)));
    byId("rows").replaceChildren(...found.slice(0, most).map((row) => item(row, run, isBlind(), ask)));
    tell("shown", `${Math.min(most, found.length)} of ${found.length} rows`);
    byId("more").hidden = found.length <= most;
  };
  on("search", "input", () => refresh((most = PAGE)));
  on("filter", "change", () => refresh((most = PAGE)));
  on("more", "click", () => refresh((most += PAGE)));
  byId("row-tools").hidden = !run.rows.length;
  refresh();
  return refresh;
}

function item(row, run, isBlind, ask) {
  const question = row.question || row.text.slice(0, Math.min(CUT, Math.ceil(row.text.length / 2)));
  const button = Object.assign(element("button", "", cut(question)), { type: "button", title: "Ask all models", dir: "auto" });
  button.addEventListener("click", () => ask(question, row));
  const head = element("p", "head", element("span", "muted", `row ${row.index}, ${SETS[row.set]}`), button);
  const answers = element("dl");
  const add = (name, text) => {
    answers.append(element("div", "", element("dt", name, name), Object.assign(element("dd", "", cut(text)), { dir: "auto" })));
  };
  if (row.expected) add("expected", row.expected);
  if (isBlind) return element("li", "", head, answers);
  head.append(element("span", "failed", failure(row, run)));
  if (row.kind in (run.kinds || {})) head.append(element("span", "muted", run.kinds[row.kind]));
  for (const name of Object.keys(row.failed)) {
    const share = row.predicted[name];
    if (share !== undefined && share !== null) add(name, `${Math.floor(100 * share + 1e-9)} % of its tokens are predicted`);
    else add(name, row.answers[name] || (row.answers[name] === "" ? "(nothing)" : "(not scored)"));
  }
  return element("li", "", head, answers);
}
