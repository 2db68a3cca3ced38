// A run's page in the dashboard: brings it up to date while the run trains, and has buttons that stop and resume it.
"use strict";
(() => {
  const { byId, gauges } = flatoutCharts;
  const name = byId("acts").dataset.run, live = byId("live");
  const address = "/api/run/" + name.split("/").map(encodeURIComponent).join("/");
  const places = { status: "status", identity: "identity", verdict: "verdict", tiles: "tiles", idle: "idle", findings: "findings-part", missing: "missing-part", figures: "figures", recording: "recording" };
  const shown = {};
  let busy = false, again = false, last = 0, due = 0, state = "";
  const buttons = (status) => {
    if (state && status !== state) live.textContent = "live"; // it has stopped, or runs again
    state = status;
    if (!byId("stop")) return;
    byId("stop").hidden = status !== "running";
    byId("resume").hidden = !["stopped", "failed", "killed"].includes(status);
  };
  const update = async () => {
    if (busy) { again = true; return; }
    busy = true;
    again = false;
    try {
      const answer = await fetch(address);
      if (!answer.ok) throw new Error(await answer.text());
      const now = await answer.json();
      // The server has escaped everything in these texts.
      for (const part in places) {
        if (shown[part] !== now.parts[part]) byId(places[part]).innerHTML = shown[part] = now.parts[part]; // else a GIF would begin again
      }
      flatoutPage.update(now.data);
      buttons(now.status);
    } catch (error) { live.textContent = String(error.message ?? error); }
    busy = false;
    if (again) setTimeout(update, 1000);
  };
  let stream = null;
  const listen = () => {
    if (stream || document.hidden) return;
    stream = new EventSource("/events");
    stream.onopen = () => { live.textContent = "live"; };
    stream.onerror = () => { live.textContent = "no connection"; };
    stream.onmessage = (event) => {
      const news = JSON.parse(event.data), row = news.rows.find((it) => it.name === name);
      if (byId("status").textContent.trim() === "running") gauges(news.machine); else byId("gauges").replaceChildren();
      if (news.gone.includes(name)) live.textContent = "the run's folder is gone";
      if (!row) return;
      buttons(row.status);
      clearTimeout(due); // the last change is never left out
      due = setTimeout(() => { last = Date.now(); update(); }, Math.max(0, last + 1500 - Date.now()));
    };
  };
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) { stream?.close(); stream = null; } else { listen(); update(); }
  });
  for (const verb of ["stop", "resume"]) {
    const button = byId(verb);
    if (button) button.onclick = async () => {
      button.disabled = true;
      live.textContent = verb === "stop" ? "stopping: it saves first" : "resuming";
      try {
        const answer = await fetch("/api/" + verb, { method: "POST", body: JSON.stringify({ run: name }) });
        live.textContent = answer.ok ? (await answer.json()).done : await answer.text();
      } finally { button.disabled = false; }
    };
  }
  buttons(byId("status").textContent.trim());
  listen();
})();
