// Draws the charts of a run's page from the JSON in #data, and again when there is more of it.
"use strict";
(() => {
  const { byId, css, clamp, short, percent, span, clock, ticks, showTip, hideTip, say, lines } = flatoutCharts;
  let data = JSON.parse(byId("data").textContent);

  let byTime = false;
  const drawCurve = () => {
    const c = data.curve, axis = byTime ? c.seconds : c.steps;
    const evaluated = c.eval && c.eval.length ? { x: c.eval[byTime ? 1 : 0], y: c.eval[2] } : { x: [], y: [] };
    lines(byId("curve"), [
      { name: "return, mean of the last 100 episodes", color: "--accent", x: axis, y: c.return },
      { name: "evaluated", color: "--second", dots: true, ...evaluated },
    ], { x: byTime ? clock : short, y: short, key: true, empty: "No episode has ended yet: there is no return to show." });
    byId("by-time").setAttribute("aria-pressed", byTime);
    byId("by-steps").setAttribute("aria-pressed", !byTime);
  };
  byId("by-time").onclick = () => { byTime = true; drawCurve(); };
  byId("by-steps").onclick = () => { byTime = false; drawCurve(); };

  const drawOverTime = () => {
    const t = data.time;
    lines(byId("rate"), [{ name: "steps/s", color: "--accent", x: t.t, y: t.rate }], { x: clock, y: short, low: 0, empty: "No steps are recorded." });
    lines(byId("busy"), [
      { name: "learner busy", color: "--accent", x: t.t, y: t.busy },
      { name: "device utilisation", color: "--second", x: t.t, y: t.gpu },
      { name: "cores in use", color: "--third", x: t.t, y: t.cores },
    ], { x: clock, y: percent, low: 0, high: 1, key: true, empty: "Neither spans nor samples are recorded." });
    byId("power-part").hidden = !t.power.length;
    if (t.power.length) lines(byId("power"), [{ name: "power of the card", color: "--second", x: t.t, y: t.power }], { x: clock, y: (v) => short(v) + " W", low: 0, empty: "" });
  };

  // The lanes, on a canvas: bins over the whole run, single spans where there is detail and room for it.
  let g = data.gantt;
  const gantt = byId("gantt"), canvas = gantt.querySelector("canvas"), pen = canvas.getContext("2d");
  const ROW = 30, GAP = 10, AXIS = 22;
  let view = [0, g.end], lit = null, selecting = null;
  const labelWidth = () => gantt.clientWidth < 560 ? 78 : 96;
  const timeAt = (x) => view[0] + (view[1] - view[0]) * (x - labelWidth()) / (gantt.clientWidth - labelWidth());
  const xAt = (t) => labelWidth() + (gantt.clientWidth - labelWidth()) * (t - view[0]) / (view[1] - view[0]);
  // A span is shown by itself once it is a pixel wide; below that the bins say more.
  const isWide = (micros) => micros / 1e6 / (view[1] - view[0]) * gantt.clientWidth >= 1;
  const partsOf = (lane, detail, i) => {
    const mixed = detail.mixed[i];
    if (!mixed) return [[detail.phase[i], detail.length[i] / 1e6]];
    return mixed.map((ms, k) => [lane.phases[k], ms / 1e3]).filter((part) => part[1] > 0);
  };
  const stack = (parts, total, x0, x1, y, colors) => {
    let bottom = y + ROW;
    for (const [phase, seconds] of parts) {
      const high = ROW * Math.min(1, seconds / total);
      pen.globalAlpha = lit === null || lit === phase ? 1 : 0.15;
      pen.fillStyle = colors[phase];
      pen.fillRect(x0, bottom - high, Math.max(0.7, x1 - x0), high);
      bottom -= high;
    }
    pen.globalAlpha = 1;
  };
  const drawBins = (lane, y, colors) => {
    const n = lane.bins[0].length, width = g.end / n;
    const first = clamp(Math.floor(view[0] / width), 0, n - 1), last = clamp(Math.ceil(view[1] / width), 1, n);
    for (let b = first; b < last; b++) {
      stack(lane.phases.map((phase, k) => [phase, lane.bins[k][b]]), 100, xAt(b * width), xAt((b + 1) * width) + 0.3, y, colors);
    }
  };
  const drawDetail = (lane, w, y, colors) => {
    const detail = lane.detail[w], begin = g.windows[w][0], ground = css("--card");
    for (let i = 0; i < detail.start.length; i++) {
      const start = begin + detail.start[i] / 1e6, end = start + detail.length[i] / 1e6;
      if (end < view[0] || start > view[1] || !isWide(detail.length[i])) continue;
      const x0 = xAt(start), x1 = xAt(end);
      pen.fillStyle = ground;
      pen.fillRect(x0, y, x1 - x0, ROW);
      stack(partsOf(lane, detail, i), end - start, x0, x1 - x0 > 4 ? x1 - 0.6 : x1, y, colors);
    }
  };
  const drawGantt = () => {
    if (!g.lanes.length) return;
    const ratio = devicePixelRatio || 1, width = gantt.clientWidth, height = g.lanes.length * (ROW + GAP) + AXIS;
    canvas.width = width * ratio; canvas.height = height * ratio; canvas.style.height = height + "px";
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.font = "12px system-ui, sans-serif"; pen.textBaseline = "middle";
    const colors = g.phases.map((phase) => css("--p-" + phase) || css("--p-other")), left = labelWidth();
    pen.save();
    pen.beginPath(); pen.rect(left, 0, width - left, height); pen.clip();
    const along = ticks(view[0], view[1], (width - left) / 100);
    for (const t of along.found) { pen.fillStyle = css("--faint"); pen.fillRect(xAt(t), 0, 1, height - AXIS + 4); }
    g.lanes.forEach((lane, row) => {
      drawBins(lane, row * (ROW + GAP), colors);
      g.windows.forEach((_, w) => drawDetail(lane, w, row * (ROW + GAP), colors));
    });
    if (selecting) {
      pen.fillStyle = css("--accent"); pen.globalAlpha = 0.25;
      pen.fillRect(Math.min(...selecting), 0, Math.abs(selecting[1] - selecting[0]), height - AXIS); pen.globalAlpha = 1;
    }
    pen.fillStyle = css("--soft");
    for (const t of along.found) { pen.textAlign = xAt(t) - left < 20 ? "left" : width - xAt(t) < 24 ? "right" : "center"; pen.fillText(clock(t, along.step), xAt(t), height - 9); }
    pen.restore();
    pen.fillStyle = css("--ink"); pen.textAlign = "left";
    g.lanes.forEach((lane, row) => pen.fillText(lane.name, 0, row * (ROW + GAP) + ROW / 2));
    [gantt.dataset.from, gantt.dataset.to] = view;
  };
  const look = (from, to) => {
    const length = clamp(to - from, Math.min(g.end, 2e-5), g.end);
    const start = clamp((from + to - length) / 2, 0, g.end - length);
    view = [start, start + length];
    drawGantt();
  };
  const zoom = (factor, at = (view[0] + view[1]) / 2) => look(at - (at - view[0]) * factor, at + (view[1] - at) * factor);
  const move = (share) => { const d = clamp(share * (view[1] - view[0]), -view[0], g.end - view[1]); look(view[0] + d, view[1] + d); };

  const describe = (lane, t) => {
    const name = (phase) => g.phases[phase];
    for (let w = 0; w < g.windows.length; w++) {
      const detail = lane.detail[w], at = (t - g.windows[w][0]) * 1e6;
      let i = detail.start.length - 1;
      while (i >= 0 && detail.start[i] > at) i--;
      if (i < 0 || at > detail.start[i] + detail.length[i] || !isWide(detail.length[i])) continue;
      const parts = partsOf(lane, detail, i).sort((a, b) => b[1] - a[1]).map((part) => `${name(part[0])} ${span(part[1])}`);
      return parts.length > 1 ? `in ${span(detail.length[i] / 1e6)}:\n${parts.join("\n")}` : parts[0];
    }
    const n = lane.bins[0].length, b = clamp(Math.floor(t / g.end * n), 0, n - 1);
    const parts = lane.phases.map((phase, k) => [phase, lane.bins[k][b]]).filter((part) => part[1] > 0).sort((a, b) => b[1] - a[1]);
    return parts.length ? `in ${span(g.end / n)}:\n` + parts.map((part) => `${name(part[0])} ${part[1]} %`).join("\n") : "nothing recorded";
  };
  const place = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
  const listenToGantt = () => {
    gantt.addEventListener("wheel", (event) => {
      const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
      const whole = view[1] - view[0] >= g.end * 0.9999;
      if (whole && (sideways || event.deltaY > 0)) return; // nothing further out: the page may scroll
      event.preventDefault();
      if (sideways) move((event.deltaX || event.deltaY) / 800);
      else zoom(Math.exp(clamp(event.deltaY, -150, 150) / 350), timeAt(place(event)[0]));
    }, { passive: false });
    gantt.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      const x = Math.max(labelWidth(), place(event)[0]);
      selecting = [x, x];
      gantt.setPointerCapture(event.pointerId);
    });
    gantt.addEventListener("pointermove", (event) => {
      if (!g.lanes.length) return;
      const [x, y] = place(event), lane = g.lanes[Math.floor(y / (ROW + GAP))];
      if (selecting) { selecting[1] = Math.max(labelWidth(), x); drawGantt(); }
      if (!lane || x < labelWidth()) return hideTip();
      showTip(event, `${lane.name} at ${clock(timeAt(x), (view[1] - view[0]) / 100)}\n${describe(lane, timeAt(x))}`);
    });
    const drop = (zooms) => {
      if (!selecting) return;
      const [from, to] = selecting.map(timeAt).sort((a, b) => a - b), far = Math.abs(selecting[1] - selecting[0]) > 5;
      selecting = null;
      if (zooms && far) look(from, to); else drawGantt();
    };
    gantt.addEventListener("pointerup", () => drop(true));
    gantt.addEventListener("pointercancel", () => drop(false));
    gantt.addEventListener("pointerleave", hideTip);
    gantt.addEventListener("dblclick", () => look(0, g.end));
    gantt.addEventListener("keydown", (event) => {
      const keys = { "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2), 0: () => look(0, g.end), Escape: () => look(0, g.end) };
      if (!keys[event.key] || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      keys[event.key]();
    });
    byId("gantt-reset").onclick = () => look(0, g.end);
  };
  const makeLegend = () => {
    byId("legend").replaceChildren();
    g.phases.forEach((phase, i) => {
      const button = document.createElement("button"), swatch = document.createElement("i");
      swatch.style.background = `var(--p-${phase}, var(--p-other))`;
      button.append(swatch, phase);
      button.setAttribute("aria-pressed", false);
      button.title = "show only this phase";
      button.onclick = () => {
        lit = lit === i ? null : i;
        [...byId("legend").children].forEach((other, k) => other.setAttribute("aria-pressed", lit === k));
        drawGantt();
      };
      byId("legend").append(button);
    });
  };
  const hint = byId("gantt-hint").textContent;
  const showGantt = () => {
    const empty = !g.lanes.length;
    if (empty) say(gantt, "No spans are recorded: there is no timeline to show.");
    else if (!canvas.isConnected) { gantt.replaceChildren(canvas); gantt.style.height = ""; }
    byId("gantt-reset").hidden = byId("gantt-hint").hidden = empty;
    byId("gantt-hint").textContent = g.left_out ? `${hint} ${g.left_out} more lanes are not shown.` : hint;
    makeLegend();
  };
  showGantt();
  listenToGantt();

  const drawAll = () => { drawCurve(); drawOverTime(); drawGantt(); };
  drawAll();
  // Shows newer data of the same run; a part of the timeline that was zoomed into stays.
  window.flatoutPage = {
    update(next) {
      const whole = view[1] - view[0] >= g.end * 0.999;
      data = next;
      g = data.gantt;
      if (whole) view = [0, g.end];
      showGantt();
      drawAll();
    },
  };
  let waiting = 0;
  addEventListener("resize", () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(drawAll); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawGantt);
})();
