// Pictures: what each candidate shows of the forget set and of the retain set, and the loss of a fit.
import { element, inWords, isSamePoint, shape, short } from "./elements.js";

const [WIDTH, HEIGHT, LEFT, RIGHT, TOP, FOOT] = [440, 300, 66, 14, 14, 46];

// Axes around some values: the picture, and the places of a value in it.
function plane(xs, ys, [below, beside], label) {
  const [x, y] = [scale(xs), scale(ys)];
  const right = (value) => LEFT + x.share(value) * (WIDTH - LEFT - RIGHT);
  const up = (value) => HEIGHT - FOOT - y.share(value) * (HEIGHT - TOP - FOOT);
  const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label });
  const grid = [
    ...x.ticks.map((tick) => [tick, right(tick), right(tick), TOP, HEIGHT - FOOT, right(tick), HEIGHT - FOOT + 17, "middle"]),
    ...y.ticks.map((tick) => [tick, LEFT, WIDTH - RIGHT, up(tick), up(tick), LEFT - 7, up(tick) + 4, "end"]),
  ];
  for (const [tick, x1, x2, y1, y2, across, base, anchor] of grid) {
    svg.append(shape("line", { class: "line", x1, x2, y1, y2 }), shape("text", { x: across, y: base, "text-anchor": anchor }, short(tick)));
  }
  const side = `translate(12 ${(TOP + HEIGHT - FOOT) / 2}) rotate(-90)`;
  svg.append(shape("text", { transform: side, "text-anchor": "middle" }, beside));
  svg.append(shape("text", { x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 8, "text-anchor": "middle" }, below));
  return { svg, right, up };
}

export function drawLoss(name, steps) {
  const ends = [steps[0], steps.at(-1)].map(([step, loss]) => `${short(loss)} at step ${step}`).join(", ");
  const { svg, right, up } = plane(...[0, 1].map((axis) => steps.map((step) => step[axis])), ["step", "loss"], `Loss of ${name}`);
  svg.append(shape("polyline", { class: "curve", points: steps.map(([step, loss]) => `${right(step)},${up(loss)}`).join(" ") }));
  return element("figure", "", svg, element("figcaption", "muted", `${name}: ${ends}.`));
}

// choose: takes the strengths of a point that is clicked on. The keyboard has the list of points instead.
export function drawChart(place, { axes, spots }, choose = () => {}) {
  const [xs, ys] = ["x", "y"].map((axis) => spots.map((spot) => spot[axis]));
  const { svg, right, up } = plane(xs, ys, axes, axes.join(" against "));
  const info = element("p", "muted", "■ target, ◆ ideal, ● chosen, ○ other candidates.");
  const list = element("ul");
  for (const { role, x, y, values } of spots.sort((a, b) => (a.role === "chosen") - (b.role === "chosen"))) {
    const words = `${values ? inWords(values) : role}: ${axes[0]} ${short(x)}, ${axes[1]} ${short(y)}`;
    list.append(element("li", "", words));
    if (values) {
      const circles = [["hit", 13], ["ring", 9], ["dot", 5]].map(([name, r]) => shape("circle", { class: name, cx: right(x), cy: up(y), r }));
      const spot = shape("g", { class: `spot ${role}` }, ...circles);
      spot.point = values;
      spot.addEventListener("click", () => choose(values));
      spot.addEventListener("pointerenter", () => (info.textContent = words));
      svg.append(spot);
    } else {
      const at = `translate(${right(x)} ${up(y)}) rotate(${role === "ideal" ? 45 : 0})`;
      svg.append(shape("rect", { class: `mark ${role}`, x: -4.5, y: -4.5, width: 9, height: 9, transform: at }));
    }
  }
  place.replaceChildren(svg, info, element("details", "", element("summary", "", "The picture in numbers"), list));
}

// Ring the point of these strengths, if it is one.
export function markPoint(place, strengths) {
  for (const spot of place.querySelectorAll(".spot")) spot.classList.toggle("now", isSamePoint(spot.point, strengths));
}

// A linear scale with round ticks around some values.
function scale(values) {
  const [least, most] = [Math.min(...values), Math.max(...values)];
  const span = most - least || Math.abs(most) || 1;
  const step = [1, 2, 5, 10].map((n) => n * 10 ** Math.floor(Math.log10(span / 4))).find((size) => span / size <= 5);
  const [low, high] = [least - 0.08 * span, most + 0.08 * span];
  const count = Math.floor(high / step) - Math.ceil(low / step) + 1;
  const ticks = Array.from({ length: count }, (_, n) => Number(((Math.ceil(low / step) + n) * step).toPrecision(12)));
  return { ticks, share: (value) => (value - low) / (high - low) };
}
