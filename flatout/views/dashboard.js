// The front page of the dashboard: the table of runs, the curves of the chosen ones, and the machine, kept up to date.
"use strict";
(() => {
  const { byId, digits, short, percent, clock, lines, gauges } = flatoutCharts;
  const runs = new Map(), curves = new Map(), stale = new Set();
  const COLORS = 8;
  const figure = (show) => (v) => v === null ? "–" : show(v);
  const age = (s) => s < 90 ? `${digits(Math.max(0, s), 0)} s` : s < 5400 ? `${digits(s / 60, 0)} min` : s < 172800 ? `${digits(s / 3600, 0)} h` : `${digits(s / 86400, 0)} d`;
  const columns = [
    { key: "name", title: "run" },
    { key: "env", title: "env", wide: true },
    { key: "algo", title: "algo", wide: true },
    { key: "status", title: "status" },
    { key: "env_steps", title: "env steps", number: true, wide: true, show: figure(short) },
    { key: "return_mean", title: "return", number: true, show: figure((v) => Math.abs(v) >= 1 && Math.abs(v) < 1e3 ? v.toFixed(1) : short(v)) },
    { key: "steps_per_second", title: "steps/s", number: true, wide: true, show: figure(short) },
    { key: "learner_busy", title: "learner busy", number: true, wide: true, show: figure(percent) },
    { key: "card_busy", title: "card busy", number: true, wide: true, show: figure(percent) },
    { key: "time", title: "age", number: true, show: (t) => age(Date.now() / 1000 - t) },
  ];
  let version = 0, sort = { key: "time", down: true }, byTime = false, kept = null;
  try { kept = JSON.parse(sessionStorage.getItem("chosen")); } catch { kept = null; }
  const chosen = new Set(kept ?? []);
  const keep = () => sessionStorage.setItem("chosen", JSON.stringify([...chosen]));

  const element = (tag, text, attributes = {}) => {
    const node = document.createElement(tag);
    if (text !== undefined) node.textContent = text;
    for (const key in attributes) node.setAttribute(key, attributes[key]);
    return node;
  };
  const address = (name, kind = "run") => `/${kind}/` + name.split("/").map(encodeURIComponent).join("/");
  const dot = (nth) => { const node = element("i", "", { class: "dot" }); if (nth >= 0) node.style.background = `var(--c${nth % COLORS})`; return node; };

  // The table.
  const shown = () => {
    const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean), status = byId("status").value;
    const fits = (row) => (!status || row.status === status) && words.every((w) => `${row.name} ${row.env} ${row.algo} ${row.status}`.toLowerCase().includes(w));
    const order = (a, b) => {
      const x = a[sort.key], y = b[sort.key];
      if (x === null || y === null) return (x === null) - (y === null); // unknown values last
      const less = typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y;
      return (sort.down ? -less : less) || a.name.localeCompare(b.name, "en", { numeric: true });
    };
    return [...runs.values()].filter(fits).sort(order);
  };
  const hasCard = () => [...runs.values()].some((run) => run.card_busy !== null);
  const head = () => {
    const row = element("tr");
    row.append(element("th"));
    for (const column of columns) {
      if (column.key === "card_busy" && !hasCard()) continue;
      const cell = element("th", column.title, { class: `${column.number ? "number" : ""} ${column.wide ? "wide-only" : ""}` });
      const down = sort.down !== (column.key === "time"); // the newest run has the least age
      if (sort.key === column.key) { cell.setAttribute("aria-sort", down ? "descending" : "ascending"); cell.textContent += down ? " ↓" : " ↑"; }
      cell.onclick = () => { sort = { key: column.key, down: sort.key === column.key ? !sort.down : Boolean(column.number) }; table(); };
      row.append(cell);
    }
    document.querySelector("#runs thead").replaceChildren(row);
  };
  const line = (run, card) => {
    const row = element("tr"), box = element("input", undefined, { type: "checkbox", "aria-label": `choose ${run.name}` }), first = element("td");
    box.checked = chosen.has(run.name);
    box.onchange = () => { if (box.checked) chosen.add(run.name); else chosen.delete(run.name); keep(); table(); refresh(); };
    first.append(box);
    row.append(first);
    for (const column of columns) {
      if (column.key === "card_busy" && !card) continue;
      const cell = element("td", undefined, { class: `c-${column.key} ${column.number ? "number" : ""} ${column.wide ? "wide-only" : ""}` });
      if (column.key === "name") { const link = element("a", run.name, { href: address(run.name), title: run.name }); cell.append(link); }
      else if (column.key === "status") cell.append(element("span", run.status, { class: `status ${/^[a-z]+$/.test(run.status) ? run.status : ""}` }));
      else cell.textContent = column.show ? column.show(run[column.key]) : run[column.key];
      row.append(cell);
    }
    return row;
  };
  const table = () => {
    head();
    const rows = shown(), card = hasCard();
    document.querySelector("#runs tbody").replaceChildren(...rows.map((run) => line(run, card)));
    const running = [...runs.values()].filter((run) => run.status === "running").length;
    byId("counts").textContent = `· ${runs.size} ${runs.size === 1 ? "run" : "runs"}, ${running} running`;
    byId("empty").hidden = rows.length > 0;
    byId("compare").hidden = runs.size === 0;
    byId("empty").textContent = runs.size ? "No run fits the filter." : "There are no runs here yet: flatout train CartPole-v1 makes one.";
    const statuses = [...new Set([...runs.values()].map((run) => run.status))].sort(), select = byId("status"), now = select.value;
    if (select.options.length !== statuses.length + 1) {
      select.replaceChildren(element("option", "any status", { value: "" }), ...statuses.map((it) => element("option", it, { value: it })));
      select.value = statuses.includes(now) ? now : "";
    }
  };

  // The curves.
  const at = (xs, ys, x) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) { const middle = (low + high) >> 1; if (xs[middle] <= x) low = middle; else high = middle; }
    return xs[high] === xs[low] ? ys[low] : ys[low] + (ys[high] - ys[low]) * Math.min(1, Math.max(0, (x - xs[low]) / (xs[high] - xs[low])));
  };
  const axis = (curve) => byTime ? curve.seconds : curve.steps;
  const mean = (members) => {
    const drawn = members.map((name) => curves.get(name)).filter((curve) => curve && curve.return.length);
    const from = Math.max(...drawn.map((c) => axis(c)[0])), to = Math.min(...drawn.map((c) => axis(c).at(-1))), n = 160;
    const x = drawn.length && to > from ? Array.from({ length: n }, (_, i) => from + (to - from) * i / (n - 1)) : [];
    const y = [], band = [];
    for (const place of x) {
      const values = drawn.map((c) => at(axis(c), c.return, place)), middle = values.reduce((a, b) => a + b, 0) / values.length;
      const spread = Math.sqrt(values.reduce((a, b) => a + (b - middle) ** 2, 0) / values.length);
      y.push(middle);
      band.push([place, middle - spread, middle + spread]);
    }
    return { x, y, band };
  };
  const overlay = () => {
    const names = [...chosen].filter((name) => runs.has(name)).sort(), series = [];
    if (byId("grouped").checked) {
      const groups = Map.groupBy(names, (name) => runs.get(name).group);
      for (const members of groups.values()) {
        if (members.length === 1) series.push({ name: members[0], x: axis(curves.get(members[0]) ?? { steps: [], seconds: [] }), y: curves.get(members[0])?.return ?? [] });
        else series.push({ name: `${runs.get(members[0]).env} ${runs.get(members[0]).algo}, ${members.length} seeds (${members[0]} …)`, ...mean(members) });
      }
    } else for (const name of names) { const curve = curves.get(name); series.push({ name, x: curve ? axis(curve) : [], y: curve?.return ?? [] }); }
    series.forEach((s, nth) => { s.color = `--c${nth % COLORS}`; });
    const comes = names.length && !names.some((name) => curves.has(name)); // the empty chart keeps its place
    if (!comes) lines(byId("overlay"), series, { x: byTime ? clock : short, y: short, empty: names.length ? "No episode of these runs has ended yet." : "Choose runs in the table to compare them." });
    byId("key").replaceChildren(...series.map((s, nth) => { const node = element("span"); node.append(dot(nth), s.name); return node; }));
    byId("by-time").setAttribute("aria-pressed", byTime);
    byId("by-steps").setAttribute("aria-pressed", !byTime);
  };
  let fetching = false;
  const refresh = async () => {
    overlay();
    const needed = [...chosen].filter((name) => runs.has(name) && (!curves.has(name) || stale.has(name))).slice(0, 50);
    if (!needed.length || fetching) return;
    fetching = true;
    try {
      needed.forEach((name) => stale.delete(name));
      const answer = await fetch("/api/curves?" + needed.map((name) => "run=" + encodeURIComponent(name)).join("&"));
      for (const [name, curve] of Object.entries(await answer.json())) curves.set(name, curve);
      overlay();
    } finally { fetching = false; }
    if (needed.length === 50) refresh();
  };

  const sweeps = (names) => {
    byId("sweeps").hidden = !names.length;
    byId("sweep-names").replaceChildren(...names.map((name) => element("a", name, { href: address(name, "sweep") })));
  };

  // Changes from the server. A hidden page closes its stream: a browser has six connections for a server.
  let stream = null;
  const listen = () => {
    if (stream || document.hidden) return;
    stream = new EventSource("/events?since=" + version);
    stream.onopen = () => { byId("live").textContent = "live"; };
    stream.onerror = () => { byId("live").textContent = "no connection"; if (stream.readyState === EventSource.CLOSED) { stream = null; setTimeout(load, 3000); } };
    stream.onmessage = (event) => {
      const news = JSON.parse(event.data);
      for (const row of news.rows) { runs.set(row.name, row); stale.add(row.name); }
      for (const name of news.gone) { runs.delete(name); curves.delete(name); }
      gauges(news.machine);
      sweeps(news.sweeps);
      if (news.rows.length || news.gone.length) table();
      if (news.rows.some((row) => chosen.has(row.name)) || news.gone.length) refresh();
    };
  };
  const load = async () => {
    try {
      const answer = await fetch("/api/runs");
      if (!answer.ok) throw new Error(await answer.text());
      const known = await answer.json();
      version = known.version;
      runs.clear();
      for (const row of known.rows) { runs.set(row.name, row); stale.add(row.name); }
      sweeps(known.sweeps);
      if (kept === null) { // at first, the newest runs, and no trials of sweeps if there are others
        const all = [...runs.values()].filter((run) => run.return_mean !== null).sort((a, b) => b.time - a.time);
        const own = all.filter((run) => !known.sweeps.some((sweep) => run.name.startsWith(sweep + "/"))), newest = own.length ? own : all;
        newest.filter((run) => run.env === newest[0].env).slice(0, 6).forEach((run) => chosen.add(run.name)); // returns of other envs are on another scale
        kept = [];
      }
      table();
      refresh();
      listen();
    } catch (error) {
      byId("live").textContent = "no connection";
      setTimeout(load, 3000);
    }
  };
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) { stream?.close(); stream = null; } else load();
  });
  byId("filter").oninput = byId("status").onchange = table;
  byId("none").onclick = () => { chosen.clear(); keep(); table(); overlay(); };
  byId("grouped").onchange = overlay;
  byId("by-time").onclick = () => { byTime = true; overlay(); };
  byId("by-steps").onclick = () => { byTime = false; overlay(); };
  let waiting = 0;
  addEventListener("resize", () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(overlay); });
  load();
})();
