// The page: a run to ask, a run that is going on, or a list of runs. All texts are set as text, never as HTML.
import { showAsking } from "./ask.js";
import { address, byId, load, showTrouble, tell } from "./elements.js";
import { showList, watch } from "./runs.js";

function showHead({ name, outcome, sentence, names = {}, day, has_report: hasReport, attacks }) {
  document.title = `${name} – msa-lite`;
  tell("name", name);
  tell("outcome", outcome).classList.add((outcome || "none").toLowerCase());
  tell("sentence", sentence);
  tell("names", [...Object.entries(names).map(([model, place]) => `${model}: ${place.replace(/^\/.*\/(?=[^/]*\/)/, "")}`), day].filter(Boolean).join(" · "));
  Object.assign(byId("report"), { href: address("report.html"), hidden: !hasReport });
  Object.assign(byId("attacks"), { href: `${address("report.html")}#attacks`, hidden: !hasReport || !attacks, title: attacks || "" });
  byId("all").hidden = !location.search;
}

try {
  const facts = await load();
  showHead(facts);
  ({ ask: showAsking, watch, list: showList })[facts.view](facts);
  document.body.dataset.view = facts.view; // all of it stands
} catch (error) {
  tell("sentence");
  showTrouble(error);
}
