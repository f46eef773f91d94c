// The rows to forget: failures first, as the server sorts them; searched and filtered here. A row's button asks it.
import { byId, element } from "./elements.js";

const PAGE = 50;
const CUT = 400; // signs of a long text

export function showRows(run, ask) {
  byId("headline").textContent = run.no_rows || [run.headline, ...run.remarks].join(" ");
  if (!run.rows.length) return;
  const tests = {
    all: ["all rows", () => true],
    failed: [run.failed, (row) => row.failed.unlearned === true],
    rest: [`not ${run.failed}`, (row) => row.failed.unlearned === false],
  };
  for (const [kind, label] of Object.entries(run.kinds)) tests[kind] = [label, (row) => row.kind === kind];
  for (const [name, [label, test]] of Object.entries(tests)) {
    byId("filter").append(new Option(`${label} (${run.rows.filter(test).length})`, name));
  }
  let most = PAGE;
  const refresh = () => {
    const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const test = tests[byId("filter").value][1];
    const found = run.rows.filter((row) => test(row) && words.every((word) => textOf(row).includes(word)));
    byId("rows").replaceChildren(...found.slice(0, most).map((row) => item(row, run, ask)));
    byId("shown").textContent = `${Math.min(most, found.length)} of ${found.length} rows`;
    byId("more").hidden = found.length <= most;
  };
  const anew = () => {
    most = PAGE;
    refresh();
  };
  byId("search").addEventListener("input", anew);
  byId("filter").addEventListener("change", anew);
  byId("more").addEventListener("click", () => {
    most += PAGE;
    refresh();
  });
  byId("tools").hidden = false;
  refresh();
}

const textOf = (row) =>
  [row.question, row.expected, row.text, ...Object.values(row.answers)].filter(Boolean).join(" ").toLowerCase();

const cut = (text) => (text.length > CUT ? `${text.slice(0, CUT)} …` : text);

function item(row, run, ask) {
  const question = row.question || row.text.slice(0, Math.min(CUT, Math.ceil(row.text.length / 2)));
  const button = Object.assign(element("button", "", cut(question)), { type: "button", title: "Ask all models", dir: "auto" });
  button.addEventListener("click", () => ask(question));
  const head = element("p", "head", element("span", "muted", `row ${row.index}`), button);
  if (row.failed.unlearned) head.append(element("span", "failed", run.failed));
  if (row.kind && row.kind in run.kinds) head.append(element("span", "muted", run.kinds[row.kind]));
  const answers = element("dl");
  const add = (name, text) => {
    const place = element("dd", "", cut(text));
    place.dir = "auto";
    answers.append(element("div", "", element("dt", name, name), place));
  };
  if (row.expected) add("expected", row.expected);
  for (const name of ["target", "unlearned", "ideal"].filter((name) => name in row.failed)) {
    const share = row.predicted[name];
    if (share !== undefined && share !== null) add(name, `${Math.floor(100 * share + 1e-9)} % of its tokens are predicted`);
    else add(name, row.answers[name] || (row.answers[name] === "" ? "(nothing)" : "(not scored)"));
  }
  return element("li", "", head, answers);
}
