/* Draws the figures of a page when they come into view, and connects them with its controls. */
(() => {
  "use strict";
  const store = JSON.parse(document.getElementById("figures").textContent);
  const root = document.documentElement;
  const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
  const views = new Map(); // name of a figure → what vegaEmbed returned
  const stale = new Set(); // names of drawn figures whose data or mode has changed since
  const near = new Set(); // places in or near the window
  const queue = new Set();
  const playing = new Map();
  const stood = new Map(); // name of a figure → where its slider stands
  const CANVAS_FROM = 3000; // values from which a canvas draws faster than an SVG
  const MARGIN = "800px";
  const idly = window.requestIdleCallback ?? ((work) => setTimeout(work, 100));
  const LOOKING = 3000; // a figure under a pointer that moved so many milliseconds ago waits
  let choice = recall();
  let systemDark = prefersDark.matches; // reading it again may swallow the event of its change
  let working = false;
  let smoothing = 0; // weight of what came before; 0 for none
  let settling = 0;
  let movedAt = -Infinity;
  let printing = false;

  function recall() {
    try { return localStorage.getItem("rankscope-mode") || "auto"; } catch { return "auto"; }
  }

  function remember(mode) {
    try { localStorage.setItem("rankscope-mode", mode); } catch { /* a page of a file may not store */ }
  }

  const mode = () => (printing ? "light" : choice === "auto" ? (systemDark ? "dark" : "light") : choice);

  /* Figures ------------------------------------------------------------------------------- */

  function rows(columns) {
    const names = Object.keys(columns);
    const length = names.length ? columns[names[0]].length : 0;
    return Array.from({ length }, (_, i) => Object.fromEntries(names.map((n) => [n, columns[n][i]])));
  }

  function namesOfData(spec) {
    const found = new Set();
    const visit = (node) => {
      if (Array.isArray(node)) node.forEach(visit);
      else if (node && typeof node === "object") {
        if (node.data && node.data.name in store.datasets) found.add(node.data.name);
        Object.values(node).forEach(visit);
      }
    };
    visit(spec);
    return [...found];
  }

  function numValues(names) {
    const columns = names.flatMap((name) => Object.values(store.datasets[name]));
    return columns.reduce((sum, column) => sum + (Array.isArray(column[0]) ? column.flat().length : column.length), 0);
  }

  /* Smoothing ----------------------------------------------------------------------------- */

  const SETTLES = 150; // milliseconds after the slider's last move
  const isCurve = ({ mark, encoding, data }) =>
    mark?.type === "line" && mark.style !== "expected" && encoding?.y?.field === "value" && data?.name in store.datasets;

  /* Return rows with values averaged over the steps before them, each curve by itself: a weight of
     0.9 forgets half of what was 7 steps ago. Divided by the weights so far, so that it does not
     begin at zero. */
  function smoothed(given, weight) {
    const curves = new Map();
    return given.map((row) => {
      if (row.value === null || !Number.isFinite(row.value)) return row;
      const key = row.rank ?? row.run ?? "";
      const { sum, mass } = curves.get(key) ?? { sum: 0, mass: 0 };
      const next = { sum: weight * sum + (1 - weight) * row.value, mass: weight * mass + 1 - weight };
      curves.set(key, next);
      return { ...row, value: next.sum / next.mass };
    });
  }

  /* Return a figure whose curves are smoothed over their own faint ones, and the data it needs. */
  function smooth(spec, datasets) {
    if (!smoothing || !spec.layer) return [spec, datasets];
    const more = {};
    const layers = spec.layer.flatMap((layer) => {
      if (!isCurve(layer)) return [layer];
      const name = `${layer.data.name} smoothed`;
      more[name] = smoothed(datasets[layer.data.name], smoothing);
      const { strokeOpacity = 1, ...mark } = layer.mark;
      return [{ ...layer, mark: { ...mark, strokeOpacity: 0.25 * strokeOpacity } }, { ...layer, data: { name } }];
    });
    return [{ ...spec, layer: layers }, { ...datasets, ...more }];
  }

  function smoothAll(weight) {
    smoothing = weight;
    for (const slider of document.querySelectorAll("[data-smoothing]")) slider.value = weight;
    clearTimeout(settling);
    settling = setTimeout(() => {
      for (const [name, spec] of Object.entries(store.specs)) if (spec?.layer?.some(isCurve)) stale.add(name);
      near.forEach(enqueue);
    }, SETTLES);
  }

  const placeOf = (name) => document.querySelector(`[data-figure="${CSS.escape(name)}"]`);
  const sliderOf = (name) => document.querySelector(`[data-slider="${CSS.escape(name)}"]`);

  async function draw(place) {
    const name = place.dataset.figure;
    const spec = store.specs[name];
    stale.delete(name);
    if (!spec) return;
    const names = namesOfData(spec);
    const stage = document.createElement("div");
    stage.className = "stage next";
    place.append(stage); // beside the drawing it replaces, out of sight: no flicker
    const plain = Object.fromEntries(names.map((n) => [n, rows(store.datasets[n])]));
    const [shown, datasets] = smooth(fitting(spec, place), plain);
    const result = await vegaEmbed(stage, { ...shown, description: place.dataset.label, datasets }, {
      mode: "vega-lite",
      config: store.configs[mode()],
      renderer: numValues(names) >= CANVAS_FROM ? "canvas" : "svg",
      actions: false,
      logLevel: 1,
      tooltip: { theme: mode() },
    });
    drop(name);
    for (const other of place.querySelectorAll(":scope > .stage")) if (other !== stage) other.remove();
    stage.classList.remove("next");
    place.style.minHeight = ""; // it was for what is not drawn yet
    views.set(name, result);
    connect(name, result.view, spec);
    place.dataset.drawn = Number(place.dataset.drawn || 0) + 1;
  }

  const AXIS = 44; // pixels beside a square that its axis takes

  /* Return a figure of fixed width, such as a matrix, made smaller where the window is narrow. */
  function fitting(spec, place) {
    const room = place.clientWidth - AXIS;
    if (!(spec.width > room && room > 0)) return spec;
    return { ...spec, width: room, height: Math.round((spec.height * room) / spec.width) };
  }

  function drop(name) {
    views.get(name)?.finalize();
    views.delete(name);
  }

  const isWaiting = (place) => store.specs[place.dataset.figure] &&
    (!views.has(place.dataset.figure) || stale.has(place.dataset.figure));

  const isLookedAt = (place) => views.has(place.dataset.figure) && place.matches(":hover") &&
    performance.now() - movedAt < LOOKING;

  /* Draw what waits in `queue`, one figure at a time, so that the page stays responsive. */
  async function work() {
    if (working) return;
    working = true;
    while (queue.size) {
      const [place] = queue;
      queue.delete(place);
      if (!place.isConnected || !isWaiting(place)) continue;
      if (isLookedAt(place)) { setTimeout(() => enqueue(place), LOOKING); continue; }
      try {
        await draw(place);
      } catch (error) {
        console.error(`the figure ${place.dataset.figure} cannot be drawn`, error);
        store.specs[place.dataset.figure] = null;
      }
      await new Promise((resolve) => { setTimeout(resolve); });
    }
    working = false;
  }

  function enqueue(place) {
    queue.add(place);
    return work();
  }

  /* Draw what is out of sight as well, while nothing else is to do: printing waits for no figure. */
  function drawRest() {
    const isNew = ({ dataset }) => store.specs[dataset.figure] && !views.has(dataset.figure);
    const place = [...document.querySelectorAll("[data-figure]")].find(isNew);
    if (place) idly(async () => { await enqueue(place); drawRest(); });
  }

  /* Draw at once what is shown and waits. All of it is promises that wait for nothing outside, so a browser has kept
     them when its event is over: paper is laid out after that. */
  function drawAll() {
    const places = [...document.querySelectorAll("[data-figure]")];
    for (const place of places) if (place.offsetParent && isWaiting(place)) draw(place).catch(console.error);
  }

  /* Draw all figures at the width that they have on paper: scaled down, their words would be too small. */
  function print(begins) {
    printing = begins;
    root.classList.toggle("paper", begins);
    for (const rest of document.querySelectorAll("details.rest")) rest.open = begins;
    for (const name of views.keys()) stale.add(name);
    if (root.dataset.mode !== mode()) paint();
    if (begins) drawAll();
    else near.forEach(enqueue);
  }

  const observer = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting) { near.add(target); enqueue(target); } else near.delete(target);
    }
  }, { rootMargin: MARGIN });

  function drawShown() {
    for (const place of document.querySelectorAll("[data-figure]")) {
      const spec = store.specs[place.dataset.figure];
      const height = spec && fitting(spec, place).height;
      if (height > 0) place.style.minHeight = `${height + 36}px`; // what is below stays where it is
      observer.observe(place);
      if (near.has(place)) enqueue(place);
    }
    for (const place of near) if (!place.isConnected) near.delete(place);
  }

  /* Take over newer figures: `names` of all of them, `specs` and `datasets` of changed ones. */
  function update({ names, specs, datasets }) {
    for (const name of Object.keys(store.specs)) {
      if (!names.includes(name)) { delete store.specs[name]; drop(name); }
    }
    Object.assign(store.specs, specs);
    Object.assign(store.datasets, datasets);
    const used = new Set(Object.values(store.specs).flatMap((spec) => namesOfData(spec)));
    for (const name of Object.keys(store.datasets)) if (!used.has(name)) delete store.datasets[name];
    for (const name of Object.keys(specs)) stale.add(name);
    for (const slider of document.querySelectorAll("[data-slider]")) {
      if (stood.has(slider.dataset.slider)) place(slider, stood.get(slider.dataset.slider));
    }
    drawShown();
  }

  /* Controls ------------------------------------------------------------------------------ */

  function connect(name, view, spec) {
    if (name.includes("workers-")) {
      const scope = name.slice(0, name.indexOf("workers-") + 8);
      view.addSignalListener("near", (_, value) => pin(scope, value.rank ? value.rank[0] : chosen(scope)));
      set(view, "pinned", chosen(scope));
    }
    if (name.endsWith("timeline")) {
      view.addSignalListener("finding", (_, value) => {
        const article = value.anchor && document.getElementById(value.anchor[0]);
        if (article) window.rankscope.reach(article);
      });
    }
    const slider = sliderOf(name);
    if (slider) {
      slider.max = spec.usermeta.frames.length - 1;
      show(slider);
    }
  }

  function set(view, signal, value) {
    if (view.signal(signal) !== value) view.signal(signal, value).runAsync();
  }

  function pin(scope, rank) {
    for (const [name, result] of views) {
      if (name.startsWith(scope)) set(result.view, "pinned", rank);
    }
  }

  function chosen(scope) {
    const button = document.querySelector(`[data-scope="${CSS.escape(scope)}"][aria-pressed="true"]`);
    return button ? Number(button.dataset.rank) : -1;
  }

  const framesOf = (slider) => store.specs[slider.dataset.slider]?.usermeta?.frames || [];

  function show(slider) {
    const name = slider.dataset.slider;
    const label = framesOf(slider)[slider.value] ?? "";
    const output = document.getElementById(name.replace(/heatmap$/, "frame-name"));
    const value = Number(slider.value);
    const link = document.createElement("a");
    link.textContent = label;
    if (value > 0) link.href = `#${name.replace(/heatmap$/, "step-")}${stepOf(label)}`;
    output?.replaceChildren(link);
    slider.setAttribute("aria-valuetext", label);
    stood.set(name, { first: value === 0, last: value > 0 && value === framesOf(slider).length - 1, label });
    const result = views.get(name);
    if (result) set(result.view, "frame", Number(slider.value));
  }

  const stepOf = (label) => Number((label.match(/\d[\d,]*/) || ["NaN"])[0].replaceAll(",", ""));

  /* Put a slider where it stood: at the latest step, which it follows, or at a label. */
  function place(slider, before) {
    const frames = framesOf(slider);
    let value = frames.indexOf(before.label);
    if (before.first || !frames.length) value = 0;
    else if (before.last) value = frames.length - 1;
    else if (value < 0) {
      const away = frames.map((label, i) => (i ? Math.abs(stepOf(label) - stepOf(before.label)) : Infinity));
      value = Math.max(0, away.indexOf(Math.min(...away)));
    }
    slider.max = Math.max(0, frames.length - 1);
    slider.value = value;
    show(slider);
  }

  /* Show the step that the address names: the matrix nearest to it. */
  function visit() {
    const [, key, step] = location.hash.match(/^#(.*)step-(\d+)$/) || [];
    const slider = step && sliderOf(`${key}heatmap`);
    if (!slider) return;
    const hidden = slider.closest("details");
    if (hidden) hidden.open = true;
    place(slider, { label: `step ${step}` });
    slider.closest("figure").scrollIntoView({ block: "center" });
  }

  function move(slider, by) {
    slider.value = Number(slider.value) + by;
    show(slider);
  }

  function play(button) {
    const name = button.dataset.play;
    const slider = sliderOf(name);
    if (playing.has(name)) {
      clearInterval(playing.get(name));
      playing.delete(name);
      button.textContent = "▶";
      return;
    }
    if (slider.value === slider.max) slider.value = 0;
    button.textContent = "❚❚";
    playing.set(name, setInterval(() => {
      if (slider.value === slider.max) play(button);
      else move(slider, 1);
    }, 180));
  }

  function toggle(button) {
    const pressed = button.getAttribute("aria-pressed") === "true";
    for (const other of button.parentElement.querySelectorAll("[data-rank]")) {
      other.setAttribute("aria-pressed", String(other === button && !pressed));
    }
    pin(button.dataset.scope, pressed ? -1 : Number(button.dataset.rank));
  }

  /* Light and dark ------------------------------------------------------------------------ */

  function paint() {
    root.dataset.mode = mode();
    document.getElementById("mode-name").textContent = { auto: "Auto", light: "Light", dark: "Dark" }[choice];
    for (const name of Object.keys(store.specs)) stale.add(name);
    near.forEach(enqueue);
  }

  function choose(next) {
    choice = next;
    remember(choice);
    paint();
  }

  document.getElementById("mode").addEventListener("click", () => {
    choose({ auto: "light", light: "dark", dark: "auto" }[choice]);
  });
  window.addEventListener("beforeprint", () => print(true));
  window.addEventListener("afterprint", () => print(false));
  window.addEventListener("hashchange", visit);
  prefersDark.addEventListener("change", (event) => { systemDark = event.matches; paint(); });
  document.addEventListener("pointermove", () => { movedAt = performance.now(); }, { passive: true });
  document.addEventListener("input", (event) => {
    if (event.target.dataset.slider) show(event.target);
    if (event.target.dataset.smoothing !== undefined) smoothAll(Number(event.target.value));
  });
  document.addEventListener("click", (event) => {
    if (event.target.closest("a[href^='#']")) setTimeout(visit); // once the address has it
    const button = event.target.closest("button");
    if (button?.dataset.rank !== undefined) toggle(button);
    else if (button?.dataset.play) play(button);
  });
  window.rankscope = { update, move, switchMode: () => choose(mode() === "dark" ? "light" : "dark") };
  paint();
  drawShown();
  drawRest();
  visit();
})();
