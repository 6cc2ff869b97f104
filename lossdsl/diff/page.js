// The page's own part: controls, curves, edges. W holds the emitted weights, DATA what they are drawn over.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const state = { p: {}, at: {}, axis: DATA.axis, log: true, zoom: 1, cursor: 0.5 };
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

const weight = (side, sign, v) => W[side + (sign > 0 ? "_pos" : "_neg")](point({ ...state.at, [state.axis]: v }), state.p);

function range() {
  const c = axisOf();
  if (!c) return [0, 1];
  if (c.kind !== "ratio") return [c.kind === "chance" ? 1e-4 : 0, 1];
  const half = c.span * state.zoom;
  return [Math.exp(-half), Math.exp(half)];
}
const logged = () => state.log && axisOf() && axisOf().kind === "ratio";
const along = t => { const [lo, hi] = range(); return logged() ? lo * (hi / lo) ** t : lo + (hi - lo) * t; };
const place = v => { const [lo, hi] = range(); return logged() ? Math.log(v / lo) / Math.log(hi / lo) : (v - lo) / (hi - lo); };

// What a weight does at v: "masked" (0), "bound" (flat where it is not 0), "moves".
function action(side, sign, v) {
  const w = weight(side, sign, v);
  if (w === 0) return "masked";
  const near = weight(side, sign, v * (1 + 1e-7));
  return near === w ? "bound" : "moves";
}

// Where the action changes, each place found by bisection.
function edges(side, sign) {
  const found = [], n = 400;
  let before = action(side, sign, along(0));
  for (let i = 1; i <= n; i++) {
    const now = action(side, sign, along(i / n));
    if (now !== before) {
      let lo = (i - 1) / n, hi = i / n;
      for (let k = 0; k < 60; k++) {
        const mid = (lo + hi) / 2;
        if (action(side, sign, along(mid)) === before) lo = mid; else hi = mid;
      }
      found.push(along(hi));
    }
    before = now;
  }
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
    const y = BOX.top + h + 24 + 14 * k;  // one strip a side: solid where masked, pale where the weight is a bound
    const marks = [along(0), ...edges(side, sign), along(1)];
    for (let i = 0; i + 1 < marks.length; i++) {
      const kind = action(side, sign, logged() ? Math.sqrt(marks[i] * marks[i + 1]) : (marks[i] + marks[i + 1]) / 2);
      const x = px(place(marks[i]));
      draw("rect", { class: kind === "masked" ? `masked ${side}` : kind === "bound" ? `masked bound ${side}` : "", "data-side": side, "data-kind": kind, "data-from": marks[i], "data-to": marks[i + 1], fill: "none", x, y, width: Math.max(0, px(place(marks[i + 1])) - x), height: 9 }, svg);
    }
    for (const v of marks.slice(1, -1)) {
      const x = px(place(v)), label = mark(v, lo, hi);
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

function readout() {
  const v = along(state.cursor), label = axisOf() ? axisOf().label : "";
  const at = sign => ["a", "b"].map(side => `${DATA.labels[side]} ${short(weight(side, sign, v))}`).join(", ");
  document.getElementById("readout").textContent = `at ${label} = ${mark(v, ...range())}:  A > 0: ${at(1)};  A < 0: ${at(-1)}`;
}

function render() { chart(1); chart(-1); readout(); }

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
  slider.addEventListener("input", () => { const v = fromSlider(Number(slider.value)); field.value = short(v); set(Number(field.value)); render(); });
  field.addEventListener("input", () => { const v = Number(field.value); if (Number.isFinite(v) && field.value !== "") { slider.value = toSlider(v); set(v); render(); } });
  row.append(name, slider, field);
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
  choose.addEventListener("change", () => { state.axis = choose.value; showRest(); render(); });
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
  render();
}

start();
