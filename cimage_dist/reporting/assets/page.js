"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id);
const colour = i => `var(--c${((i % 10) + 10) % 10})`;
const shade = t => `color-mix(in oklab, var(--accent) ${Math.round(100 * Math.max(0, Math.min(1, t)))}%, var(--low))`;
const short = v => v === null || v === undefined ? "–" : Math.abs(v) >= 1e5 || (v !== 0 && Math.abs(v) < 1e-3) ? v.toExponential(1) : String(+v.toPrecision(4));
function html(parent, name, text, attrs = {}) {
  const node = document.createElement(name);
  if (text !== undefined) node.textContent = text;
  for (const [k, v] of Object.entries(attrs)) node.setAttribute(k, v);
  parent.appendChild(node); return node;
}
function el(parent, name, attrs = {}, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [k, v] of Object.entries(attrs)) node.setAttribute(k, v);
  if (text !== undefined) node.textContent = text;
  parent.appendChild(node); return node;
}
function tip(event, text) {
  const t = $("tip");
  if (text === null) { t.style.display = "none"; return; }
  t.textContent = text; t.style.display = "block";
  t.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - t.offsetWidth - 8)) + "px";
  t.style.top = Math.max(4, Math.min(event.clientY + 14, innerHeight - t.offsetHeight - 8)) + "px";
}
function watch(node, text) {
  node.addEventListener("pointermove", e => tip(e, text(e)));
  node.addEventListener("pointerleave", e => tip(e, null));
}
function svg(body, width, height, name) {
  return el(body, "svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": name});
}
const bounds = values => { const v = values.filter(x => x !== null); return v.length ? [Math.min(...v), Math.max(...v)] : [0, 1]; };
function ticks(lo, hi, count = 5, whole = false) {
  if (hi <= lo) return [lo];
  const raw = Math.max((hi - lo) / count, whole ? 1 : 0), power = 10 ** Math.floor(Math.log10(raw)), step = [1, 2, 5, 10].map(m => m * power).find(s => s >= raw);
  const out = []; for (let v = Math.ceil(lo / step) * step; v <= hi + step * 1e-9; v += step) out.push(+v.toPrecision(12));
  return out;
}
function frame(body, spec, width, height, xs, ys) {
  const root = svg(body, width, height, spec.title), right = 12, top = 12, bottom = 40;
  let [x0, x1] = bounds(xs), [y0, y1] = bounds(ys);
  if (y0 === y1) { y0 -= Math.abs(y0) / 10 || 1; y1 += Math.abs(y1) / 10 || 1; }
  const levels = ticks(y0, y1, 5, ys.every(Number.isInteger)), left = 30 + 6.4 * Math.max(...levels.map(v => short(v).length));
  const X = v => left + (x1 > x0 ? (v - x0) / (x1 - x0) : .5) * (width - left - right), Y = v => height - bottom - (v - y0) / (y1 - y0) * (height - top - bottom);
  for (const v of levels) { el(root, "line", {class: "axis", x1: left, x2: width - right, y1: Y(v), y2: Y(v)}); el(root, "text", {x: left - 6, y: Y(v) + 4, "text-anchor": "end"}, short(v)); }
  for (const v of ticks(x0, x1, Math.max(2, Math.floor(width / 110)), xs.every(Number.isInteger))) el(root, "text", {x: X(v), y: height - bottom + 16, "text-anchor": "middle"}, short(v));
  el(root, "text", {x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle"}, spec.x || "");
  el(root, "text", {x: 12, y: top + (height - top - bottom) / 2, "text-anchor": "middle", transform: `rotate(-90 12 ${top + (height - top - bottom) / 2})`}, spec.y || "");
  return {root, X, Y, left, right, top, bottom, width, height};
}
function marks(f, list) {
  for (const m of list || []) {
    const x = f.X(m.x), flip = x > f.width * .6;
    el(f.root, "line", {class: "mark", x1: x, x2: x, y1: f.top, y2: f.height - f.bottom});
    el(f.root, "text", {class: "strong", x: x + (flip ? -5 : 5), y: f.top + 10, "text-anchor": flip ? "end" : "start"}, m.label);
  }
}
function legend(body, names, paint = colour) {
  const box = html(body, "div", undefined, {class: "legend"});
  names.forEach((name, i) => { const item = html(box, "span"); html(item, "i", undefined, {style: `background:${paint(i)}`}); item.append(name); });
}
const draw = {
  lines(body, spec, width) {
    const points = spec.series.flatMap(s => s.points), height = Math.max(210, Math.min(300, width * .5));
    const f = frame(body, spec, width, height, [...points.map(p => p[0]), ...spec.marks.map(m => m.x)], points.map(p => p[1]));
    spec.series.forEach((s, i) => {
      const good = s.points.filter(p => p[1] !== null), d = good.map((p, j) => `${j ? "L" : "M"}${f.X(p[0]).toFixed(1)},${f.Y(p[1]).toFixed(1)}`).join("");
      el(f.root, "path", {class: "shape", d, fill: "none", style: `stroke:${colour(i)}`, "stroke-width": 1.8, "stroke-linejoin": "round"});
      if (good.length < 40) for (const p of good) el(f.root, "circle", {class: "shape", cx: f.X(p[0]), cy: f.Y(p[1]), r: 2.6, style: `fill:${colour(i)}`});
    });
    marks(f, spec.marks);
    const line = el(f.root, "line", {class: "axis", y1: f.top, y2: height - f.bottom, style: "display:none"});
    const area = el(f.root, "rect", {x: f.left, y: f.top, width: width - f.left - f.right, height: height - f.top - f.bottom, fill: "transparent"});
    watch(area, e => {
      const box = f.root.getBoundingClientRect(), at = (e.clientX - box.left) * width / box.width;
      const near = s => s.points.reduce((a, b) => Math.abs(f.X(b[0]) - at) < Math.abs(f.X(a[0]) - at) ? b : a);
      const x = near(spec.series[0])[0];
      line.setAttribute("x1", f.X(x)); line.setAttribute("x2", f.X(x)); line.style.display = "";
      return [`${spec.x} ${short(x)}`, ...spec.series.map(s => `${s.name}: ${short(near(s)[1])}`)].join("\n");
    });
    area.addEventListener("pointerleave", () => line.style.display = "none");
    if (spec.series.length > 1) legend(body, spec.series.map(s => s.name));
  },
  heat(body, spec, width) {
    const n = spec.rows.length, m = spec.columns.length, left = Math.min(120, 22 + 6.2 * Math.max(...spec.rows.map(r => r.length))), bottom = 42;
    const room = width - left - 12, cell = spec.split || spec.text ? Math.min(room / m, 420 / n) : Math.max(8, Math.min(22, 330 / n)), wide = spec.split || spec.text ? cell : room / m;
    const height = 6 + cell * n + bottom, root = svg(body, width, height, spec.title), top = Math.max(...spec.values.flat().map(v => v === null ? 0 : v)) || 1;
    spec.values.forEach((row, i) => row.forEach((v, j) => {
      const rect = el(root, "rect", {class: "shape", x: left + j * wide, y: 6 + i * cell, width: Math.max(.5, wide - (wide > 5 ? .8 : 0)), height: Math.max(.5, cell - (cell > 5 ? .8 : 0)), style: `fill:${v === null ? "var(--line)" : shade(v / top)}`});
      watch(rect, () => `${spec.y} ${spec.rows[i]}, ${spec.x} ${spec.columns[j]}: ${short(v)}`);
      if (spec.text && cell > 20) { const t = el(root, "text", {class: "strong", x: left + (j + .5) * wide, y: 6 + (i + .5) * cell + 4, "text-anchor": "middle", "pointer-events": "none"}, short(v)); if (v / top > .55) t.style.fill = "var(--card)"; }
    }));
    const everyRow = Math.ceil(12 / cell), everyColumn = Math.ceil((10 + 6.2 * Math.max(...spec.columns.map(c => c.length))) / wide);
    spec.rows.forEach((r, i) => { if (i % everyRow === 0) el(root, "text", {x: left - 5, y: 6 + (i + .5) * cell + 4, "text-anchor": "end"}, r); });
    spec.columns.forEach((c, j) => { if (j % everyColumn === 0) el(root, "text", {x: left + (j + .5) * wide, y: 6 + cell * n + 14, "text-anchor": "middle"}, c); });
    if (spec.split) { el(root, "line", {x1: left, x2: left + m * wide, y1: 6 + spec.split * cell, y2: 6 + spec.split * cell, class: "mark"}); el(root, "line", {x1: left + spec.split * wide, x2: left + spec.split * wide, y1: 6, y2: 6 + n * cell, class: "mark"}); }
    el(root, "text", {x: left + m * wide / 2, y: height - 6, "text-anchor": "middle"}, spec.x);
    el(root, "text", {x: 10, y: 6 + n * cell / 2, "text-anchor": "middle", transform: `rotate(-90 10 ${6 + n * cell / 2})`}, spec.y);
  },
  histogram(body, spec, width) {
    const height = Math.max(210, Math.min(280, width * .45)), f = frame(body, spec, width, height, spec.edges, [0, Math.max(...spec.counts) * 1.12 || 1]);
    spec.counts.forEach((c, i) => {
      const bar = el(f.root, "rect", {class: "shape", x: f.X(spec.edges[i]) + .5, width: Math.max(.5, f.X(spec.edges[i + 1]) - f.X(spec.edges[i]) - 1), y: f.Y(c), height: f.Y(0) - f.Y(c), style: "fill:var(--c9)", opacity: .55});
      watch(bar, () => `${short(spec.edges[i])} to ${short(spec.edges[i + 1])}: ${c}`);
    });
    marks(f, spec.marks);
  },
  bars(body, spec, width) {
    const height = Math.max(220, Math.min(300, width * .5)), count = spec.categories.length, all = spec.series.flatMap(s => s.values.map((v, i) => v === null ? null : v + (s.errors[i] || 0)));
    const f = frame(body, {...spec, x: ""}, width, height, [0, count], [Math.min(0, ...all.map(v => v || 0)), ...all]);
    f.root.querySelectorAll("text").forEach(t => { if (+t.getAttribute("y") === height - f.bottom + 16) t.remove(); });
    const slot = (width - f.left - f.right) / count, bar = slot * .78 / spec.series.length;
    spec.categories.forEach((name, i) => {
      const tilted = name.length * 6.2 > slot, x = f.left + (i + .5) * slot, y = height - f.bottom + 15;
      el(f.root, "text", {x, y, "text-anchor": tilted ? "end" : "middle", ...(tilted ? {transform: `rotate(-24 ${x} ${y})`} : {})}, name);
      spec.series.forEach((s, j) => {
        const v = s.values[i]; if (v === null) return;
        const left = f.left + i * slot + slot * .11 + j * bar, r = el(f.root, "rect", {class: "shape", x: left, width: Math.max(1, bar - 1.5), y: f.Y(Math.max(v, 0)), height: Math.abs(f.Y(0) - f.Y(v)), rx: 2, style: `fill:${colour(j)}`});
        watch(r, () => `${name}, ${s.name}: ${short(v)}${s.errors[i] ? " ± " + short(s.errors[i]) : ""}`);
        if (s.errors[i]) el(f.root, "line", {x1: left + bar / 2, x2: left + bar / 2, y1: f.Y(v - s.errors[i]), y2: f.Y(v + s.errors[i]), stroke: "var(--ink)"});
      });
    });
    if (spec.series.length > 1) legend(body, spec.series.map(s => s.name));
  },
  dots(body, spec, width) {
    const gap = 26, top = 8, bottom = 40, right = 14, left = Math.min(width * .45, 16 + 6.3 * Math.max(...spec.rows.map(r => r.name.length)));
    const height = top + gap * spec.rows.length + bottom, root = svg(body, width, height, spec.title);
    let [lo, hi] = bounds(spec.rows.flatMap(r => [...r.values, r.published])); const room = (hi - lo || 1) * .05; lo -= room; hi += room;
    const X = v => left + (v - lo) / (hi - lo) * (width - left - right);
    for (const v of ticks(lo, hi, Math.max(2, Math.floor((width - left) / 80)))) { el(root, "line", {class: "axis", x1: X(v), x2: X(v), y1: top, y2: height - bottom}); el(root, "text", {x: X(v), y: height - bottom + 16, "text-anchor": "middle"}, short(v)); }
    el(root, "text", {x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle"}, spec.x);
    spec.rows.forEach((r, i) => {
      const y = top + (i + .5) * gap, n = r.values.length, mean = n ? r.values.reduce((a, b) => a + b, 0) / n : null, std = n ? Math.sqrt(r.values.reduce((a, b) => a + (b - mean) ** 2, 0) / n) : 0;
      el(root, "text", {class: "strong", x: left - 8, y: y + 4, "text-anchor": "end"}, r.name.length > left / 6.2 ? r.name.slice(0, Math.floor(left / 6.2) - 1) + "…" : r.name);
      if (n) {
        el(root, "line", {class: "shape", x1: X(mean - std), x2: X(mean + std), y1: y, y2: y, style: `stroke:${colour(0)}`, "stroke-width": 9, "stroke-opacity": .22});
        for (const v of r.values) el(root, "circle", {class: "shape", cx: X(v).toFixed(1), cy: y, r: 3, style: `fill:${colour(0)}`, "fill-opacity": .55});
        el(root, "line", {class: "shape", x1: X(mean), x2: X(mean), y1: y - 8, y2: y + 8, style: `stroke:${colour(0)}`, "stroke-width": 2.2});
      }
      if (r.published !== null) el(root, "path", {class: "shape", d: `M${X(r.published)},${y - 6}l6,6l-6,6l-6,-6z`, fill: "none", style: `stroke:${colour(1)}`, "stroke-width": 1.8});
      watch(el(root, "rect", {x: 0, y: y - gap / 2, width, height: gap, fill: "transparent"}), () => [r.name, ...(n ? [`${short(mean)} ± ${short(std)} over ${n} seed${n > 1 ? "s" : ""}`] : []), ...(r.published !== null ? [`published ${short(r.published)}`] : [])].join("\n"));
    });
    legend(body, ["seeds, mean, standard deviation", ...(spec.rows.some(r => r.published !== null) ? ["published"] : [])]);
  },
  scatter(body, spec, width, state) {
    const pick = (label, names, key) => {
      const row = html(body, "div", undefined, {class: "choices"}); html(row, "span", label);
      for (const name of names) { const b = html(row, "button", name, {"aria-pressed": String(state[key] === name)}); b.onclick = () => { state[key] = name; state.redraw(); }; }
    };
    state.view ??= Object.keys(spec.views).at(-1); state.by ??= Object.keys(spec.colours)[0];
    pick("map", Object.keys(spec.views), "view"); pick("colour", Object.keys(spec.colours), "by");
    const points = spec.views[state.view], by = spec.colours[state.by], [x0, x1] = bounds(points.map(p => p[0])), [y0, y1] = bounds(points.map(p => p[1]));
    const height = Math.max(280, Math.min(620, width * .62)), root = svg(body, width, height, spec.title), r = points.length > 1500 ? 2.4 : points.length > 500 ? 3 : 4;
    const X = v => 10 + (v - x0) / (x1 - x0 || 1) * (width - 20), Y = v => height - 10 - (v - y0) / (y1 - y0 || 1) * (height - 20), [lo, hi] = by.type === "shade" ? bounds(by.values) : [0, 1];
    points.forEach((p, i) => {
      const v = by.values[i], fill = by.type === "shade" ? shade((v - lo) / (hi - lo || 1)) : v < 0 ? "var(--line)" : colour(v);
      const dot = el(root, "circle", {class: "shape", cx: X(p[0]).toFixed(1), cy: Y(p[1]).toFixed(1), r, style: `fill:${fill}`, "fill-opacity": .85});
      watch(dot, () => spec.hover[i]);
    });
    if (by.type === "shade") html(body, "div", `${by.label}: pale ${short(lo)}, strong ${short(hi)}`, {class: "legend"});
    else { const seen = [...new Set(by.values)].filter(v => v >= 0).sort((a, b) => a - b); if (seen.length <= 24) legend(body, seen.map(v => by.names[v] || String(v)), i => colour(seen[i])); }
  },
  table(body, spec) {
    const box = html(body, "div", undefined, {class: "scroll"}), t = html(box, "table"), head = html(html(t, "thead"), "tr"), rows = html(t, "tbody");
    for (const c of spec.columns) html(head, "th", c);
    for (const r of spec.rows) { const tr = html(rows, "tr"); r.forEach((cell, i) => html(tr, "td", cell, i === spec.bold ? {class: "bold"} : {})); }
  },
};
function standalone(root) {
  const copy = root.cloneNode(true), style = getComputedStyle(document.documentElement), [, , w, h] = root.getAttribute("viewBox").split(" ");
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg"); copy.setAttribute("width", w); copy.setAttribute("height", h);
  // Colours are variables of the page; a file of its own needs the values.
  const originals = root.querySelectorAll("*");
  copy.querySelectorAll("*").forEach((node, i) => {
    const seen = getComputedStyle(originals[i]);
    for (const name of ["fill", "stroke", "stroke-dasharray", "font-size", "font-family", "display"]) node.style.setProperty(name, seen.getPropertyValue(name));
  });
  copy.style.background = style.getPropertyValue("--card");
  return [new XMLSerializer().serializeToString(copy), +w, +h];
}
function download(name, url) { const a = document.createElement("a"); a.href = url; a.download = name; a.click(); }
function save(root, name, kind) {
  const [text, w, h] = standalone(root), url = URL.createObjectURL(new Blob([text], {type: "image/svg+xml"}));
  if (kind === "svg") { download(name + ".svg", url); return; }
  const image = new Image();
  image.onload = () => { const c = document.createElement("canvas"); c.width = 3 * w; c.height = 3 * h; c.getContext("2d").drawImage(image, 0, 0, 3 * w, 3 * h); download(name + ".png", c.toDataURL("image/png")); };
  image.src = url;
}
const isWide = spec => spec.kind === "scatter" || (spec.kind === "table" && spec.columns.length > 3);
function card(grid, spec, alone) {
  const wide = isWide(spec) || alone;
  const figure = html(grid, "figure", undefined, {class: "card" + (wide ? " wide" : ""), "data-kind": spec.kind}), head = html(figure, "div", undefined, {class: "head"});
  html(head, "h3", spec.title);
  const body = document.createElement("div"), state = {};
  body.className = "plot";
  if (spec.kind !== "table") {
    const box = html(head, "div", undefined, {class: "save"}), name = spec.title.toLowerCase().replace(/[^a-z0-9]+/g, "-");
    for (const kind of ["svg", "png"]) html(box, "button", kind, {title: `save this chart as ${kind}`}).onclick = () => save(body.querySelector("svg"), name, kind);
  }
  if (spec.note) html(figure, "p", spec.note, {class: "note"});
  figure.appendChild(body);
  let drawn = 0;
  state.redraw = () => { drawn = Math.max(260, Math.floor(body.clientWidth)); body.replaceChildren(); draw[spec.kind](body, spec, drawn, state); };
  state.redraw();
  if (spec.kind !== "table") new ResizeObserver(() => { if (Math.abs(Math.floor(body.clientWidth) - drawn) > 4 && body.clientWidth > 0) requestAnimationFrame(state.redraw); }).observe(body);
}
$("title").textContent = DATA.title;
$("about").textContent = DATA.about;
if (DATA.verdict.length) for (const text of DATA.verdict) html($("verdict"), "li", text); else $("verdict").remove();
for (const [value, label] of DATA.facts) { const box = html($("facts"), "div"); html(box, "b", value); html(box, "span", label); }
DATA.sections.forEach((s, i) => {
  html($("contents"), "a", s.title, {href: `#s${i}`});
  const part = html($("sections"), "section", undefined, {id: `s${i}`});
  html(part, "h2", s.title);
  if (s.note) html(part, "p", s.note, {class: "note"});
  const grid = html(part, "div", undefined, {class: "grid"});
  let row = 0;
  s.charts.forEach((spec, j) => {
    // A narrow card with nothing to stand beside takes the whole row.
    const next = s.charts[j + 1], alone = !isWide(spec) && row === 0 && (!next || isWide(next));
    card(grid, spec, alone);
    row = isWide(spec) || alone ? 0 : 1 - row;
  });
});
document.body.dataset.ready = "yes";
