/* The few keys of every page. */
(() => {
  "use strict";
  const help = document.getElementById("help");
  const items = () => [...document.querySelectorAll("[data-item], article.finding")];

  function go(by) {
    const all = items();
    if (!all.length) return;
    const at = all.findIndex((item) => item.contains(document.activeElement));
    const next = at < 0 ? (by > 0 ? 0 : all.length - 1) : Math.min(Math.max(at + by, 0), all.length - 1);
    reach(all[next]);
  }

  function reach(item) {
    const target = item.querySelector("[data-item-link]") || item;
    if (target === item) item.tabIndex = -1;
    target.focus({ preventScroll: true });
    item.scrollIntoView({ block: "nearest" });
  }

  function slide(by) {
    const sliders = [...document.querySelectorAll("[data-slider]")].filter((slider) => slider.offsetParent);
    if (sliders.length) window.rankscope.move(sliders[0], by);
  }

  const KEYS = {
    j: () => go(1),
    k: () => go(-1),
    "[": () => slide(-1),
    "]": () => slide(1),
    d: () => window.rankscope.switchMode(),
    "?": () => help.showModal(),
  };
  const ARROWS = { ArrowDown: 1, ArrowUp: -1 };

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
    if (event.target.closest("input:not([type=range]):not([type=checkbox]), textarea, select, [contenteditable]")) return;
    if (event.key in ARROWS && event.target.matches("[data-item-link], article.finding")) go(ARROWS[event.key]);
    else if (event.key in KEYS) KEYS[event.key]();
    else return;
    event.preventDefault();
  });
  document.getElementById("keys").addEventListener("click", () => help.showModal());
  window.rankscope.reach = reach;
})();
