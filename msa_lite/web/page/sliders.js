// The sliders of α and β, and the choice of λ. A value is taken when the slider is let go.
import { element, short } from "./elements.js";

const STRENGTHS = [["alpha", "α", "how often the forget vector is subtracted"], ["beta", "β", "how often the retain vector is added"]];

export function makeSliders(form, { chosen, most, filters, has_retain }, choose) {
  const read = {};
  const write = {};
  const send = () => choose(Object.fromEntries(Object.entries(read).map(([name, value]) => [name, value()])));
  for (const [name, symbol, meaning] of STRENGTHS) {
    if (name === "beta" && !has_retain) {
      read.beta = () => 0;
      continue;
    }
    const range = { type: "range", min: 0, max: most[name], step: 0.05, title: meaning, ariaLabel: `${symbol}, ${meaning}` };
    const slider = Object.assign(element("input"), range);
    const number = Object.assign(element("input"), { ...range, type: "number", max: "", step: "any" });
    slider.addEventListener("input", () => (number.value = slider.value));
    slider.addEventListener("change", send);
    number.addEventListener("change", () => {
      slider.value = number.value = Math.max(0, Number(number.value) || 0);
      send();
    });
    read[name] = () => Number(number.value);
    write[name] = (value) => (slider.value = number.value = short(value));
    form.append(element("div", "slider", element("span", "", symbol), slider, number));
  }
  const select = element("select");
  for (const filter of filters) select.append(new Option(filter ? `λ = ${short(filter)}` : "off", String(filter)));
  select.addEventListener("change", send);
  read.filter = () => Number(select.value);
  write.filter = (value) => (select.value = String(value));
  if (filters.length > 1) form.append(element("label", "", "Filter ", select));
  const back = Object.assign(element("button", "", "Back to the run's model"), { type: "button" });
  back.addEventListener("click", () => choose(null));
  form.append(element("p", "", back));
  form.addEventListener("submit", (event) => event.preventDefault());
  const show = (values) => Object.entries(write).forEach(([name, set]) => set(values[name] || 0));
  return { show };
}
