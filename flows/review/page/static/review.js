// The page's forms work without this script. It adds keys, and keeps an answer that could not be sent in the browser and sends
// it again. The answer's ticket makes it count only once, however often it arrives. A pair that has just replaced another one
// takes no answer for a moment: a second tap, or a tap on the pair before, would be an answer to a pair that nobody has read.
"use strict";
(() => {
  const LONGEST_WAIT = 30000, PATIENCE = 15000, SETTLES = 300;
  let busy = false, shownSince = performance.now(), wake = null;

  const name = () => `tether-review-unsent ${document.body.dataset.who}`;
  const keep = (unsent) => { try { localStorage.setItem(name(), JSON.stringify(unsent)); } catch { /* no storage: retried while the page is open */ } };
  const forget = () => { try { localStorage.removeItem(name()); } catch { /* as above */ } };
  const kept = () => { try { return JSON.parse(localStorage.getItem(name())); } catch { return null; } };
  const tell = (text) => { const status = document.getElementById("status"); if (status) status.textContent = text; };
  const pause = (ms) => new Promise((resolve) => { wake = resolve; setTimeout(resolve, ms); });

  function exchange(html) {
    const next = new DOMParser().parseFromString(html, "text/html");
    document.title = next.title;
    document.body.dataset.who = next.body.dataset.who;
    document.body.replaceChildren(...next.body.childNodes);
    scrollTo(0, 0);
    document.getElementById("pair")?.focus({ preventScroll: true });
    shownSince = performance.now();
  }

  async function send(unsent) {
    busy = true;
    document.body.classList.add("busy");
    keep(unsent);
    for (let tries = 0; ; tries += 1) {
      try {
        const answer = await fetch(unsent.action, {
          method: "POST", body: unsent.body, signal: AbortSignal.timeout(PATIENCE),
          headers: { "Content-Type": "application/x-www-form-urlencoded" },
        });
        const html = await answer.text();
        if (answer.status < 500) {
          if (answer.status !== 401) forget();  // it is sent once a new link is opened
          exchange(html);
          break;
        }
      } catch { /* no connection: retried below */ }
      const wait = Math.min(LONGEST_WAIT, 1000 * 2 ** tries);
      tell(`Not sent yet: the page’s server does not answer. Your answer is kept in this browser and sent again in ${wait / 1000} s.`);
      await pause(wait);
    }
    await pause(SETTLES);
    busy = false;
    document.body.classList.remove("busy");
  }

  document.addEventListener("submit", (event) => {
    if (!event.target.getAttribute("action")) return;  // another person's link: a page of its own
    event.preventDefault();
    if (busy) return;
    const form = event.target, body = new URLSearchParams(new FormData(form, event.submitter));
    body.set("seconds", ((performance.now() - shownSince) / 1000).toFixed(1));
    send({ action: form.getAttribute("action"), body: body.toString() });
  });

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.repeat) return;
    if (event.key === "Escape" && event.target.matches("textarea")) event.target.blur();
    if (event.target.matches("textarea, input[type=text]")) return;
    const key = event.key.toLowerCase();
    if (key === "g") {
      const guidelines = document.getElementById("guidelines");
      if (guidelines) { guidelines.open = !guidelines.open; guidelines.scrollIntoView(); }
      return;
    }
    const button = [...document.querySelectorAll("[data-keys]")].find((each) => each.dataset.keys.split(" ").includes(key));
    if (button && !busy) { event.preventDefault(); button.click(); }
  });

  addEventListener("online", () => wake?.());
  const unsent = document.body.dataset.who && kept();
  if (unsent) {
    const pair = document.getElementById("pair");
    if (pair) pair.hidden = true;  // it may be the one that the unsent answer is for
    tell("Your last answer is being sent. The next pair follows.");
    send(unsent);
  }
})();
