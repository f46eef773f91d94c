// The picture of the choice: what each candidate shows of the forget set and of the retain set. Its points are buttons.
import { element, inWords, isSamePoint, shape, short } from "./elements.js";

const [WIDTH, HEIGHT, LEFT, RIGHT, TOP, FOOT] = [440, 300, 66, 14, 14, 46];

export function drawChart(place, { axes, spots }, choose) {
  const [x, y] = ["x", "y"].map((axis) => scale(spots.map((spot) => spot[axis])));
  const right = (value) => LEFT + x.share(value) * (WIDTH - LEFT - RIGHT);
  const up = (value) => HEIGHT - FOOT - y.share(value) * (HEIGHT - TOP - FOOT);
  const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "group", "aria-label": `${axes[0]} against ${axes[1]}` });
  for (const tick of x.ticks) {
    svg.append(shape("line", { class: "line", x1: right(tick), x2: right(tick), y1: TOP, y2: HEIGHT - FOOT }));
    svg.append(shape("text", { x: right(tick), y: HEIGHT - FOOT + 17, "text-anchor": "middle" }, short(tick)));
  }
  for (const tick of y.ticks) {
    svg.append(shape("line", { class: "line", x1: LEFT, x2: WIDTH - RIGHT, y1: up(tick), y2: up(tick) }));
    svg.append(shape("text", { x: LEFT - 7, y: up(tick) + 4, "text-anchor": "end" }, short(tick)));
  }
  svg.append(shape("text", { x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 8, "text-anchor": "middle" }, axes[0]));
  const side = { transform: `translate(12 ${(TOP + HEIGHT - FOOT) / 2}) rotate(-90)`, "text-anchor": "middle" };
  svg.append(shape("text", side, axes[1]));

  const info = element("p", "muted", "■ target, ◆ ideal, ● chosen, ○ other candidates.");
  const list = element("ul", "plain");
  const points = spots.filter(({ values }) => values).sort((a, b) => (a.role === "chosen") - (b.role === "chosen"));
  for (const { role, x: across, y: high, values } of points) {
    const words = `${inWords(values)}: ${axes[0]} ${short(across)}, ${axes[1]} ${short(high)}`;
    const spot = shape("g", { class: `spot ${role}`, role: "button", tabindex: "-1", "aria-label": words, "aria-pressed": "false" });
    for (const [name, radius] of [["hit", 13], ["ring", 9], ["dot", 5]]) {
      spot.append(shape("circle", { class: name, cx: right(across), cy: up(high), r: radius }));
    }
    spot.point = { alpha: 0, beta: 0, ...values };
    spot.addEventListener("click", () => choose(spot.point));
    for (const sign of ["focus", "pointerenter"]) spot.addEventListener(sign, () => (info.textContent = words));
    svg.append(spot);
    const button = element("button", "", words);
    button.addEventListener("click", () => choose(spot.point));
    list.append(element("li", "", button));
  }
  for (const { role, x: across, y: high } of spots.filter(({ values }) => !values)) {
    const at = `translate(${right(across)} ${up(high)}) rotate(${role === "ideal" ? 45 : 0})`;
    svg.append(shape("rect", { class: `mark ${role}`, x: -4.5, y: -4.5, width: 9, height: 9, transform: at }));
  }
  svg.addEventListener("keydown", (event) => move(svg, event));
  place.append(svg, info, element("details", "", element("summary", "", "The points as a list"), list));
}

// Ring the point of these strengths, if it is one; the keyboard enters the picture there.
export function markPoint(place, strengths) {
  const spots = [...place.querySelectorAll(".spot")];
  for (const spot of spots) spot.setAttribute("aria-pressed", String(isSamePoint(spot.point, strengths)));
  const entry = spots.find((spot) => spot.getAttribute("aria-pressed") === "true") || spots[0];
  for (const spot of spots) spot.setAttribute("tabindex", spot === entry ? "0" : "-1");
}

function move(svg, event) {
  const spots = [...svg.querySelectorAll(".spot")].sort((a, b) => a.point.alpha - b.point.alpha || a.point.beta - b.point.beta);
  const at = spots.indexOf(document.activeElement);
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (at < 0 || !(step || event.key === "Enter" || event.key === " ")) return;
  event.preventDefault();
  if (step) spots[(at + step + spots.length) % spots.length].focus();
  else spots[at].dispatchEvent(new Event("click"));
}

// A linear scale with round ticks around some values.
function scale(values) {
  const [least, most] = [Math.min(...values), Math.max(...values)];
  const span = most - least || Math.abs(most) || 1;
  const step = [1, 2, 5, 10].map((n) => n * 10 ** Math.floor(Math.log10(span / 4))).find((size) => span / size <= 5);
  const [low, high] = [least - 0.08 * span, most + 0.08 * span];
  const ticks = [];
  for (let n = Math.ceil(low / step); n * step <= high; n++) ticks.push(Number((n * step).toPrecision(12)));
  return { ticks, share: (value) => (value - low) / (high - low) };
}
