"use strict";

const SVG = "http://www.w3.org/2000/svg";
const tooltip = document.querySelector(".tooltip");

for (const section of document.querySelectorAll("section.workload")) {
  const data = JSON.parse(section.querySelector("script.data").textContent);
  const hidden = new Set(); // numbers of the lines that the legend has switched off
  for (const set of section.querySelectorAll("fieldset.switch")) listen(section, set);
  for (const button of section.querySelectorAll(".legend button")) toggle(section, button, hidden);
  for (const variant of section.querySelectorAll(".variant")) hover(variant, data, hidden);
}

document.addEventListener("pointerdown", leave, { capture: true });
document.addEventListener("scroll", leave, { passive: true });
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((all) => (all.open = true)));

function listen(section, set) {
  set.addEventListener("change", (event) => show(section, set.dataset.switch, event.target.value));
  // Browsers keep the chosen button over a reload.
  show(section, set.dataset.switch, set.querySelector(":checked").value);
}

function show(section, name, value) {
  for (const variant of section.querySelectorAll(`figure[data-switch="${name}"] > .variant`))
    variant.hidden = variant.dataset.value !== value;
}

function toggle(section, button, hidden) {
  button.addEventListener("click", () => {
    const line = Number(button.dataset.line);
    const off = !hidden.has(line);
    if (off) hidden.add(line);
    else hidden.delete(line);
    button.setAttribute("aria-pressed", String(!off));
    for (const drawn of section.querySelectorAll(`.curves .variant [data-line="${line}"]`))
      drawn.classList.toggle("off", off);
  });
}

function hover(variant, data, hidden) {
  const svg = variant.querySelector("svg");
  const reading = JSON.parse(variant.dataset.reading);
  const look = reading.timeline
    ? (at) => span(reading, at)
    : (at) => nearest(reading, data.points[reading.points], at, hidden);
  const move = (event) => {
    leave();
    const found = look(position(svg, event));
    if (!found) return;
    if (found.cross !== undefined) svg.append(crosshair(reading.box, found));
    variant.closest("section").append(tooltip); // where the lines' colours are defined
    fill(found);
    place(event);
  };
  variant.addEventListener("pointermove", move);
  variant.addEventListener("pointerdown", move);
  // A finger leaves when it is lifted; what it pointed at stays until it points elsewhere.
  variant.addEventListener("pointerleave", (event) => event.pointerType === "touch" || leave());
}

function leave() {
  document.querySelector(".cross")?.remove();
  tooltip.hidden = true;
}

/* Where the pointer is, in the coordinates of the figure. */
function position(svg, event) {
  const frame = svg.getBoundingClientRect();
  const { width, height } = svg.viewBox.baseVal;
  return {
    x: ((event.clientX - frame.left) / frame.width) * width,
    y: ((event.clientY - frame.top) / frame.height) * height,
  };
}

/* From a value to its place between two edges. */
function along(scale, value, start, end) {
  const f = scale.log ? Math.log : (v) => v;
  return start + ((f(value) - f(scale.from)) / (f(scale.to) - f(scale.from))) * (end - start);
}

/* From a place between two edges to the value there. */
function back(scale, place, start, end) {
  return scale.from + ((place - start) / (end - start)) * (scale.to - scale.from);
}

/* The point next to the pointer, and what the other lines are at its place. */
function nearest(reading, lines, at, hidden) {
  const points = lines
    .filter((line) => reading.axis === "value" || !hidden.has(line.line))
    .flatMap((line) => placed(reading, line));
  const far = (point) => Math.hypot(point.x - at.x, (point.y - at.y) / 2);
  const closest = points.reduce((a, b) => (a && far(a) <= far(b) ? a : b), undefined);
  if (!closest) return undefined;
  const beside = new Map(); // for each line its point closest to the crosshair
  for (const point of points) {
    const gap = (p) => Math.abs(p.x - closest.x);
    const known = beside.get(point.line);
    if (gap(point) < 6 && !(known && gap(known) <= gap(point))) beside.set(point.line, point);
  }
  beside.set(closest.line, closest);
  const rows = [...beside.values()].sort((a, b) => a.y - b.y);
  return {
    cross: closest.x,
    title: `${axisName(reading)} ${axisValue(reading, closest.value)}`,
    rows: rows.length > 9 ? [closest] : rows,
  };
}

function placed(reading, line) {
  const [left, top, right, bottom] = reading.box;
  return line.x[reading.axis].map((value, i) => ({
    line: line.line,
    value,
    x: along(reading.x, value / reading.x.unit, left, right),
    y: along(reading.y, line.mean[i], bottom, top),
    label: line.label,
    text: digits(line.mean[i]),
    range: line.low ? `${digits(line.low[i])} to ${digits(line.high[i])}` : "",
    colour: `var(--line-${line.line})`,
  })).filter((point) => point.x > left - 1 && point.x < right + 1 && point.y > top - 1 && point.y < bottom + 1);
}

/* The bar of a timeline under the pointer. */
function span(reading, at) {
  const [left, top, right, bottom] = reading.box;
  const row = Math.floor(((at.y - top) / (bottom - top)) * reading.timeline.length);
  const time = back(reading.x, at.x, left, right) * reading.x.unit;
  const bars = reading.timeline[row] ?? [];
  const [kind, start, end] = bars.find(([, from, to]) => from <= time && time <= to) ?? [];
  if (!kind) return undefined;
  const bar = { label: kind, text: seconds(end - start), colour: `var(--${kind})`, range: "" };
  return { title: `worker ${row}, at ${seconds(start)}`, rows: [bar] };
}

function crosshair(box, found) {
  const group = document.createElementNS(SVG, "g");
  group.setAttribute("class", "cross");
  const draw = (name, attributes, colour) => {
    const part = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) part.setAttribute(key, value);
    if (colour) part.style.fill = colour;
    group.append(part);
  };
  draw("line", { x1: found.cross, x2: found.cross, y1: box[1], y2: box[3] });
  for (const row of found.rows) draw("circle", { cx: row.x, cy: row.y, r: 2.6 }, row.colour);
  return group;
}

/* Names come from files: they are set as text and never as HTML. */
function fill(found) {
  const element = (name, text = "") => Object.assign(document.createElement(name), { textContent: text });
  const rows = found.rows.map((row) => {
    const line = element("div");
    const dot = element("i");
    dot.style.background = row.colour;
    const value = element("span", row.text);
    if (row.range) value.append(element("br"), element("small", row.range));
    line.append(dot, element("span", row.label), value);
    return line;
  });
  tooltip.replaceChildren(element("b", found.title), ...rows);
  tooltip.hidden = false;
}

function place(event) {
  const { offsetWidth: width, offsetHeight: height } = tooltip;
  const right = event.clientX + 14 + width < innerWidth - 4;
  const left = right ? event.clientX + 14 : Math.max(4, event.clientX - 14 - width);
  const top = Math.min(event.clientY + 14, innerHeight - height - 4);
  tooltip.style.left = `${Math.max(4, Math.min(left, innerWidth - width - 4))}px`;
  tooltip.style.top = `${Math.max(4, top)}px`;
}

function axisName(reading) {
  const names = { step: "step", gradient_steps: "gradients", time_s: "time", bytes_sent: "sent" };
  return names[reading.axis] ?? reading.name;
}

function axisValue(reading, value) {
  if (reading.x.ticks) return reading.x.ticks[value];
  if (reading.axis === "time_s") return seconds(value);
  if (reading.axis === "bytes_sent") return bytes(value);
  return reading.axis === "value" ? digits(value) : Math.round(value).toLocaleString("en");
}

function digits(value) {
  return value.toLocaleString("en", { maximumSignificantDigits: 6 });
}

function seconds(value) {
  return value < 1 ? `${digits(Number((1000 * value).toPrecision(4)))} ms` : `${digits(value)} s`;
}

function bytes(value) {
  const power = Math.min(4, Math.max(0, Math.floor(Math.log10(Math.max(1, value)) / 3)));
  return `${digits(Number((value / 1000 ** power).toPrecision(4)))} ${["B", "kB", "MB", "GB", "TB"][power]}`;
}
