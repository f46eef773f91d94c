// Small helpers: elements, the server, strengths in words.
const SYMBOLS = { alpha: "α", beta: "β", filter: "λ" };
const RUN = new URLSearchParams(location.search).get("run"); // of several
export const byId = (id) => document.getElementById(id);
export const on = (id, event, act) => byId(id).addEventListener(event, act);
export const tell = (id, text) => Object.assign(byId(id), { textContent: text ?? "", hidden: !text });
export const fromTemplate = (id) => byId(id).content.firstElementChild.cloneNode(true);

export function element(tag, name = "", ...children) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  made.append(...children);
  return made;
}

export function shape(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export const address = (file, wishes = {}) => `${file}?${new URLSearchParams({ ...(RUN && { run: RUN }), ...wishes })}`;

export async function load(wishes) {
  const response = await fetch(address("run.json", wishes));
  const facts = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(facts.error || "The run cannot be read; the terminal of msa-lite web says why.");
  return facts;
}

// A TypeError is the word of fetch for a server that is gone.
const LOST = "msa-lite web has ended. Start it again, and open the address that it prints.";
export const showTrouble = (error) => tell("trouble", error instanceof TypeError ? LOST : error?.message);

export const short = (value) => String(Number(value.toPrecision(4)));
// "α = 1.8, β = 0, λ = 1"; the filter's strength only where there is one.
export const inWords = (values) => Object.entries("epoch" in values ? values : { alpha: 0, beta: 0, ...values })
  .filter(([name, value]) => name !== "filter" || value).map(([name, value]) => `${SYMBOLS[name] || name} = ${short(value)}`).join(", ");

// The command that writes the model at these strengths. keys: of the recipe, by strength.
export const asCommand = ({ start, ...keys }, { alpha = 0, beta = 0, filter = 0 }) =>
  [start, ...Object.entries(keys).map(([name, key]) => `${key}=${{ alpha, beta, filter: filter || "off" }[name]}`)].join(" ");

export const isSamePoint = (a, b) => ["alpha", "beta", "filter"].every((name) => (a[name] || 0) === (b[name] || 0));
