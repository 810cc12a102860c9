(() => {
  "use strict";
  const store = JSON.parse(document.getElementById("figures").textContent);
  const root = document.documentElement;
  const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
  const views = new Map();
  const playing = new Map();
  let choice = recall();

  function recall() {
    try { return localStorage.getItem("rankscope-mode") || "auto"; } catch { return "auto"; }
  }

  function remember(mode) {
    try { localStorage.setItem("rankscope-mode", mode); } catch { /* a page of a file may not store */ }
  }

  const mode = () => (choice === "auto" ? (prefersDark.matches ? "dark" : "light") : choice);

  function rows(columns) {
    const names = Object.keys(columns);
    const length = names.length ? columns[names[0]].length : 0;
    return Array.from({ length }, (_, i) => Object.fromEntries(names.map((n) => [n, columns[n][i]])));
  }

  function datasetsOf(spec) {
    const found = {};
    const visit = (node) => {
      if (Array.isArray(node)) node.forEach(visit);
      else if (node && typeof node === "object") {
        if (node.data && node.data.name in store.datasets) {
          found[node.data.name] ??= rows(store.datasets[node.data.name]);
        }
        Object.values(node).forEach(visit);
      }
    };
    visit(spec);
    return found;
  }

  async function draw(place) {
    const name = place.dataset.figure;
    const spec = store.specs[name];
    if (!spec) return;
    views.get(name)?.finalize();
    const result = await vegaEmbed(place, { ...spec, description: place.dataset.label, datasets: datasetsOf(spec) }, {
      mode: "vega-lite",
      config: store.configs[mode()],
      renderer: name.includes("workers-") ? "canvas" : "svg",
      actions: false,
      logLevel: 1,
      tooltip: { theme: mode() },
    });
    views.set(name, result);
    connect(name, result.view);
  }

  function connect(name, view) {
    if (name.includes("workers-")) {
      const scope = name.slice(0, name.indexOf("workers-") + 8);
      view.addSignalListener("near", (_, value) => pin(scope, value.rank ? value.rank[0] : chosen(scope)));
      set(view, "pinned", chosen(scope));
    }
    const slider = document.querySelector(`[data-slider="${CSS.escape(name)}"]`);
    if (slider) {
      slider.max = store.specs[name].usermeta.frames.length - 1;
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

  function show(slider) {
    const name = slider.dataset.slider;
    const label = store.specs[name].usermeta.frames[slider.value];
    document.getElementById(name.replace(/heatmap$/, "frame-name")).textContent = label;
    slider.setAttribute("aria-valuetext", label);
    const result = views.get(name);
    if (result) set(result.view, "frame", Number(slider.value));
  }

  function play(button) {
    const name = button.dataset.play;
    const slider = document.querySelector(`[data-slider="${CSS.escape(name)}"]`);
    if (playing.has(name)) {
      clearInterval(playing.get(name));
      playing.delete(name);
      button.textContent = "▶";
      return;
    }
    if (slider.value === slider.max) slider.value = 0;
    button.textContent = "❚❚";
    playing.set(name, setInterval(() => {
      if (slider.value === slider.max) { play(button); return; }
      slider.value = Number(slider.value) + 1;
      show(slider);
    }, 180));
  }

  function toggle(button) {
    const pressed = button.getAttribute("aria-pressed") === "true";
    for (const other of button.parentElement.querySelectorAll("[data-rank]")) {
      other.setAttribute("aria-pressed", String(other === button && !pressed));
    }
    pin(button.dataset.scope, pressed ? -1 : Number(button.dataset.rank));
  }

  async function drawShown() {
    for (const place of document.querySelectorAll("[data-figure]")) {
      if (place.offsetParent !== null && !views.has(place.dataset.figure)) await draw(place);
    }
  }

  function paint() {
    root.dataset.mode = mode();
    document.getElementById("mode-name").textContent = { auto: "Auto", light: "Light", dark: "Dark" }[choice];
    for (const name of views.keys()) draw(document.querySelector(`[data-figure="${CSS.escape(name)}"]`));
  }

  document.getElementById("mode").addEventListener("click", () => {
    choice = { auto: "light", light: "dark", dark: "auto" }[choice];
    remember(choice);
    paint();
  });
  prefersDark.addEventListener("change", paint);
  document.addEventListener("input", (event) => { if (event.target.dataset.slider) show(event.target); });
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button?.dataset.rank !== undefined) toggle(button);
    else if (button?.dataset.play) play(button);
  });
  paint();
  drawShown();
  document.addEventListener("toggle", drawShown, true);
})();
