// The heat map and the sortable table. DATA holds names, groups, cosines (null where one could not be taken) and classes.
"use strict";

const SVG = "http://www.w3.org/2000/svg", N = DATA.names.length, CELL = N > 30 ? 12 : N > 12 ? 20 : 44, GAP = 4;
const heat = document.getElementById("heat"), readout = document.getElementById("readout");
const state = { row: 0, column: 0 };

function draw(tag, attributes, text) {
  const e = document.createElementNS(SVG, tag);
  for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v);
  if (text !== undefined) e.textContent = text;
  heat.append(e);
  return e;
}

// Where each row begins: the groups stand a little apart.
const starts = [];
DATA.groups.forEach(([, size], g) => { for (let i = 0; i < size; i++) starts.push(CELL * starts.length + GAP * g); });
const letters = CELL > 14 ? 12 : 10, margin = 10 + 0.62 * letters * Math.max(...DATA.names.map(n => n.length));
const side = starts[N - 1] + CELL;

// Light to dark blue up to 1, orange below 0; equal steps of the angle, so that what is near 1 is told apart.
function colour(x) {
  if (x === null) return "none";
  const t = 1 - Math.acos(Math.min(1, Math.abs(x))) / (Math.PI / 2);
  return x < 0 ? `hsl(28 85% ${96 - 46 * t}%)` : `hsl(208 ${40 + 45 * t}% ${97 - 68 * t}%)`;
}

const text = x => x === null ? "not measured" : x.toFixed(4);
const equal = (i, j) => DATA.classes.some(c => c.includes(DATA.names[i]) && c.includes(DATA.names[j]));

function look(i, j) {
  Object.assign(state, { row: i, column: j });
  const same = i !== j && equal(i, j) ? ", equal gradients for equal advantages" : "";
  readout.textContent = `${DATA.names[i]} and ${DATA.names[j]}: ${text(DATA.cosines[i][j])}${same}`;
  frame.setAttribute("visibility", "visible");
  frame.setAttribute("x", margin + starts[j]);
  frame.setAttribute("y", margin + starts[i]);
}

heat.setAttribute("viewBox", `0 0 ${margin + side + 2} ${margin + side + 2}`);
heat.setAttribute("width", margin + side + 2);
for (let i = 0; i < N; i++) {
  const middle = margin + starts[i] + CELL / 2 + letters / 3;
  draw("text", { x: margin - 5, y: middle, "text-anchor": "end", "font-size": letters }, DATA.names[i]);
  draw("text", { x: 0, y: 0, transform: `translate(${middle} ${margin - 5}) rotate(-90)`, "font-size": letters }, DATA.names[i]);
  for (let j = 0; j < N; j++) {
    const x = margin + starts[j], y = margin + starts[i], value = DATA.cosines[i][j];
    const cell = draw("rect", { x, y, width: CELL - 1, height: CELL - 1, fill: colour(value), "data-row": i, "data-column": j });
    cell.addEventListener("pointerenter", () => look(i, j));
    const dark = value !== null && Math.abs(value) > 0.75;
    if (CELL > 30) draw("text", { x: x + CELL / 2, y: y + CELL / 2 + 4, "text-anchor": "middle", class: dark ? "on dark" : "on" }, value === null ? "–" : value.toFixed(2));
    else if (i !== j && equal(i, j)) draw("circle", { cx: x + CELL / 2 - 0.5, cy: y + CELL / 2 - 0.5, r: CELL / 6, class: "on dark" });
  }
}
const frame = draw("rect", { width: CELL - 1, height: CELL - 1, class: "look", visibility: "hidden" });

heat.addEventListener("keydown", e => {
  const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[e.key];
  if (!step) return;
  e.preventDefault();
  const bound = v => Math.min(N - 1, Math.max(0, v));
  look(bound(state.row + step[0]), bound(state.column + step[1]));
});

const key = document.getElementById("key");
const bar = document.createElementNS(SVG, "svg");
bar.setAttribute("viewBox", "0 0 210 26");
bar.setAttribute("class", "bar");
[-0.5, 0, 0.5, 0.8, 0.95, 1].forEach((x, k) => {
  const box = document.createElementNS(SVG, "rect"), label = document.createElementNS(SVG, "text");
  Object.entries({ x: 35 * k, y: 0, width: 34, height: 12, fill: colour(x) }).forEach(([a, v]) => box.setAttribute(a, v));
  Object.entries({ x: 35 * k + 17, y: 24, "text-anchor": "middle" }).forEach(([a, v]) => label.setAttribute(a, v));
  label.textContent = x;
  bar.append(box, label);
});
key.append(bar);

// Sort by a column: numbers as numbers, empty ones last; the same header again turns the order round.
const body = document.querySelector("tbody");
document.querySelectorAll("th").forEach((head, k) => {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = head.textContent;
  head.replaceChildren(button);
  button.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    document.querySelectorAll("th").forEach(h => h.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const cell = row => row.children[k].textContent;
    const compare = (a, b) => a === "-" ? 1 : b === "-" ? -1 : (down ? -1 : 1) * (isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b);
    body.append(...[...body.rows].sort((a, b) => compare(cell(a), cell(b))));
  });
});
