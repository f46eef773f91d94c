// The strengths: a point of the choice, or any values. A value is taken when its slider is let go.
import { byId, inWords, isSamePoint, on, short } from "./elements.js";

const LENGTHS = ["alpha", "beta"];

// Return a function that shows strengths. spots: those of the choice; choose: takes new strengths, null for the run's.
export function makeSliders({ chosen, filters, has_retain: hasRetain }, spots, choose) {
  const points = spots.map(({ values }) => values).filter(Boolean);
  const value = (id) => Number(byId(id).value) || 0;
  const send = () => choose({ alpha: value("alpha"), beta: value("beta"), filter: value("lambda") });
  for (const name of LENGTHS) {
    const [slider, number] = [byId(`${name}-slider`), byId(name)];
    slider.max = Math.max(2, 2 * chosen[name], ...points.map((point) => point[name] || 0)); // 2: more than nearly all choices
    slider.addEventListener("input", () => (number.value = slider.value));
    for (const input of [slider, number]) input.addEventListener("change", () => number.reportValidity() && send());
  }
  byId("lambda").append(...filters.map((filter) => new Option(filter ? `λ = ${short(filter)}` : "off", filter)));
  on("lambda", "change", send);
  byId("tried").append(new Option("none of them", ""), ...points.map((point, at) => new Option(inWords(point), at)));
  on("tried", "change", ({ target }) => target.value && choose(points[target.value]));
  on("back", "click", () => choose(null));
  byId("beta").parentElement.hidden = !hasRetain;
  byId("lambda").parentElement.hidden = filters.length < 2;
  byId("tried").parentElement.hidden = !points.length;
  return (values) => {
    for (const name of LENGTHS) byId(name).value = byId(`${name}-slider`).value = short(values[name] || 0);
    byId("lambda").value = values.filter || 0;
    byId("tried").selectedIndex = points.findIndex((point) => isSamePoint(point, values)) + 1;
  };
}
