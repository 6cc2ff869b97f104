// The page's own part: controls, curves, edges. W holds the emitted weights, DATA what they are drawn over.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const state = { p: {}, at: {}, axis: DATA.axis, log: true, zoom: 1, cursor: 0.5, second: "", pieces: {}, set: {} };
for (const side of ["a", "b"]) for (const q of DATA.parameters[side]) state.p[q.key] = q.value;
for (const c of DATA.coordinates) state.at[c.key] = c.start;

const short = v => Number.isFinite(v) ? String(Number(v.toPrecision(4))) : String(v);
// A place on an axis, with as many digits as tell it from its neighbours.
const mark = (v, lo, hi) => String(Number(v.toPrecision(Math.min(12, Math.max(4, 3 + Math.ceil(Math.log10(Math.max(Math.abs(lo), Math.abs(hi)) / (hi - lo))))))));
const axisOf = () => DATA.coordinates.find(c => c.key === state.axis);

// Log-probs and log-ratios from the coordinates.
function point(at) {
  const r = Math.log(at.r ?? 1) + Math.log(at.rho ?? 1), c = Math.log(at.c ?? 1);
  const mu = "chance" in at ? Math.log(at.chance) : -Math.max(c, c + r, 0) - 2;
  const x = { mu, prox: mu + c, pi: mu + c + r, ref: mu + c };
  Object.assign(x, { r: x.pi - x.prox, c: x.prox - x.mu, rho: x.pi - x.mu });
  for (const q of DATA.coordinates) if (q.key.startsWith("q")) x[q.key] = q.logged ? Math.log(at[q.key]) : at[q.key];
  return x;
}

// The weight with the axis at v; `plain`, what it is where nothing binds.
const weight = (side, sign, v, plain = "") => W[side + (sign > 0 ? "_pos" : "_neg") + plain](point({ ...state.at, [state.axis]: v }), state.p);

// An axis: its ends, and places on it as numbers t from 0 to 1. A ratio is spaced by its log.
function range(c = axisOf()) {
  if (!c) return [0, 1];
  if (c.kind !== "ratio") return [c.kind === "chance" ? 1e-4 : 0, 1];
  const half = c.span * state.zoom;
  return [Math.exp(-half), Math.exp(half)];
}
const logged = (c = axisOf()) => state.log && c && c.kind === "ratio";
const along = (t, c = axisOf()) => { const [lo, hi] = range(c); return logged(c) ? lo * (hi / lo) ** t : lo + (hi - lo) * t; };
const place = (v, c = axisOf()) => { const [lo, hi] = range(c); return logged(c) ? Math.log(v / lo) / Math.log(hi / lo) : (v - lo) / (hi - lo); };

// What a weight does at t, in the words of the table of cases.
function action(side, sign, t) {
  const w = weight(side, sign, along(t)), plain = weight(side, sign, along(t), "_plain");
  if (w === 0) return "masked";
  if (w < 0) return "flipped";
  return Math.abs(w - plain) <= 1e-9 * Math.max(1, Math.abs(w), Math.abs(plain)) ? "kept" : w < plain ? "capped" : "raised";
}

// The axis cut where a weight changes what it does, each cut found by bisection.
function pieces(side, sign) {
  const found = [], n = 400;
  let from = 0, before = action(side, sign, 0);
  for (let i = 1; i <= n; i++) {
    const now = action(side, sign, i / n);
    if (now === before) continue;
    let lo = (i - 1) / n, hi = i / n;
    for (let k = 0; k < 60; k++) {
      const mid = (lo + hi) / 2;
      if (action(side, sign, mid) === before) lo = mid; else hi = mid;
    }
    found.push({ from, to: hi, kind: before });
    [from, before] = [hi, now];
  }
  found.push({ from, to: 1, kind: before });
  return found;
}

function draw(tag, attributes, parent, text) {
  const e = document.createElementNS(SVG, tag);
  for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v);
  if (text !== undefined) e.textContent = text;
  parent.append(e);
  return e;
}

// Round numbers; on a log axis the roundest first, as many as keep a tenth of the axis from each other.
function ticks(lo, hi, log) {
  if (log && hi / lo > 2) {
    const kept = [];
    for (const n of [1, 2, 5, 1.5, 3, 7]) for (const k of [0, -1, 1, -2, 2, -3, 3]) {
      const v = Number(`${n}e${k}`);
      if (v >= lo && v <= hi && kept.every(u => Math.abs(Math.log(u / v)) > 0.1 * Math.log(hi / lo))) kept.push(v);
    }
    return kept;
  }
  const step = 10 ** Math.floor(Math.log10((hi - lo) / 5)), size = step * [1, 2, 5, 10].find(n => (hi - lo) / (n * step) <= 6);
  const marks = [];
  for (let v = Math.ceil(lo / size) * size; v <= hi + 1e-12; v += size) marks.push(v);
  return marks;
}

const BOX = { left: 46, right: 12, top: 18, bottom: 88, width: 520, height: 350 };

function chart(sign) {
  const svg = document.getElementById(sign > 0 ? "pos" : "neg"), n = 500;
  if (!svg) return;
  svg.replaceChildren();
  BOX.width = Math.min(620, Math.max(300, svg.clientWidth || 520));  // letters keep their size on a phone
  svg.setAttribute("viewBox", `0 0 ${BOX.width} ${BOX.height}`);
  const w = BOX.width - BOX.left - BOX.right, h = BOX.height - BOX.top - BOX.bottom;
  const curves = ["a", "b"].map(side => Array.from({ length: n + 1 }, (_, i) => weight(side, sign, along(i / n))));
  const all = curves.flat().filter(Number.isFinite);
  const top = Math.max(0.1, ...all) * 1.06, low = Math.min(0, ...all) * 1.06;
  const px = t => BOX.left + t * w, py = v => BOX.top + h * (1 - (v - low) / (top - low));
  for (const v of ticks(low, top, false)) {
    draw("line", { class: "grid", x1: px(0), x2: px(1), y1: py(v), y2: py(v) }, svg);
    draw("text", { x: BOX.left - 6, y: py(v) + 4, "text-anchor": "end" }, svg, short(v));
  }
  const [lo, hi] = range();
  for (const v of ticks(lo, hi, logged())) draw("text", { x: px(place(v)), y: BOX.top + h + 16, "text-anchor": place(v) > 0.94 ? "end" : "middle" }, svg, mark(v, lo, hi));
  draw("text", { x: px(1), y: BOX.height - 4, "text-anchor": "end" }, svg, axisOf() ? axisOf().label : "");
  draw("text", { x: BOX.left - 6, y: 11, "text-anchor": "end" }, svg, "W");
  const seen = new Set();
  ["a", "b"].forEach((side, k) => {
    const y = BOX.top + h + 24 + 14 * k;  // one strip a side: solid where masked, pale where capped or raised
    const cut = state.pieces[side + sign];
    for (const { from, to, kind } of cut) {
      const look = kind === "kept" || kind === "flipped" ? "" : kind === "masked" ? `masked ${side}` : `masked bound ${side}`;
      draw("rect", { class: look, "data-side": side, "data-kind": kind, "data-from": along(from), "data-to": along(to), fill: "none", x: px(from), y, width: px(to) - px(from), height: 9 }, svg);
    }
    for (const { from } of cut.slice(1)) {
      const x = px(from), label = mark(along(from), lo, hi);
      draw("line", { class: "edge", x1: x, x2: x, y1: BOX.top, y2: BOX.top + h }, svg);
      if (![...seen].some(s => Math.abs(s - x) < 34)) draw("text", { x, y: BOX.top + h + 64, "text-anchor": "middle" }, svg, label);
      seen.add(x);
    }
  });
  ["a", "b"].forEach((side, k) => {
    let path = "", pen = false;
    curves[k].forEach((v, i) => {
      const jump = i && Math.abs(v - curves[k][i - 1]) > 0.25 * (top - low);
      path += `${pen && !jump ? "L" : "M"}${px(i / n).toFixed(2)} ${py(v).toFixed(2)}`;
      pen = true;
    });
    draw("path", { class: side, d: path }, svg);
  });
  draw("line", { class: "cursor", x1: px(state.cursor), x2: px(state.cursor), y1: BOX.top, y2: BOX.top + h }, svg);
  draw("rect", { class: "frame", x: px(0), y: BOX.top, width: w, height: h }, svg);
}

const says = (side, sign) => `${DATA.labels[side]} ${short(weight(side, sign, along(state.cursor)))} (${action(side, sign, state.cursor)})`;

function readout() {
  const label = axisOf() ? axisOf().label : "", at = sign => ["a", "b"].map(side => says(side, sign)).join(", ");
  document.getElementById("readout").textContent = `at ${label} = ${mark(along(state.cursor), ...range())}:  A > 0: ${at(1)};  A < 0: ${at(-1)}`;
}

// --- maps: both weights and their difference over the axis and a second quantity ---------------------------------------

const CELLS = 64, MAP = { left: 44, right: 8, top: 6, bottom: 40, width: 300, height: 250 };
const secondOf = () => DATA.coordinates.find(c => c.key === state.second);
const cells = of => Array.from({ length: CELLS }, (_, j) => Array.from({ length: CELLS }, (_, i) => of((i + 0.5) / CELLS, (j + 0.5) / CELLS)));

function maps() {
  const y = secondOf(), x = axisOf();
  document.getElementById("maps").hidden = !y;
  if (!y) return;
  const at = (side, sign) => cells((s, t) => W[side + (sign > 0 ? "_pos" : "_neg")](point({ ...state.at, [x.key]: along(s, x), [y.key]: along(t, y) }), state.p));
  const found = [1, -1].map(sign => { const [a, b] = ["a", "b"].map(side => at(side, sign)); return { sign, a, b, gap: a.map((row, j) => row.map((v, i) => v - b[j][i])) }; });
  const most = most98(found.flatMap(f => [f.a, f.b])), widest = most98(found.map(f => f.gap));
  for (const f of found) for (const kind of ["a", "b", "gap"]) panel(`${kind}${f.sign > 0 ? "-pos" : "-neg"}`, f[kind], kind === "gap" ? v => difference(v / widest) : amount(most), x, y);
  document.getElementById("map-key").textContent = `W: pale 0, dark ${short(most)} and more, orange below 0; difference: blue where ${DATA.labels.a} is larger, orange where ${DATA.labels.b} is, full colour at ${short(widest)}`;
}

// The largest size that a scale must show: all but the outermost fiftieth of what is not 0.
function most98(grids) {
  const sizes = grids.flat(2).map(Math.abs).filter(v => v > 0 && Number.isFinite(v)).sort((a, b) => a - b);
  return sizes.length ? sizes[Math.min(sizes.length - 1, Math.floor(0.98 * sizes.length))] : 1;
}

// A weight is a ratio: what lies between 0 and 1 matters as much as what lies above. Hatched where it is 0.
const amount = most => (v, i, j) => {
  if (v === 0) return (i + j) % 6 < 2 ? "#7a7d84" : "#c9cbd0";
  const t = Math.sqrt(Math.min(1, Math.abs(v) / most));
  return v < 0 ? `hsl(28 85% ${94 - 44 * t}%)` : `hsl(208 ${40 + 45 * t}% ${95 - 66 * t}%)`;
};
const difference = v => { const t = Math.min(1, Math.abs(v)); return v < 0 ? `hsl(28 85% ${100 - 50 * t}%)` : `hsl(208 75% ${100 - 62 * t}%)`; };

function panel(id, grid, colour, x, y) {
  const svg = document.getElementById(`map-${id}`), canvas = document.createElement("canvas"), pen = canvas.getContext("2d");
  canvas.width = canvas.height = CELLS;
  grid.forEach((row, j) => row.forEach((v, i) => { pen.fillStyle = colour(v, i, j); pen.fillRect(i, CELLS - 1 - j, 1, 1); }));
  svg.replaceChildren();
  const w = MAP.width - MAP.left - MAP.right, h = MAP.height - MAP.top - MAP.bottom, base = MAP.top + h;
  const px = t => MAP.left + t * w, py = t => base - t * h;
  draw("image", { class: "cells", href: canvas.toDataURL(), x: px(0), y: MAP.top, width: w, height: h, preserveAspectRatio: "none" }, svg);
  for (const v of ticks(...range(x), logged(x))) draw("text", { x: px(place(v, x)), y: base + 15, "text-anchor": "middle" }, svg, mark(v, ...range(x)));
  for (const v of ticks(...range(y), logged(y))) draw("text", { x: px(0) - 5, y: py(place(v, y)) + 4, "text-anchor": "end" }, svg, mark(v, ...range(y)));
  draw("text", { x: px(1), y: MAP.height - 6, "text-anchor": "end" }, svg, x.label);
  draw("text", { x: 2, y: MAP.height - 6 }, svg, `↑ ${y.label}`);
  const here = place(state.at[y.key], y);
  draw("line", { class: "cursor", x1: px(state.cursor), x2: px(state.cursor), y1: MAP.top, y2: base }, svg);
  if (here >= 0 && here <= 1) draw("line", { class: "cursor", x1: px(0), x2: px(1), y1: py(here), y2: py(here) }, svg);
  draw("rect", { class: "frame", x: px(0), y: MAP.top, width: w, height: h }, svg);
}

// The second quantity: the first that is not on the axis.
function chooseSecond() {
  const others = DATA.coordinates.filter(c => c.key !== state.axis && c.kind !== "flag"), choose = document.getElementById("second");
  if (!others.some(c => c.key === state.second)) state.second = others.length ? others[0].key : "";
  choose.replaceChildren(...others.map(c => Object.assign(document.createElement("option"), { value: c.key, textContent: c.label, selected: c.key === state.second })));
}

function layMaps() {
  for (const sign of ["pos", "neg"]) for (const kind of ["a", "b", "gap"]) {
    const figure = document.createElement("figure"), caption = document.createElement("figcaption");
    caption.textContent = `A ${sign === "pos" ? ">" : "<"} 0: ${kind === "gap" ? "difference" : DATA.labels[kind]}`;
    figure.append(caption);
    const svg = draw("svg", { id: `map-${kind}-${sign}`, viewBox: `0 0 ${MAP.width} ${MAP.height}`, role: "img", "aria-label": caption.textContent }, figure);
    const move = e => {
      const box = svg.getBoundingClientRect(), unit = MAP.width / box.width, held = t => Math.min(1, Math.max(0, t));
      state.cursor = held(((e.clientX - box.left) * unit - MAP.left) / (MAP.width - MAP.left - MAP.right));
      document.getElementById("cursor").value = 1000 * state.cursor;
      state.set[state.second](along(1 - held(((e.clientY - box.top) * unit - MAP.top) / (MAP.height - MAP.top - MAP.bottom)), secondOf()));
    };
    svg.addEventListener("pointerdown", move);
    svg.addEventListener("pointermove", e => { if (e.buttons) move(e); });
    document.getElementById("panels").append(figure);
  }
}

function render() {
  for (const side of ["a", "b"]) for (const sign of [1, -1]) state.pieces[side + sign] = pieces(side, sign);
  chart(1);
  chart(-1);
  readout();
  maps();
}

// A slider and a number field for one value; log scale for ratios.
function control(parent, id, label, value, min, max, log, doc, set) {
  const row = document.createElement("div");
  row.className = "control";
  const name = document.createElement("label"), slider = document.createElement("input"), field = document.createElement("input");
  name.textContent = label;
  name.htmlFor = id;
  Object.assign(slider, { type: "range", id, min: 0, max: 1000, step: 1 });
  Object.assign(field, { type: "number", step: "any", value: short(value) });
  field.setAttribute("aria-label", `${label}, as a number`);
  field.id = `${id}-number`;
  const toSlider = v => 1000 * (log ? Math.log(v / min) / Math.log(max / min) : (v - min) / (max - min));
  const fromSlider = t => log ? min * (max / min) ** (t / 1000) : min + (max - min) * t / 1000;
  slider.value = toSlider(value);
  slider.addEventListener("input", () => { field.value = short(fromSlider(Number(slider.value))); set(Number(field.value)); render(); });
  field.addEventListener("input", () => { const v = Number(field.value); if (Number.isFinite(v) && field.value !== "") { slider.value = toSlider(v); set(v); render(); } });
  row.append(name, slider, field);
  state.set[id.slice(2)] = v => { field.value = short(v); slider.value = toSlider(v); set(Number(field.value)); render(); };
  if (doc) { const d = document.createElement("div"); d.className = "doc"; d.textContent = doc; row.append(d); }
  parent.append(row);
}

// The coordinate on the axis has no slider of its own.
function showRest() {
  let shown = 0;
  for (const c of DATA.coordinates) shown += !(document.getElementById(`x-${c.key}`).parentElement.hidden = c.key === state.axis);
  document.getElementById("token").hidden = shown === 0;
}

function start() {
  for (const side of ["a", "b"]) {
    const box = document.getElementById(`parameters-${side}`);
    for (const q of DATA.parameters[side]) control(box, `p-${q.key}`, q.name, q.value, q.low, q.high, false, q.doc, v => { state.p[q.key] = v; });
    if (!DATA.parameters[side].length) box.append("no parameters that the weight reads");
  }
  const rest = document.getElementById("rest"), choose = document.getElementById("axis");
  for (const c of DATA.coordinates) {
    const option = document.createElement("option");
    Object.assign(option, { value: c.key, textContent: c.label, selected: c.key === state.axis });
    if (c.kind !== "flag") choose.append(option);
    const ratio = c.kind === "ratio";
    control(rest, `x-${c.key}`, c.label, c.start, ratio ? Math.exp(-c.span) : 0, ratio ? Math.exp(c.span) : c.kind === "number" ? 2 : 1, ratio, "", v => { state.at[c.key] = v; });
  }
  choose.addEventListener("change", () => { state.axis = choose.value; showRest(); chooseSecond(); render(); });
  const second = document.getElementById("second");
  second.addEventListener("change", () => { state.second = second.value; render(); });
  const scale = document.getElementById("scale");
  scale.addEventListener("click", () => { state.log = !state.log; scale.setAttribute("aria-pressed", String(state.log)); render(); });
  document.getElementById("nearer").addEventListener("click", () => { state.zoom /= 1.6; render(); });
  document.getElementById("farther").addEventListener("click", () => { state.zoom *= 1.6; render(); });
  const cursor = document.getElementById("cursor");
  cursor.addEventListener("input", () => { state.cursor = Number(cursor.value) / 1000; render(); });
  for (const id of ["pos", "neg"]) {
    const svg = document.getElementById(id);
    if (svg) svg.addEventListener("pointermove", e => {
      const box = svg.getBoundingClientRect(), x = (e.clientX - box.left) / box.width * BOX.width;
      state.cursor = Math.min(1, Math.max(0, (x - BOX.left) / (BOX.width - BOX.left - BOX.right)));
      cursor.value = 1000 * state.cursor;
      render();
    });
  }
  addEventListener("resize", render);
  showRest();
  chooseSecond();
  layMaps();
  render();
}

start();
