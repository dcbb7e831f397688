// Zoom, search and keyboard of a flame graph. The picture is whole without it.
"use strict";
(() => {
  const svg = document.documentElement;
  const [frames, head, foot, details, matched] =
    ["frames", "head", "foot", "details", "matched"].map((id) => document.getElementById(id));
  const pad = Number(frames.dataset.pad);
  const letter = Number(frames.dataset.letter);
  const [top, step] = [Number(frames.dataset.top), Number(frames.dataset.row)];
  const height = svg.viewBox.baseVal.height;
  const narrowest = 760; // the legend and the tools stand side by side
  const high = (side) => Number(side.querySelector("rect").getAttribute("height"));
  const percent = (part, whole) => (100 * part / Math.max(whole, 1)).toFixed(2) + " %";
  const boxOf = new Map(); // by element
  const rows = Array.from(frames.children, (row, depth) => Array.from(row.children, (element) => {
    const says = element.querySelector("title").textContent;
    const box = {
      element, depth, says, name: says.slice(0, says.lastIndexOf(" (")),
      x: Number(element.dataset.x), width: Number(element.dataset.w), shown: true, match: false,
      label: (element.dataset.mark || "") + says.slice(0, says.lastIndexOf(" (")).replace(/_\[guessed\]$/, ""),
      rect: element.querySelector("rect"), text: element.querySelector("text"),
    };
    boxOf.set(element, box);
    return box;
  }));
  const boxes = rows.flat();
  const root = rows[0][0];
  let zoomed = root;
  let current = root; // has the focus, or gets it with the next Tab
  let pattern = null;
  let width = 0;
  let upward = false; // the root is at the bottom

  // A letter of East Asia, or a sign as large as one, takes two places.
  const places = (character) => (character.codePointAt(0) >= 0x1100 ? 2 : 1);

  function cut(text, most) {
    if (text.length * 2 <= most) return text;
    const letters = Array.from(text);
    if (letters.reduce((sum, each) => sum + places(each), 0) <= most) return text;
    if (most < 3) return "";
    let end = 0;
    for (let room = places(letters[0]); room <= most - 2; room += places(letters[end])) end += 1;
    return letters.slice(0, end).join("") + "..";
  }

  function draw() {
    const scale = (width - 2 * pad) / Math.max(zoomed.width, 1);
    for (const box of boxes) {
      const begin = Math.max(box.x, zoomed.x);
      const size = (Math.min(box.x + box.width, zoomed.x + zoomed.width) - begin) * scale;
      const shown = size > 0 || box === root;
      if (shown !== box.shown) box.element.style.display = shown ? "" : "none";
      box.shown = shown;
      if (!shown) continue;
      const at = pad + (begin - zoomed.x) * scale;
      box.rect.setAttribute("x", at);
      box.rect.setAttribute("width", size > 2 ? size - 0.5 : size);
      box.element.classList.toggle("above", box.depth < zoomed.depth);
      const text = cut(box.label, Math.floor((size - 5) / letter));
      if (text && !box.text) {
        box.text = document.createElementNS(svg.namespaceURI, "text");
        box.text.setAttribute("y", "12");
        box.element.append(box.text);
      }
      if (box.text) {
        box.text.textContent = text;
        box.text.setAttribute("x", at + 3);
      }
    }
    reset.disabled = zoomed === root;
    count();
  }

  // Puts the root at the bottom, or at the top, and scrolls to it.
  function turn(up) {
    upward = up;
    [...frames.children].forEach((row, depth) => {
      row.setAttribute("transform", `translate(0,${top + (up ? rows.length - 1 - depth : depth) * step})`);
    });
    direction.textContent = up ? "Icicles" : "Flames";
    direction.title = up ? "Root at the top" : "Root at the bottom";
    window.scrollTo(0, up ? height : 0);
  }

  function zoom(box) {
    zoomed = box;
    draw();
    point(box);
  }

  // What the stacks through matching frames have of what is shown: of frames one on another, the lowest one's.
  function count() {
    if (!pattern) {
      matched.textContent = "";
      return;
    }
    const found = boxes.filter((box) => box.match && box.shown).sort((a, b) => a.x - b.x || b.width - a.width);
    const last = zoomed.x + zoomed.width;
    let end = zoomed.x;
    let sum = 0;
    for (const box of found) {
      const after = Math.min(box.x + box.width, last);
      if (after > end) {
        sum += after - Math.max(box.x, end);
        end = after;
      }
    }
    const whole = zoomed === root ? "" : " of the zoomed frame";
    matched.textContent = `Matched: ${percent(sum, zoomed.width)}${whole}`;
  }

  function search() {
    pattern = null;
    let wrong = false;
    try {
      pattern = input.value ? new RegExp(input.value, "i") : null;
    } catch {
      wrong = true;
    }
    for (const box of boxes) {
      box.match = pattern !== null && pattern.test(box.name);
      box.element.classList.toggle("match", box.match);
    }
    svg.classList.toggle("searching", pattern !== null);
    count();
    if (wrong) matched.textContent = "not a regular expression";
  }

  function tell(box) {
    if (!box) {
      details.textContent = "";
      return;
    }
    const numbers = box.says.slice(box.name.length);
    const room = Math.floor((width - 2 * pad) / letter) - matched.textContent.length - 3;
    details.textContent = cut(box.name, room - numbers.length) + numbers;
  }

  // Makes a frame the one that Tab leads to.
  function point(box) {
    current.element.setAttribute("tabindex", "-1");
    current = box;
    box.element.setAttribute("tabindex", "0");
    box.element.setAttribute("role", "button");
  }

  function focus(box) {
    if (!box) return;
    point(box);
    box.element.focus({ preventScroll: true });
    const place = box.rect.getBoundingClientRect();
    const above = place.top - high(head);
    const below = place.bottom - (window.innerHeight - high(foot));
    if (above < 0) window.scrollBy(0, above - 4);
    else if (below > 0) window.scrollBy(0, below + 4);
  }

  const parent = (box) =>
    box === root ? null : rows[box.depth - 1].find((each) => each.x + each.width > box.x && each.x <= box.x);
  const child = (box) => (rows[box.depth + 1] || [])
    .filter((each) => each.shown && each.x >= box.x && each.x + each.width <= box.x + box.width)
    .reduce((best, each) => (best && best.width >= each.width ? best : each), null);

  function beside(box, step) {
    const row = rows[box.depth];
    let at = row.indexOf(box) + step;
    while (row[at] && !row[at].shown) at += step;
    return row[at];
  }

  function key(event) {
    const typing = event.target === input;
    const finding = event.key === "/" || (event.key.toLowerCase() === "f" && (event.ctrlKey || event.metaKey));
    if (finding && !typing) {
      input.focus();
      input.select();
    } else if (event.key === "Escape") {
      if (typing || zoomed === root) {
        input.value = "";
        search();
      } else {
        zoom(root);
      }
      if (typing) focus(current.shown ? current : zoomed);
    } else if (typing || event.ctrlKey || event.metaKey || event.altKey || !boxOf.has(event.target)) {
      return;
    } else if (event.key === "Enter" || event.key === " ") {
      zoom(current);
      focus(current);
    } else if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      focus(beside(current, event.key === "ArrowLeft" ? -1 : 1));
    } else if (event.key === "ArrowUp" || event.key === "ArrowDown") {
      focus((event.key === "ArrowUp") === upward ? child(current) : parent(current));
    } else {
      return;
    }
    event.preventDefault();
  }

  // Title, legend and tools stay in sight, and so do the details.
  function stay() {
    head.setAttribute("transform", `translate(0,${window.scrollY})`);
    foot.setAttribute("transform", `translate(0,${Math.min(0, window.scrollY + window.innerHeight - height)})`);
  }

  function fit() {
    svg.setAttribute("width", "100%");
    width = Math.max(svg.getBoundingClientRect().width, narrowest);
    svg.setAttribute("width", width);
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    tools.parentNode.setAttribute("x", width - pad - 400);
    matched.setAttribute("x", width - pad);
    for (const line of head.querySelectorAll("[data-letter]")) {
      const text = line.dataset.said || line.firstChild.textContent;
      line.lastChild.data = cut(text, Math.floor((width - 2 * pad) / line.dataset.letter));
    }
    draw();
    stay();
  }

  const make = (name, parent, settings) => {
    const made = document.createElementNS("http://www.w3.org/1999/xhtml", name);
    for (const [setting, value] of Object.entries(settings)) made.setAttribute(setting, value);
    parent.append(made);
    return made;
  };
  const place = document.createElementNS(svg.namespaceURI, "foreignObject");
  place.setAttribute("width", "400");
  place.setAttribute("height", "26");
  place.setAttribute("y", high(head) - 29);
  head.append(place);
  const tools = make("div", place, { id: "tools" });
  const reset = make("button", tools, { type: "button", title: "Escape" });
  reset.textContent = "Reset zoom";
  const direction = make("button", tools, { type: "button" });
  const input = make("input", tools, {
    type: "text", placeholder: "Search (Ctrl-F)", "aria-label": "Search, by a regular expression",
    spellcheck: "false", autocomplete: "off",
  });

  svg.classList.add("live");
  svg.setAttribute("role", "application");
  const boxAt = (event) => boxOf.get(event.target.closest ? event.target.closest("#frames > g > g") : null);
  frames.addEventListener("click", (event) => { const box = boxAt(event); if (box) { zoom(box); focus(box); } });
  frames.addEventListener("mouseover", (event) => tell(boxAt(event)));
  frames.addEventListener("mouseleave", () => tell(boxOf.get(document.activeElement)));
  // Not of `frames`: Chromium lets Tab stop at SVG elements that listen to the focus.
  document.addEventListener("focusin", (event) => tell(boxAt(event)));
  document.addEventListener("focusout", () => tell(null));
  reset.addEventListener("click", () => { zoom(root); focus(root); });
  direction.addEventListener("click", () => turn(!upward));
  input.addEventListener("input", search);
  document.addEventListener("keydown", key);
  window.addEventListener("scroll", stay);
  window.addEventListener("resize", fit);
  point(root);
  turn(false);
  fit();
})();
