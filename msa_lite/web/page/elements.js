// Small helpers: elements, and strengths in words.
const SYMBOLS = { alpha: "α", beta: "β", filter: "λ" };

export const byId = (id) => document.getElementById(id);

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

export const short = (value) => String(Number(value.toPrecision(4)));

// "α = 1.8, β = 0, λ = 1"; the filter's strength only where there is one.
export function inWords(values) {
  const known = { alpha: 0, beta: 0, ...values };
  return Object.keys(SYMBOLS).filter((name) => name in known && (name !== "filter" || known[name]))
    .map((name) => `${SYMBOLS[name]} = ${short(known[name])}`).join(", ");
}

// The command that writes the model at these strengths. keys: of the recipe, by strength.
export function asCommand({ start, ...keys }, { alpha = 0, beta = 0, filter = 0 }) {
  const values = { alpha, beta, filter: filter || "off" };
  return [start, ...Object.entries(keys).map(([name, key]) => `${key}=${values[name]}`)].join(" ");
}

export const isSamePoint = (a, b) => ["alpha", "beta", "filter"].every((name) => (a[name] || 0) === (b[name] || 0));
