"use strict";
(() => {
  const EVERY_MS = 2000;
  const TIERS = ["device", "tail", "host", "ssd", "peer", "computed"];
  const STAGES = ["read", "place", "prefill", "hand-off", "decode"];
  const SVG = "http://www.w3.org/2000/svg";
  const at = (id) => document.getElementById(id);

  // Everything that is shown goes through here: text is text, whatever is in it.
  const make = (tag, text, name) => {
    const node = document.createElement(tag);
    if (text !== undefined && text !== null) node.textContent = String(text);
    if (name) node.className = name;
    return node;
  };
  const shape = (tag, attributes, text) => {
    const node = document.createElementNS(SVG, tag);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, String(value));
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const rows = (id, list, cells, nothing) => {
    const lines = list.map((one) => {
      const line = make("tr");
      line.append(...cells(one));
      return line;
    });
    if (!lines.length) {
      const cell = make("td", nothing, "count");
      cell.colSpan = 9;
      const line = make("tr");
      line.append(cell);
      lines.push(line);
    }
    at(id).replaceChildren(...lines);
  };
  const number = (value) => make("td", value, "n");
  const place = (text, size) => shape("svg", { viewBox: "0 0 " + size, role: "img", "aria-label": text });

  const change = async (path, method, words) => {
    const headers = { "x-epdserve-admin": "console" };
    if (at("key").value) headers.authorization = "Bearer " + at("key").value;
    try {
      const answer = await fetch(path, { method, headers });
      const body = await answer.json();
      at("said").className = answer.ok ? "fine" : "";
      at("said").textContent = answer.ok ? words : (body.error && body.error.message) || "status " + answer.status;
    } catch (error) {
      at("said").className = "";
      at("said").textContent = String(error);
    }
    look();
  };

  const worker = (one) => {
    const drains = one.state === "draining";
    const used = one.total_pages - one.free_pages;
    const pages = make("td");
    const bar = make("progress");
    bar.max = one.total_pages || 1;
    bar.value = used;
    pages.append(bar, make("span", " " + used + " / " + one.total_pages));
    const doing = make("td");
    const button = make("button", drains ? "Undrain" : "Drain");
    button.type = "button";
    button.setAttribute("aria-label", button.textContent + " " + one.worker);
    button.addEventListener("click", () => {
      const path = "/admin/workers/" + encodeURIComponent(one.worker) + "/drain";
      const words = one.worker + (drains ? " takes work again" : " takes no new work");
      change(path, drains ? "DELETE" : "POST", words);
    });
    doing.append(button);
    return [
      make("td", one.worker), make("td", one.state, one.state === "ready" ? "good" : "warn"), doing,
      number(one.running), number(one.queued_tokens), pages, number(one.step_age_s.toFixed(2)),
      make("td", one.machine),
    ];
  };

  const inside = (one) => [
    make("td", one.request, "id"), make("td", one.stage), number(one.age_s.toFixed(1)), number(one.tokens),
    number(one.cached), make("td", one.prefill), make("td", one.decode), number(one.moves), make("td", one.tenant),
  ];

  const failure = (one) => [
    make("td", new Date(one.at * 1000).toLocaleTimeString()), make("td", one.code, "bad"),
    make("td", one.message, "text"), make("td", one.worker), make("td", one.path), make("td", one.request, "id"),
  ];

  const stages = (list) => {
    const counts = STAGES.map((name) => [name, list.filter((one) => one.stage === name).length]);
    at("stages").replaceChildren(...counts.map(([name, count]) => make("span", name + ": " + count)));
  };

  // Shares of each interval as stacked bars; an interval without prompts is empty.
  const tiers = (samples) => {
    const picture = place("KV by tier over time", "480 160");
    const steps = samples.slice(1).map((sample, index) => {
      const before = samples[index].tokens;
      return TIERS.map((name) => Math.max(0, (sample.tokens[name] || 0) - (before[name] || 0)));
    });
    const width = 440 / Math.max(1, steps.length);
    steps.forEach((step, index) => {
      const total = step.reduce((sum, value) => sum + value, 0);
      let top = 130;
      step.forEach((value, tier) => {
        if (!total || !value) return;
        const height = (120 * value) / total;
        top -= height;
        const x = 36 + index * width;
        picture.append(shape("rect", { x, y: top, width: Math.max(0.5, width), height, class: "t-" + TIERS[tier] }));
      });
    });
    picture.append(shape("line", { x1: 36, x2: 476, y1: 130, y2: 130, class: "axis" }));
    picture.append(shape("text", { x: 30, y: 16, "text-anchor": "end" }, "100%"));
    picture.append(shape("text", { x: 30, y: 133, "text-anchor": "end" }, "0"));
    const span = samples.length > 1 ? samples[samples.length - 1].at - samples[0].at : 0;
    picture.append(shape("text", { x: 36, y: 148 }, (span / 60).toFixed(1) + " min ago"));
    picture.append(shape("text", { x: 476, y: 148, "text-anchor": "end" }, "now"));
    at("tiers").replaceChildren(picture);
    const latest = samples.length ? samples[samples.length - 1].tokens : {};
    at("tier-legend").replaceChildren(...TIERS.map((name) => {
      const chip = make("span");
      chip.append(make("span", "", "dot b-" + name), name + " " + Math.round(latest[name] || 0));
      return chip;
    }));
  };

  const efforts = (told) => {
    const picture = place("Requests by effort", "480 160");
    const most = Math.max(1, ...told.asked, ...told.granted);
    told.asked.forEach((asked, step) => {
      const x = 36 + step * 44;
      const tall = (count) => (112 * count) / most;
      const full = tall(told.granted[step]);
      picture.append(shape("rect", { x: x + 4, y: 130 - full, width: 34, height: full, class: "granted" }));
      picture.append(shape("rect", { x: x + 2, y: 130 - tall(asked), width: 38, height: tall(asked), class: "asked" }));
      picture.append(shape("text", { x: x + 21, y: 145, "text-anchor": "middle" }, step * 10 + 1 + "-" + (step + 1) * 10));
    });
    picture.append(shape("line", { x1: 36, x2: 476, y1: 130, y2: 130, class: "axis" }));
    picture.append(shape("text", { x: 30, y: 20, "text-anchor": "end" }, String(most)));
    at("efforts").replaceChildren(picture);
  };

  const show = (told) => {
    at("what").textContent = told.model + ", " + told.router + ", version " + told.version;
    const ready = told.workers.filter((one) => one.state === "ready").length;
    at("state").textContent = told.draining ? "router draining" : ready + " of " + told.workers.length + " workers ready";
    at("state").className = "state " + (told.draining || ready < told.workers.length ? "warn" : "good");
    at("router-drain").textContent = told.draining ? "Undrain router" : "Drain router";
    at("router-drain").dataset.draining = told.draining ? "yes" : "";
    at("worker-count").textContent = told.workers.length;
    rows("workers", told.workers, worker, "no worker is alive");
    at("inside-count").textContent = told.inside_count;
    stages(told.inside);
    rows("inside", told.inside, inside, "nothing is being answered");
    at("error-count").textContent = told.errors.length;
    rows("errors", told.errors, failure, "none");
    tiers(told.tiers);
    efforts(told.efforts);
  };

  let looking = false;
  const look = async () => {
    if (looking) return;
    looking = true;
    try {
      const answer = await fetch("/admin/present", { cache: "no-store" });
      if (!answer.ok) throw new Error("status " + answer.status);
      show(await answer.json());
    } catch (error) {
      at("state").className = "state bad";
      at("state").textContent = "no answer: " + error.message;
    }
    looking = false;
  };

  at("keys").addEventListener("submit", (event) => event.preventDefault());
  at("router-drain").addEventListener("click", () => {
    const drains = at("router-drain").dataset.draining === "yes";
    const words = drains ? "the router takes requests again" : "the router takes no new requests";
    change("/admin/drain", drains ? "DELETE" : "POST", words);
  });
  look();
  setInterval(look, EVERY_MS);
})();
