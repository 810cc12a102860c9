/* The list of runs: which are shown, in which order, with which columns. What a reader has chosen
   outlives news of the runs, and no row moves by itself. */
(() => {
  "use strict";
  const COLUMNS = "rankscope-columns";
  const FIELDS = "input:not([type=checkbox]), select, textarea";
  let order = []; /* keys of the rows as they are shown */
  let by = null; /* the column of the order, and its direction; null for the server's */
  let shown = new Set(read());

  function read() {
    try { return JSON.parse(window.localStorage.getItem(COLUMNS)) || []; } catch { return []; }
  }

  const table = () => document.querySelector(".runs table");
  const rowsOf = (own) => [...own.tBodies[0].rows];

  function value(row, name) {
    const cell = row.querySelector(`[data-of="${CSS.escape(name)}"]`);
    return cell ? (cell.dataset.sort ?? cell.textContent.trim()) : "";
  }

  function compared(one, other) {
    const [a, b] = [one, other].map((row) => value(row, by.name));
    if ((a === "") !== (b === "")) return a === "" ? 1 : -1; /* what is unknown comes last */
    const numbers = [a, b].map(Number);
    const less = numbers.some(Number.isNaN) ? a.localeCompare(b, undefined, { numeric: true }) : numbers[0] - numbers[1];
    return by.down ? -less : less;
  }

  function arrange() {
    const own = table();
    if (!own) return;
    const rows = rowsOf(own);
    const keys = rows.map((row) => row.dataset.key);
    const places = new Map(order.map((key, at) => [key, at]));
    /* Rows that are new come first, in the server's order. */
    const arranged = rows.map((row, at) => [places.get(row.dataset.key) ?? at - rows.length, row]);
    arranged.sort(([a], [b]) => a - b);
    arranged.forEach(([, row], at) => { if (own.tBodies[0].rows[at] !== row) own.tBodies[0].insertBefore(row, own.tBodies[0].rows[at]); });
    order = arranged.map(([, row]) => row.dataset.key);
    const again = document.getElementById("again");
    const worstFirst = by === null && order.every((key, at) => key === keys[at]);
    if (again) again.hidden = by !== null || worstFirst;
    const said = document.getElementById("order");
    if (said) said.textContent = by !== null ? `by ${by.name}` : worstFirst ? "worst first, then the youngest" : "as sorted before the latest changes";
    for (const head of own.tHead.querySelectorAll("[data-by]")) {
      const chosen = by !== null && head.dataset.by === by.name;
      const th = head.closest("th");
      if (chosen) th.setAttribute("aria-sort", by.down ? "descending" : "ascending");
      else th.removeAttribute("aria-sort");
    }
  }

  function sort(name) {
    by = by?.name === name ? { name, down: !by.down } : { name, down: false };
    order = rowsOf(table()).sort(compared).map((row) => row.dataset.key);
    arrange();
  }

  function choose() {
    const own = table();
    if (!own) return;
    for (const cell of own.querySelectorAll("[data-setting]")) cell.hidden = !shown.has(cell.dataset.setting);
    for (const box of document.querySelectorAll("[data-column]")) box.checked = shown.has(box.dataset.column);
  }

  function filter() {
    const own = table();
    const field = document.getElementById("filter");
    if (!own || !field) return;
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = rowsOf(own);
    let count = 0;
    for (const row of rows) {
      const text = `${row.textContent} ${row.dataset.words}`.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      count += !row.hidden;
    }
    own.parentElement.hidden = words.length > 0 && count === 0;
    const names = rows.slice(0, 3).map((row) => value(row, "Run")).join(", ");
    const none = `Nothing matches. Here are ${rows.length} runs, such as ${names}.`;
    document.getElementById("shown").textContent = !words.length ? "" : count ? `${count} shown` : none;
  }

  function show() {
    choose();
    arrange();
    filter();
  }

  document.addEventListener("input", ({ target }) => { if (target.id === "filter") filter(); });
  document.addEventListener("change", ({ target }) => {
    if (target.dataset.column === undefined) return;
    if (target.checked) shown.add(target.dataset.column);
    else shown.delete(target.dataset.column);
    try { window.localStorage.setItem(COLUMNS, JSON.stringify([...shown])); } catch { /* not kept */ }
    choose();
  });
  document.addEventListener("click", ({ target }) => {
    const head = target.closest("[data-by]");
    if (head) sort(head.dataset.by);
    if (target.closest("#again")) { order = []; by = null; window.location.reload(); }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || event.target.closest(FIELDS)) return;
    const field = document.getElementById("filter");
    if (field) { field.focus(); event.preventDefault(); }
  });

  window.rankscope.show = show;
  show();
})();
