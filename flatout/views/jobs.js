// The page of the queue of jobs, read again every two seconds.
"use strict";
(() => {
  const { byId, short, percent } = flatoutCharts;
  const cell = (tag, text, kind = "") => { const node = document.createElement(tag); node.textContent = text; node.className = kind; return node; };
  const known = (value, show) => value === null ? "" : show(value);
  const row = (job) => {
    const node = document.createElement("tr"), name = cell("td", ""), link = cell("a", job.name), state = cell("td", "");
    link.href = "/run/" + encodeURIComponent(job.name);
    name.append(job.env_steps === null ? job.name : link);
    state.append(cell("span", job.state, `status ${/^[a-z]+$/.test(job.state) ? job.state : ""}`));
    const share = job.state === "finished" ? 1 : job.total_steps ? (job.env_steps ?? 0) / job.total_steps : 0;
    node.append(name, cell("td", job.env, "wide-only"), state, cell("td", percent(share), "number"), cell("td", known(job.env_steps, short), "number wide-only"),
      cell("td", known(job.return_mean, short), "number"), cell("td", known(job.steps_per_second, short), "number wide-only"));
    if (!job.error) return [node];
    const below = document.createElement("tr"), problem = cell("td", job.error, "problem");
    problem.colSpan = node.children.length;
    below.append(problem);
    return [node, below];
  };
  const load = async () => {
    if (!document.hidden) {
      try {
        const jobs = await (await fetch("/api/jobs")).json(), head = document.createElement("tr");
        const kinds = { job: "", env: "wide-only", state: "", done: "number", "env steps": "number wide-only", return: "number", "steps/s": "number wide-only" };
        for (const title in kinds) head.append(cell("th", title, kinds[title]));
        byId("jobs").replaceChildren(...(jobs.length ? [head, ...jobs.flatMap(row)] : []));
        byId("empty").hidden = jobs.length > 0;
        byId("live").textContent = "live";
      } catch { byId("live").textContent = "no connection"; }
    }
    setTimeout(load, 2000);
  };
  load();
})();
