/* Changes a part of the page into another version of it, touching only what differs: what a reader
   has opened, marked, chosen or focused stays, and so do drawn figures. */
(() => {
  "use strict";
  const KEPT = { DETAILS: ["open"], BUTTON: ["aria-pressed"], DIV: ["data-drawn", "style"], INPUT: ["aria-valuetext", "max", "data-state"] };

  const ownKey = (node) => node.id || node.dataset.key || node.dataset.figure || node.dataset.slider || node.dataset.rank || "";

  /* What a part is known by: its own name, or else its heading, or the figure in it. */
  function keyOf(node) {
    if (node.nodeType !== Node.ELEMENT_NODE) return "";
    const own = ownKey(node);
    if (own || !/^(SECTION|DIV|FIGURE)$/.test(node.nodeName)) return own;
    const inside = node.querySelector("h2, [data-figure]");
    return inside ? inside.dataset.figure || inside.textContent : "";
  }

  const alike = (one, other) => one.nodeName === other.nodeName && keyOf(one) === keyOf(other);

  function attributes(from, to) {
    const kept = KEPT[from.nodeName] || [];
    if (from.nodeName === "TIME" && from.dataset.at === to.dataset.at) return;
    for (const { name } of [...from.attributes]) {
      if (!to.hasAttribute(name) && !kept.includes(name) && name !== "tabindex") from.removeAttribute(name);
    }
    for (const { name, value } of to.attributes) {
      if (!kept.includes(name) && from.getAttribute(name) !== value) from.setAttribute(name, value);
    }
  }

  function change(from, to) {
    if (from.nodeType !== Node.ELEMENT_NODE) {
      if (from.nodeValue !== to.nodeValue) from.nodeValue = to.nodeValue;
      return;
    }
    attributes(from, to);
    if (from.dataset.figure !== undefined || from.nodeName === "OUTPUT" || from.nodeName === "TIME") return;
    if (from.nodeName === "BUTTON" && from.dataset.play) return;
    if (from.nodeName === "SELECT" && from.isEqualNode(to)) return;
    children(from, to);
  }

  function children(from, to) {
    let here = from.firstChild;
    for (const next of [...to.childNodes]) {
      const match = find(here, next);
      if (!match) {
        from.insertBefore(next, here);
      } else {
        if (match === here) here = here.nextSibling;
        else from.insertBefore(match, here);
        change(match, next);
      }
    }
    while (here) {
      const gone = here;
      here = here.nextSibling;
      gone.remove();
    }
  }

  /* The first of the nodes from `here` on that the next one is a version of. A node without a key
     matches at its own place only. */
  function find(here, next) {
    if (here && alike(here, next)) return here;
    if (!keyOf(next)) return null;
    for (let node = here; node; node = node.nextSibling) if (alike(node, next)) return node;
    return null;
  }

  window.rankscope.morph = (element, html) => {
    const next = document.createElement("template");
    next.innerHTML = html;
    children(element, next.content);
  };
})();
