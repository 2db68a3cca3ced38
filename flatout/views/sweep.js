// A sweep's page in its frame: as high as its content, and loaded again when the sweep has written a newer one.
"use strict";
(() => {
  const frame = document.querySelector("iframe.sweep"), live = document.getElementById("live");
  let written = null;
  const fit = () => {
    const page = frame.contentDocument;
    if (!page?.body) return;
    page.querySelector(".brand")?.remove(); // the page around it has one
    page.body.querySelectorAll("header, main").forEach((part) => { part.style.maxWidth = "1380px"; }); // as wide as the page around it
    frame.style.height = "0";
    frame.style.height = page.documentElement.scrollHeight + "px";
  };
  const look = async () => {
    try {
      const now = (await fetch(frame.src, { method: "HEAD" })).headers.get("last-modified");
      if (written !== null && now !== written) frame.contentWindow.location.reload();
      written = now;
      live.textContent = "live";
    } catch { live.textContent = "no connection"; }
    setTimeout(look, 3000);
  };
  frame.onload = fit;
  addEventListener("resize", fit);
  fit();
  look();
})();
