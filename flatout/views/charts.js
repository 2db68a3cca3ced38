// Figures as people read them, and line charts as SVG. No libraries, no network.
"use strict";
const flatoutCharts = (() => {
  const byId = (id) => document.getElementById(id);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const clamp = (v, low, high) => Math.min(high, Math.max(low, v));

  // Figures as people read them.
  const digits = (v, n) => v.toLocaleString("en", { maximumFractionDigits: n });
  const short = (v) => Math.abs(v) >= 1e6 ? digits(v / 1e6, 2) + " M" : Math.abs(v) >= 1e4 ? digits(v / 1e3, 1) + " k"
    : digits(v, Math.abs(v) >= 100 ? 0 : Math.abs(v) >= 1 ? 1 : 3);
  const percent = (v) => digits(100 * v, 0) + " %";
  const span = (s) => s >= 1 ? digits(s, 2) + " s" : s >= 1e-3 ? digits(1e3 * s, s >= 0.1 ? 0 : 2) + " ms" : digits(1e6 * s, 0) + " µs";
  // A time on an axis whose ticks are `step` apart.
  const clock = (s, step = 1) => {
    if (step < 1) return step < 1e-3 ? digits(1e3 * s, 3) + " ms" : digits(s, Math.min(4, Math.ceil(-Math.log10(step)))) + " s";
    const minutes = Math.floor(Math.round(s) / 60), rest = String(Math.round(s) % 60).padStart(2, "0");
    if (s < 60) return digits(s, 0) + " s";
    return minutes < 60 ? `${minutes}:${rest}` : `${Math.floor(minutes / 60)}:${String(minutes % 60).padStart(2, "0")}:${rest}`;
  };
  const ticks = (low, high, count) => {
    const rough = (high - low) / Math.max(1, count) || 1, power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((m) => m * power >= rough * 0.999);
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-6; i++) found.push(i * step || 0);
    return { step, found };
  };

  const tip = byId("tip");
  const showTip = (event, text) => {
    tip.textContent = text;
    tip.hidden = !text;
    const box = tip.getBoundingClientRect();
    tip.style.left = clamp(event.clientX + 14, 4, innerWidth - box.width - 8) + "px";
    tip.style.top = clamp(event.clientY + 14, 4, innerHeight - box.height - 8) + "px";
  };
  const hideTip = () => { tip.hidden = true; };

  // Line charts, as SVG.
  const draw = (tag, attributes, parent, text) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    // A style is set as a property: a content security policy forbids the attribute.
    for (const key in attributes) if (key === "style") node.style.cssText = attributes[key]; else node.setAttribute(key, attributes[key]);
    if (text !== undefined) node.textContent = text;
    return parent.appendChild(node);
  };
  const say = (figure, text) => {
    const note = document.createElement("p");
    note.className = "none";
    note.textContent = text;
    figure.replaceChildren(note);
    figure.style.height = "auto";
  };
  const lines = (figure, series, { x: showX, y: showY, low, high, key: named, empty }) => {
    series = series.map((s) => ({ ...s, points: s.x.map((x, i) => [x, s.y[i]]).filter((p) => p[0] !== null && p[1] !== null && p[1] !== undefined) }));
    series = series.filter((s) => s.points.length);
    if (!series.length) return say(figure, empty);
    figure.style.height = "";
    const width = figure.clientWidth, height = figure.clientHeight, left = 52, bottom = 24, top = named ? 24 : 8, right = 10;
    // Not Math.max(...all): a call takes no hundred thousand arguments.
    const least = (values) => values.reduce((a, b) => Math.min(a, b), Infinity), most = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);
    const all = series.flatMap((s) => s.points), ys = [...all.map((p) => p[1]), ...series.flatMap((s) => s.band ? s.band.flatMap((p) => [p[1], p[2]]) : [])];
    const x1 = most(all.map((p) => p[0])) || 1;
    let y0 = low ?? least(ys), y1 = high ?? most(ys);
    if (y0 === y1) { y0 -= Math.abs(y0) * 0.1 || 1; y1 += Math.abs(y1) * 0.1 || 1; }
    if (high === undefined) y1 += 0.05 * (y1 - y0);
    const px = (x) => left + (width - left - right) * x / x1, py = (y) => height - bottom - (height - bottom - top) * (y - y0) / (y1 - y0);
    figure.replaceChildren();
    const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" }, figure);
    for (const y of ticks(y0, y1, height / 48).found) {
      draw("line", { class: "grid", x1: left, x2: width - right, y1: py(y), y2: py(y) }, svg);
      draw("text", { x: left - 8, y: py(y) + 4, "text-anchor": "end" }, svg, showY(y));
    }
    const across = ticks(0, x1, width / 110);
    for (const x of across.found) draw("text", { x: px(x), y: height - 6, "text-anchor": px(x) > width - 24 ? "end" : "middle" }, svg, showX(x, across.step));
    draw("line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }, svg);
    let key = left;
    for (const s of series) {
      // The spread around a mean: [x, low, high] at each place.
      if (s.band) draw("path", { class: "band", d: "M" + [...s.band.map((p) => [p[0], p[2]]), ...s.band.map((p) => [p[0], p[1]]).reverse()].map(([x, y]) => `${px(x).toFixed(1)} ${py(y).toFixed(1)}`).join("L") + "Z", style: `fill: var(${s.color})` }, svg);
      if (s.dots || s.points.length === 1) for (const [x, y] of s.points) draw("circle", { cx: px(x), cy: py(y), r: 4, style: `fill: var(${s.color}); stroke: var(--card); stroke-width: 1.5` }, svg);
      else draw("path", { d: "M" + s.points.map(([x, y]) => `${px(x).toFixed(1)} ${py(y).toFixed(1)}`).join("L"), style: `stroke: var(${s.color})` }, svg);
      if (named) {
        draw("circle", { cx: key + 5, cy: 8, r: 5, style: `fill: var(${s.color})` }, svg);
        key += draw("text", { class: "key", x: key + 15, y: 12 }, svg, s.name).getComputedTextLength() + 32;
      }
    }
    const cross = draw("line", { class: "cross", y1: top, y2: height - bottom, visibility: "hidden" }, svg);
    figure.onpointermove = (event) => {
      const at = clamp((event.clientX - figure.getBoundingClientRect().left - left) / (width - left - right), 0, 1) * x1;
      const nearest = (s) => s.points.reduce((a, b) => Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a);
      cross.setAttribute("x1", px(at)); cross.setAttribute("x2", px(at)); cross.setAttribute("visibility", "visible");
      showTip(event, [showX(at, across.step / 10), ...series.map((s) => `${s.name}: ${showY(nearest(s)[1])}`)].join("\n"));
    };
    figure.onpointerleave = () => { cross.setAttribute("visibility", "hidden"); hideTip(); };
  };

  // The load of the machine, in #gauges.
  const gauges = (machine) => {
    const all = [["cores", machine.cores], ["memory", machine.memory], ...Object.entries(machine.cards).map(([name, card]) => [`GPU ${name}`, card.utilization])];
    byId("gauges").replaceChildren(...all.filter(([, v]) => typeof v === "number").map(([name, value]) => {
      const node = document.createElement("span"), bar = document.createElement("meter");
      node.className = "gauge";
      bar.value = value;
      node.append(name, bar, percent(value));
      return node;
    }));
  };

  return { byId, css, clamp, digits, short, percent, span, clock, ticks, showTip, hideTip, say, lines, gauges };
})();
