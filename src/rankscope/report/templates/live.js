/* Keeps a page up to date: listens to the server, fetches changes, and shows when it cannot. */
(() => {
  "use strict";
  const main = document.getElementById("main");
  const link = document.getElementById("link");
  const { topic } = main.dataset;
  const RETRY = [1000, 2000, 4000, 8000];
  const LATE = 3000;
  const PATIENCE = 60000;
  const SILENCE = 40000; /* the server sends a ping every 15 seconds */
  const marked = [];
  let source = null; /* the stream, while this page is seen and connected */
  let timer = 0; /* until the next try, or until the stream has been silent for too long */
  let failures = 0;
  let lostAt = null;
  let request = null; /* for news, while under way */
  let again = false;

  /* Times ---------------------------------------------------------------------------------- */

  const clock = (ms) => new Date(ms).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });

  function day(ms) {
    const then = new Date(ms);
    if (Date.now() - ms < 12 * 3600e3) return clock(ms);
    return `${then.toLocaleDateString([], { day: "numeric", month: "short" })}, ${clock(ms)}`;
  }

  function ago(ms) {
    const seconds = Math.max(0, (Date.now() - ms) / 1000);
    if (seconds < 100) return `${Math.round(seconds)} s ago`;
    if (seconds < 100 * 60) return `${Math.round(seconds / 60)} min ago`;
    if (seconds < 48 * 3600) return `${Math.round(seconds / 3600)} h ago`;
    return `${Math.round(seconds / 86400)} days ago`;
  }

  function showTimes() {
    for (const time of document.querySelectorAll("time[data-at]")) {
      const ms = 1000 * Number(time.dataset.at);
      const words = time.dataset.kind === "clock" ? day(ms) : ago(ms);
      if (time.textContent !== words) {
        time.textContent = words;
        time.dateTime = new Date(ms).toISOString();
        time.title = new Date(ms).toLocaleString();
      }
    }
  }

  /* News ----------------------------------------------------------------------------------- */

  function apiAddress() {
    const path = window.location.pathname === "/" ? "/runs" : window.location.pathname;
    const query = new URLSearchParams(window.location.search);
    query.set("since", main.dataset.version);
    return `/api${path}?${query}`;
  }

  async function refresh() {
    if (request) { again = true; return; }
    const own = request = new AbortController();
    const late = setTimeout(() => showState("waiting", "Updating"), LATE);
    const limit = setTimeout(() => own.abort(), PATIENCE);
    let done = false;
    try {
      const answer = await fetch(apiAddress(), { cache: "no-store", signal: own.signal });
      if (answer.ok) {
        apply(await answer.json());
        done = true;
      }
    } catch { /* shown below */ }
    clearTimeout(late);
    clearTimeout(limit);
    if (request !== own) return; /* not seen any more, or the stream is lost: the next request shows it */
    request = null;
    if (!done) lost("Not up to date");
    else if (again) { again = false; refresh(); }
    else current();
  }

  function apply(news) {
    if (news.version === main.dataset.version) return;
    const focused = document.activeElement;
    window.rankscope.morph(main, news.main);
    if (focused !== document.activeElement && focused.isConnected) focused.focus({ preventScroll: true });
    main.dataset.version = news.version;
    document.title = `${news.title} · rankscope`;
    document.getElementById("crumb").textContent = news.title;
    window.rankscope.update(news);
    mark();
    showTimes();
    window.rankscope.show();
  }

  function showState(state, words) {
    link.dataset.state = state;
    link.textContent = words;
  }

  /* Whether it is up to date ---------------------------------------------------------------- */

  function current() {
    failures = 0;
    lostAt = null;
    showState("live", "Live");
  }

  function lost(words) {
    stop();
    lostAt ??= Date.now();
    showState("lost", `${words} since ${clock(lostAt)}, retrying`);
    timer = setTimeout(listen, RETRY[Math.min(failures, RETRY.length - 1)]);
    failures += 1;
  }

  function restartSilence() {
    clearTimeout(timer);
    timer = setTimeout(() => lost("Not connected"), SILENCE);
  }

  function listen() {
    const query = new URLSearchParams({ topic, have: main.dataset.version });
    const then = { hello() {}, ping() {}, current, news: refresh };
    source = new EventSource(`/events?${query}`);
    if (lostAt === null) showState("waiting", "Connecting");
    restartSilence();
    for (const [name, react] of Object.entries(then)) {
      source.addEventListener(name, () => { restartSilence(); react(); });
    }
    source.addEventListener("error", () => lost("Not connected"));
  }

  function stop() {
    clearTimeout(timer);
    source?.close();
    request?.abort();
    source = request = null;
    again = false;
  }

  /* A browser has six connections for a server: pages that nobody sees must not hold them. */
  function seen() {
    if (!topic) return;
    if (document.visibilityState === "visible") {
      if (!source) listen();
    } else {
      stop();
      showState("waiting", "Paused");
    }
  }

  /* Comparing runs --------------------------------------------------------------------------- */

  function mark() {
    const boxes = [...document.querySelectorAll("[data-compare]")];
    for (const box of boxes) box.checked = marked.includes(box.dataset.compare);
    const pick = document.getElementById("pick");
    if (!pick) return;
    pick.hidden = marked.length === 0;
    const [first, second] = marked;
    const ready = marked.length >= 2;
    pick.querySelector("span").hidden = ready;
    pick.querySelector("b").textContent = first ?? "";
    const [two, all] = pick.querySelectorAll("a");
    two.hidden = marked.length !== 2;
    all.hidden = !ready;
    if (!ready) return;
    two.href = `/compare?${new URLSearchParams({ a: first, b: second })}`;
    all.href = `/overlay?${new URLSearchParams(marked.map((id) => ["run", id]))}`;
    all.textContent = `Lay the ${marked.length} over each other`;
  }

  document.addEventListener("change", ({ target }) => {
    if (target.dataset.compare !== undefined) {
      const at = marked.indexOf(target.dataset.compare);
      if (at >= 0) marked.splice(at, 1);
      else marked.push(target.dataset.compare);
      mark();
    }
    if (target.dataset.go !== undefined && [...target.form.elements].every((field) => !field.name || field.value)) {
      target.form.submit();
    }
  });

  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest("select, textarea, input:not([type=range]):not([type=checkbox])");
    if (event.key !== "g" || event.ctrlKey || event.metaKey || event.altKey || typing) return;
    window.location.assign("/");
  });

  showTimes();
  mark();
  setInterval(showTimes, 1000);
  seen();
  document.addEventListener("visibilitychange", seen);
  window.addEventListener("pagehide", stop);
  window.addEventListener("pageshow", ({ persisted }) => { if (persisted) seen(); });
})();
