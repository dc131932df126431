"use strict";

const SVG = "http://www.w3.org/2000/svg";
const tooltip = document.querySelector(".tooltip");

function listen(section, set) {
  set.addEventListener("change", (event) => show(section, set.dataset.switch, event.target.value));
  // Browsers keep the chosen button over a reload.
  show(section, set.dataset.switch, set.querySelector(":checked").value);
}

/* A figure that has nothing on an axis says so. */
function show(section, name, value) {
  for (const figure of section.querySelectorAll(`figure[data-switch="${name}"]`)) {
    let known = false;
    for (const variant of figure.querySelectorAll(":scope > .variant")) {
      variant.hidden = variant.dataset.value !== value;
      known ||= !variant.hidden;
    }
    const words = figure.querySelector(".unknown");
    if (words) words.hidden = known;
  }
}

function toggle(section, button, hidden) {
  button.addEventListener("click", () => {
    const line = Number(button.dataset.line);
    const off = !hidden.has(line);
    if (off) hidden.add(line);
    else hidden.delete(line);
    button.setAttribute("aria-pressed", String(!off));
    for (const drawn of section.querySelectorAll(`figure[data-switch="axis"] [data-line="${line}"]`))
      drawn.classList.toggle("off", off);
  });
}

function hover(variant, data, hidden) {
  const svg = variant.querySelector("svg");
  const reading = JSON.parse(variant.dataset.reading);
  const figure = reading.rows ? new Bars(reading) : new Lines(reading, data.points[reading.points], hidden);
  const present = (found, point) => {
    leave();
    if (!found) return;
    svg.append(mark(reading.box, found));
    variant.closest("section").append(tooltip); // where the lines' colours are defined
    fill(found);
    place(point);
  };
  const move = (event) => present(figure.at(position(svg, event)), { x: event.clientX, y: event.clientY });
  variant.addEventListener("pointermove", move);
  variant.addEventListener("pointerdown", move);
  // A finger leaves when it is lifted; what it pointed at stays until it points elsewhere.
  variant.addEventListener("pointerleave", (event) => event.pointerType === "touch" || leave());
  variant.addEventListener("blur", leave);
  variant.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return leave();
    const way = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[event.key];
    if (!way) return undefined;
    event.preventDefault();
    const found = figure.step(...way);
    return present(found, found && onScreen(svg, found.place));
  });
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

/* The same, the other way round. */
function onScreen(svg, place) {
  const frame = svg.getBoundingClientRect();
  const { width, height } = svg.viewBox.baseVal;
  return { x: frame.left + (place.x / width) * frame.width, y: frame.top + (place.y / height) * frame.height };
}

/* From a value to its place between two edges. */
function along(scale, value, start, end) {
  const f = scale.log ? Math.log : (v) => v;
  return start + ((f(value) - f(scale.from)) / (f(scale.to) - f(scale.from))) * (end - start);
}

/* A figure of lines: what is next to the pointer, or to the last place that arrow keys went to. */
class Lines {
  constructor(reading, lines, hidden) {
    Object.assign(this, { reading, lines, hidden, line: 0, point: -1 });
  }

  shown() {
    return this.lines.filter((line) => !this.hidden.has(line.line)).map((line) => this.placed(line)).filter((points) => points.length);
  }

  placed(line) {
    const { x, y, box, axis } = this.reading;
    const [left, top, right, bottom] = box;
    const inside = (p) => p.x > left - 1 && p.x < right + 1 && p.y > top - 1 && p.y < bottom + 1;
    return (line.x[axis] ?? []).map((value, i) => ({
      line: line.line,
      value,
      x: along(x, value / x.unit, left, right),
      y: along(y, line.mean[i], bottom, top),
      label: line.label,
      text: formed(line.mean[i], y.form),
      range: `${line.low ? `[${bound(line.low[i], y.form)}, ${bound(line.high[i], y.form)}] ` : ""}n = ${line.n}`,
      colour: `var(--line-${line.line})`,
    })).filter(inside);
  }

  at(pointer) {
    const far = (point) => Math.hypot(point.x - pointer.x, (point.y - pointer.y) / 2);
    const all = this.shown().flat();
    return all.length ? this.around(all.reduce((a, b) => (far(a) <= far(b) ? a : b)), all) : undefined;
  }

  step(right, down) {
    const lines = this.shown();
    if (!lines.length) return undefined;
    this.line = (this.line + down + lines.length) % lines.length;
    const points = lines[this.line];
    this.point = Math.min(Math.max(this.point + right, 0), points.length - 1);
    return this.around(points[this.point], lines.flat());
  }

  /* A point, and what the other lines are at its place. */
  around(point, all) {
    const beside = new Map(); // for each line its point closest to the crosshair
    const gap = (p) => Math.abs(p.x - point.x);
    for (const other of all) {
      const known = beside.get(other.line);
      if (gap(other) < 6 && !(known && gap(known) <= gap(other))) beside.set(other.line, other);
    }
    beside.set(point.line, point);
    const rows = [...beside.values()].sort((a, b) => a.y - b.y);
    const { name, ticks, form } = this.reading.x;
    return {
      place: point,
      dots: rows.length > 9 ? [point] : rows,
      title: `${name} ${ticks ? ticks[point.value] : formed(point.value, form)}`,
      rows: rows.length > 9 ? [point] : rows,
    };
  }
}

/* A figure of bars or cells: the one under the pointer, or the one that arrow keys went to. */
class Bars {
  constructor(reading) {
    Object.assign(this, { rows: reading.rows, row: 0, cell: -1 });
  }

  at(pointer) {
    const row = this.rows.find((each) => each.top <= pointer.y && pointer.y <= each.bottom);
    const cell = row?.cells.find(([from, to]) => from <= pointer.x && pointer.x <= to);
    return cell && this.told(row, cell);
  }

  step(right, down) {
    this.row = Math.min(Math.max(this.row + down, 0), this.rows.length - 1);
    const row = this.rows[this.row];
    this.cell = Math.min(Math.max(this.cell + right, 0), row.cells.length - 1);
    return this.told(row, row.cells[this.cell]);
  }

  told(row, [from, to, label, text, colour]) {
    return {
      place: { x: (from + to) / 2, y: (row.top + row.bottom) / 2 },
      frame: { x: from, y: row.top, width: to - from, height: row.bottom - row.top },
      title: row.title,
      rows: [{ label, text, range: "", colour: `var(--${colour})` }],
    };
  }
}

function mark(box, found) {
  const group = document.createElementNS(SVG, "g");
  group.setAttribute("class", "cross");
  const draw = (name, attributes, colour) => {
    const part = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) part.setAttribute(key, value);
    if (colour) part.style.fill = colour;
    group.append(part);
  };
  if (found.frame) draw("rect", found.frame);
  else draw("line", { x1: found.place.x, x2: found.place.x, y1: box[1], y2: box[3] });
  for (const dot of found.dots ?? []) draw("circle", { cx: dot.x, cy: dot.y, r: 2.6 }, dot.colour);
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

function place({ x, y }) {
  const { offsetWidth: width, offsetHeight: height } = tooltip;
  const right = x + 14 + width < innerWidth - 4;
  const left = right ? x + 14 : Math.max(4, x - 14 - width);
  const top = Math.min(y + 14, innerHeight - height - 4);
  tooltip.style.left = `${Math.max(4, Math.min(left, innerWidth - width - 4))}px`;
  tooltip.style.top = `${Math.max(4, top)}px`;
}

function formed(value, form) {
  if (form === "seconds") return seconds(value);
  if (form === "bytes") return bytes(value);
  if (form === "count") return Math.round(value).toLocaleString("en");
  return form === "times" ? `${Number(value.toPrecision(3))} x` : digits(value);
}

function bound(value, form) {
  return value === null ? "no bound" : formed(value, form);
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
