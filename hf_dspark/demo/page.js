// Details of tokens, links between tokens and rounds, and files written by the browser.
window.dspark = (() => {
  const one = (selector, root = document) => root.querySelector(selector);
  let pinned = null; // data-token of the token that stays in the card

  function show(token) {
    const card = one("#ds-details .ds-card");
    if (!card) return;
    const origin = token.dataset.origin;
    card.dataset.origin = origin;
    one("h2", card).textContent = token.getAttribute("aria-label");
    one("p", card).textContent = one(`#ds-legend li[data-origin="${origin}"]`)?.title ?? "";
    const pairs = token.dataset.details.split("\n").map((line) => line.split("\t"));
    one("dl", card).replaceChildren(...pairs.map(([name, value]) => {
      const row = document.createElement("div");
      const dt = document.createElement("dt"), dd = document.createElement("dd");
      dt.textContent = name;
      dd.textContent = value;
      row.dataset.name = name;
      row.append(dt, dd);
      return row;
    }));
  }

  function pin(token) {
    pinned = token ? token.dataset.token : null;
    one("#ds-details .ds-card")?.classList.toggle("ds-open", Boolean(token));
    if (token) show(token);
    mark(Boolean(token));
  }

  function mark(scroll = false) {
    document.querySelectorAll(".ds-token[aria-selected=true]").forEach((t) => {
      if (t.dataset.token !== pinned) t.setAttribute("aria-selected", "false");
    });
    document.querySelectorAll(".ds-round.ds-here").forEach((r) => r.classList.remove("ds-here"));
    const token = pinned && one(`#ds-chat .ds-token[data-token="${pinned}"]`);
    if (!token) return;
    token.setAttribute("aria-selected", "true");
    const answers = document.querySelectorAll("#ds-chat .ds-answer");
    if (token.closest(".ds-answer") !== answers[answers.length - 1]) return; // the rounds shown are the last answer's
    const round = one(`#ds-rounds .ds-round[data-round="${token.dataset.round}"]`);
    round?.classList.add("ds-here");
    if (scroll && round) round.parentElement.scrollTop = round.offsetTop - round.parentElement.offsetTop - 8;
  }

  const tokenOf = (event) => event.target.closest?.(".ds-token[data-details]");

  document.addEventListener("mouseover", (event) => {
    const token = tokenOf(event);
    if (token && !pinned) show(token);
  });
  document.addEventListener("click", (event) => {
    if (event.target.closest?.(".ds-close")) return pin(null);
    const token = tokenOf(event);
    if (token) pin(token.dataset.token === pinned ? null : token);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      if (pinned) return pin(null);
      document.querySelectorAll("#ds-stop, #ds-compare-stop").forEach((b) => b.disabled || b.click());
      return;
    }
    const token = tokenOf(event);
    if (!token) return;
    const tokens = [...token.parentElement.querySelectorAll(".ds-token")];
    const at = tokens.indexOf(token);
    const next = {
      ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: tokens.length - 1,
    }[event.key];
    if (event.key === "Enter" || event.key === " ") pin(token);
    else if (next === undefined || !tokens[next]) return;
    else {
      token.tabIndex = -1;
      tokens[next].tabIndex = 0;
      tokens[next].focus();
      pin(tokens[next]);
    }
    event.preventDefault();
  });

  // The page replaces its HTML while an answer grows: keep the mark, the end of the text in view, and listeners told.
  let planned = false;
  new MutationObserver(() => {
    if (planned) return;
    planned = true;
    requestAnimationFrame(() => {
      planned = false;
      mark();
      const chat = one("#ds-chat");
      const height = chat?.scrollHeight;
      if (chat && String(height) !== chat.dataset.height) {
        if (one(".ds-running, .ds-waiting", chat) || !chat.dataset.height) chat.scrollTop = height;
        chat.dataset.height = String(height);
      }
      announce();
    });
  }).observe(document, { childList: true, subtree: true });

  function announce() {
    const live = one("#ds-live [role=status]");
    const state = (one("#ds-status")?.textContent ?? "").trim();
    const said = state.startsWith("Writing") ? "Writing an answer" : state;
    if (live && live.textContent !== said) live.textContent = said;
  }

  function download(name, blob) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  return {
    save(name, content) {
      if (content) download(name, new Blob([content], { type: "application/json" }));
    },
    savePicture(name, svg) {
      if (!svg) return;
      const image = new Image();
      image.onload = () => {
        const canvas = document.createElement("canvas");
        [canvas.width, canvas.height] = [image.width, image.height];
        canvas.getContext("2d").drawImage(image, 0, 0);
        canvas.toBlob((blob) => download(name, blob), "image/png");
      };
      image.src = URL.createObjectURL(new Blob([svg], { type: "image/svg+xml" }));
    },
  };
})();
