const FLAME_ROW = 18, FLAME_TEXT = 11, FLAME_LEAST = 0.5; // px
const FLAME_MARKED = 0.01; // the part of a box's samples that are divided among stacks: it is marked
const OTHER_MODULES = 9; // colours that modules have, before the others share one

class Flame {
  constructor(model, element) {
    this.model = model;
    this.source = model.first.source;
    this.inverted = model.first.inverted;
    this.colouring = "kind";
    this.focus = null; // the function of a sandwich view, by its text
    this.search = "";
    this.found = null; // frames that match: Uint8Array
    this.cursor = null; // the box that the keyboard is at
    this.hovered = null;
    this.zoomed = null;
    this.view = [0, 1]; // samples from and to which the canvas shows
    this.build(element);
    model.on("selection", () => this.renew());
    model.on("active", () => this.renew());
    model.on("theme", () => this.recolour());
    new ResizeObserver(() => this.resized()).observe(this.scroller);
    this.renew();
  }

  // ---- the elements around the canvas

  build(element) {
    const get = (name) => element.querySelector(`[data-part=${name}]`);
    this.parts = Object.fromEntries(
      ["sources", "order", "colouring", "search", "clear", "share", "reset", "whole", "caption", "legend", "details",
        "sandwich", "kernel", "leave", "activity", "active", "divided"].map((name) => [name, get(name)]));
    const [said, why] = this.model.divided;
    if (said) {
      this.parts.divided.querySelector("summary").textContent = said;
      this.parts.divided.querySelector("p").textContent = why;
    }
    this.scroller = get("scroller");
    this.spacer = get("spacer");
    this.canvas = get("canvas");
    this.tip = get("tip");
    this.context = this.canvas.getContext("2d");
    const { parts, canvas } = this;
    for (const button of parts.sources.querySelectorAll("button")) {
      button.onclick = () => this.show({ source: button.value, focus: null });
      button.disabled = button.value === "cpu" && !this.model.trees.cpu;
      if (button.disabled) button.title = "This recording has no CPU samples";
    }
    for (const button of parts.order.querySelectorAll("button"))
      button.onclick = () => this.show({ inverted: button.value === "inverted", focus: null });
    parts.colouring.onchange = () => this.show({ colouring: parts.colouring.value });
    parts.search.oninput = () => this.find(parts.search.value);
    parts.search.onkeydown = (event) => {
      if (event.key === "Escape") this.find(""), canvas.focus(), event.stopPropagation();
      if (event.key === "Enter") canvas.focus();
    };
    parts.active.onchange = () => this.model.showActive(parts.active.checked);
    parts.clear.onclick = () => this.find("");
    parts.reset.onclick = () => this.zoom(null);
    parts.whole.onclick = () => this.model.select(null);
    parts.sandwich.onclick = () => this.sandwich(this.cursor || this.zoomed);
    parts.kernel.onclick = () => this.model.selectKernel(this.kernelOf(this.cursor || this.zoomed));
    parts.leave.onclick = () => this.show({ focus: null });
    this.scroller.onscroll = () => this.draw();
    canvas.onpointerdown = (event) => this.grab(event);
    canvas.onpointermove = (event) => this.hover(event);
    canvas.onpointerleave = () => this.hoverAt(null);
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.onkeydown = (event) => this.key(event);
    canvas.onblur = () => this.draw();
    canvas.onfocus = () => { // not by a click: what was clicked must stay where it is
      if (!this.cursor && canvas.matches(":focus-visible")) this.goto(this.zoomed || this.picture.root);
      else this.draw();
    };
  }

  /** Changes what is shown: source, inverted, colouring, focus. */
  show(changes) {
    Object.assign(this, changes);
    if ("colouring" in changes && Object.keys(changes).length === 1) this.recolour();
    else this.renew("source" in changes || "inverted" in changes || "focus" in changes);
  }

  /** Makes the picture anew: other samples, another order. Keeps the zoom where the same stack is there. */
  renew(forget = false) {
    const path = forget ? [] : this.path(this.zoomed);
    const { tree, leaves } = this.model.chosen(this.source);
    this.tree = tree;
    this.picture = new Picture(tree, leaves, this.inverted, this.focus);
    this.cursor = this.hovered = null;
    this.tip.hidden = true;
    this.match();
    this.measure();
    const zoomed = path.length ? this.follow(path) : null;
    this.zoom(zoomed, false);
    this.recolour();
    this.say();
  }

  text(box) {
    return box.frame < 0 ? "all" : this.tree.texts[box.frame];
  }

  /** The name as it is drawn: marked if part of the samples are divided among stacks. */
  label(box) {
    return this.picture.divided(box) >= FLAME_MARKED ? `~ ${this.text(box)}` : this.text(box);
  }

  path(box) {
    const texts = [];
    for (let at = box; at && at.above; at = at.above) texts.unshift(this.text(at));
    return texts;
  }

  follow(path) {
    let at = this.picture.root;
    for (const text of path) {
      const next = this.picture.on(at).find((each) => this.text(each) === text && each.value);
      if (!next) return at;
      at = next;
    }
    return at;
  }

  /** How many rows there are, up and down: as deep as the tree is, at most. */
  measure() {
    const { tree, picture } = this;
    let below = 0, above = 0;
    if (picture.up) {
      const first = picture.root.nodes;
      for (const node of first) {
        above = Math.max(above, tree.depth[node] - 1);
        for (let each = node; each < tree.end[node]; each++)
          if (picture.sums.total[each]) below = Math.max(below, tree.depth[each] - tree.depth[node]);
      }
    } else {
      for (let node = 0; node < tree.size; node++)
        if (picture.sums.total[node]) below = Math.max(below, tree.depth[node]);
    }
    this.above = above;
    this.rows = above + below + 1;
    this.spacer.style.height = `${this.rows * FLAME_ROW + 1}px`;
    this.resized();
    if (picture.up) this.scroller.scrollTop = above * FLAME_ROW - this.scroller.clientHeight / 2;
  }

  resized() {
    const ratio = window.devicePixelRatio || 1;
    this.width = this.scroller.clientWidth;
    this.height = this.scroller.clientHeight;
    this.canvas.style.width = `${this.width}px`;
    this.canvas.style.height = `${this.height}px`;
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    this.ratio = ratio;
    this.draw();
  }

  // ---- colours

  recolour() {
    const { model, tree } = this;
    const reason = (index) => colour(`--reason-${index}`);
    const plain = { fill: colour("--frame-plain"), ink: colour("--ink") };
    this.theme = {
      page: colour("--panel"), line: colour("--panel"), plain, ring: colour("--accent"),
      match: { fill: colour("--match"), ink: colour("--match-ink") }, all: { fill: colour("--frame-all"), ink: colour("--ink") },
    };
    const inked = (fill) => ({ fill, ink: inkOn(fill) });
    this.kindColours = model.kinds.map((_, kind) => ({ fill: colour(`--kind-${kind}`), ink: colour(`--kind-ink-${kind}`) }));
    this.reasonColours = model.reasons.map((_, index) => inked(reason(index)));
    this.weights = new Map(); // samples of modules
    const own = this.picture.sums.own;
    const used = new Set();
    for (let node = 1; node < tree.size; node++) {
      if (!this.picture.sums.total[node]) continue;
      const frame = tree.frame[node], module = tree.modules[frame];
      used.add(tree.kinds[frame]);
      if (module) this.weights.set(module, (this.weights.get(module) || 0) + own[node] + 1e-9 * this.picture.sums.total[node]);
    }
    const ranked = [...this.weights].sort((a, b) => b[1] - a[1]).map(([module]) => module);
    this.moduleColours = new Map(ranked.map((module, rank) => [module, rank < OTHER_MODULES ? inked(reason(rank)) : plain]));
    const coloured = this.source === "stalls" || this.colouring !== "reason" ? this.colouring : "kind";
    this.colouringNow = coloured;
    const items =
      coloured === "kind" ? model.kinds.map((name, kind) => [name, this.kindColours[kind], used.has(kind)])
      : coloured === "reason" ? model.reasons.map((name, index) => [name, this.reasonColours[index], this.picture.reasons(this.picture.root)[index] > 0])
      : [...ranked.slice(0, OTHER_MODULES).map((module) => [model.modules[module], this.moduleColours.get(module), true]),
        ["others", plain, ranked.length > OTHER_MODULES]];
    this.parts.legend.replaceChildren(...items.filter(([, , there]) => there).map(([name, { fill }]) => {
      const item = made("li", "", name), patch = made("i");
      patch.style.background = fill;
      item.prepend(patch);
      return item;
    }));
    this.draw();
  }

  colours(box) {
    if (box.frame < 0) return this.theme.all;
    if (this.found) return this.found[box.frame] ? this.theme.match : this.theme.plain;
    if (this.colouringNow === "kind") return this.kindColours[this.tree.kinds[box.frame]];
    if (this.colouringNow === "reason") return this.reasonColours[this.picture.mainReason(box)];
    return this.moduleColours.get(this.tree.modules[box.frame]) || this.theme.all;
  }

  // ---- drawing

  /** Draws soon: once, however often it is asked for until then. */
  draw() {
    this.pending ||= requestAnimationFrame(() => {
      this.pending = 0;
      this.drawNow();
    });
  }

  drawNow() {
    if (!this.theme || !this.width) return;
    const begun = performance.now();
    const { context, picture, scroller } = this;
    const [from, to] = this.view;
    this.scale = this.width / (to - from || 1);
    this.top = scroller.scrollTop;
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    context.fillStyle = this.theme.page;
    context.fillRect(0, 0, this.width, this.height);
    context.font = `${FLAME_TEXT}px ${colour("--mono") || "monospace"}`;
    context.textBaseline = "middle";
    this.letter ||= context.measureText("0".repeat(100)).width / 100;
    this.drawn = 0;
    this.drawBox(picture.root);
    if (picture.up) for (const each of picture.on(picture.up)) this.drawBox(each);
    for (const [box, wide] of [[picture.up && picture.root, 2], [this.hovered, 1], [document.activeElement === this.canvas ? this.cursor : null, 2]])
      if (box) this.outline(box, wide);
    this.lastDrawing = performance.now() - begun; // ms, for tests
  }

  /** Where a box is on the canvas: left, top and width. */
  place(box) {
    return [(box.begin - this.view[0]) * this.scale, (box.depth + this.above) * FLAME_ROW - this.top, box.value * this.scale];
  }

  drawBox(box) {
    const [left, top, width] = this.place(box);
    if (width < FLAME_LEAST || left > this.width || left + width < 0) return;
    const begin = Math.max(left, 0), end = Math.min(left + width, this.width);
    if (top > -FLAME_ROW && top < this.height) {
      const { context } = this;
      const { fill, ink } = this.colours(box);
      const gap = end - begin > 2.5 ? 1 : 0;
      context.fillStyle = fill;
      context.fillRect(begin, top, end - begin - gap, FLAME_ROW - 1);
      const letters = Math.floor((end - begin - 8) / this.letter);
      if (letters >= 3) {
        const text = this.label(box);
        context.fillStyle = ink;
        const cut = text[0] === "/" ? `…${text.slice(1 - letters)}` : `${text.slice(0, letters - 1)}…`;
        const shown = text.length <= letters ? text : cut; // of a path, its end
        context.fillText(shown, begin + 4, top + FLAME_ROW / 2, end - begin - 6);
      }
      this.drawn++;
    }
    if (box.depth < 0 ? top > 0 : top < this.height) for (const each of this.picture.on(box)) this.drawBox(each);
  }

  outline(box, wide) {
    const [left, top, width] = this.place(box);
    const begin = Math.max(left, 0), end = Math.min(left + width, this.width);
    this.context.strokeStyle = wide > 1 ? this.theme.ring : this.theme.plain.ink;
    this.context.lineWidth = wide;
    this.context.strokeRect(begin + 0.5, top + 0.5, Math.max(end - begin - 2, 1), FLAME_ROW - 2);
  }

  /** The box at a place on the canvas. */
  at(x, y) {
    const row = Math.floor((y + this.scroller.scrollTop) / FLAME_ROW) - this.above;
    const samples = this.view[0] + x / this.scale;
    let box = row < 0 ? this.picture.up : this.picture.root;
    if (!box || samples < box.begin || samples >= box.begin + box.value) return null;
    while (box.depth !== row) {
      box = this.picture.on(box).find((each) => samples >= each.begin && samples < each.begin + each.value);
      if (!box || box.value * this.scale < FLAME_LEAST) return null;
    }
    return box;
  }

  // ---- zoom and pan

  /** Shows a box and what is on it over the whole width; null: everything. */
  zoom(box, smoothly = true) {
    const target = box || this.picture.root;
    this.zoomed = target === this.picture.root ? null : target;
    this.parts.reset.disabled = !this.zoomed;
    const goal = [target.begin, target.begin + (target.value || 1)];
    const from = this.view.slice(), begun = performance.now();
    cancelAnimationFrame(this.moving);
    if (!smoothly || matchMedia("(prefers-reduced-motion: reduce)").matches) {
      this.view = goal;
      this.draw();
    } else {
      const step = (now) => {
        const done = Math.min(Math.max((now - begun) / 160, 0), 1), eased = 1 - (1 - done) ** 3;
        this.view = done === 1 ? goal : from.map((each, i) => each + (goal[i] - each) * eased);
        this.drawNow();
        if (done < 1) this.moving = requestAnimationFrame(step);
      };
      this.moving = requestAnimationFrame(step);
    }
    this.describe(this.cursor);
  }

  /** Moves the view so that it stays within all samples. */
  see(from, width) {
    const whole = this.picture.root.value || 1;
    const wide = Math.min(Math.max(width, whole / 1e9), whole);
    const begin = Math.min(Math.max(from, 0), whole - wide);
    cancelAnimationFrame(this.moving);
    this.view = [begin, begin + wide];
    this.parts.reset.disabled = wide === whole;
    this.draw();
  }

  wheel(event) {
    const [from, to] = this.view, width = to - from;
    if (event.ctrlKey || event.metaKey) {
      const factor = Math.exp(Math.max(Math.min(event.deltaY, 100), -100) * 0.005);
      const x = event.offsetX / this.width;
      this.see(from + width * x * (1 - factor), width * factor);
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      this.see(from + ((event.shiftKey ? event.deltaY || event.deltaX : event.deltaX) / this.width) * width, width);
    } else return; // the page scrolls
    event.preventDefault();
  }

  grab(event) {
    if (event.button !== 0) return;
    const { canvas } = this;
    const x = event.offsetX, [from, to] = this.view;
    const box = this.at(x, event.offsetY);
    let dragged = false;
    const move = (moved) => {
      if (moved.pointerId !== event.pointerId) return;
      dragged ||= Math.abs(moved.offsetX - x) > 4;
      if (dragged && moved.pointerType !== "touch") this.see(from - ((moved.offsetX - x) / this.width) * (to - from), to - from);
    };
    const done = (ended) => {
      canvas.removeEventListener("pointermove", move);
      canvas.removeEventListener("pointerup", done);
      canvas.removeEventListener("pointercancel", done);
      if (ended.type === "pointerup" && !dragged && box) this.enter(box);
    };
    canvas.setPointerCapture(event.pointerId);
    canvas.addEventListener("pointermove", move);
    canvas.addEventListener("pointerup", done);
    canvas.addEventListener("pointercancel", done);
  }

  /** Zooms to a box and goes there. */
  enter(box) {
    this.cursor = box;
    this.zoom(box);
  }

  /** The kernel that a box is; null: it is none. */
  kernelOf(box) {
    return box && this.source === "stalls" && this.model.kernels.includes(this.text(box)) ? this.text(box) : null;
  }

  /** One function: who calls it, and what it calls. */
  sandwich(box) {
    if (box.frame >= 0) this.show({ focus: this.text(box) });
  }

  // ---- search

  find(text) {
    this.search = text;
    if (this.parts.search.value !== text) this.parts.search.value = text;
    this.match();
    this.draw();
    this.say();
  }

  match() {
    this.found = null;
    this.parts.clear.hidden = this.parts.share.hidden = !this.search;
    if (!this.search) return;
    let matches;
    try {
      const pattern = new RegExp(this.search, "i");
      matches = (text) => pattern.test(text);
    } catch { // half a regular expression, or a name with brackets
      const text = this.search.toLowerCase();
      matches = (other) => other.toLowerCase().includes(text);
    }
    this.found = Uint8Array.from(this.tree.texts, (text) => (matches(text) ? 1 : 0));
    this.matched = this.picture.matching(this.found);
    const frames = this.found.reduce((sum, each) => sum + each, 0);
    this.parts.share.textContent = `${percentOf(this.matched, this.picture.total)} matched, ${several(frames, "name")}`;
  }

  // ---- words

  unit(count) {
    return this.source === "stalls" ? several(count, "sample") : several(count, "CPU sample");
  }

  /** The line above the picture: what it is, and of which samples. */
  say() {
    const { parts, model, picture } = this;
    const what = this.source !== "stalls" ? "What the CPUs did" : model.active ? "What the GPU's threads did" : "Where the GPU's threads waited";
    const how = this.focus !== null
      ? `Above ${this.focus}: who calls it. Below: what it calls.`
      : this.inverted
        ? "The top row is where samples ended; below each frame stand its callers."
        : this.source === "stalls"
          ? "From the process at the top through the code that launched a kernel down to its instructions and why they waited. Wider means more samples."
          : "From the process at the top down to the function that ran. Wider means more samples.";
    const samples = this.focus === null
      ? this.unit(picture.total)
      : `${this.unit(picture.root.value)} of ${counted(picture.total)}, ${percentOf(picture.root.value, picture.total)}`;
    const active = this.source === "stalls" && model.active ? picture.reasons(picture.root)[model.activeReason] : 0;
    const share = active ? `, ${percentOf(active, picture.root.value)} active` : "";
    const when = `${model.selection ? range(model.selection) : "whole recording"}: ${samples}${share}`;
    parts.divided.hidden = this.source !== "stalls" || !model.divided.length;
    parts.activity.hidden = this.source !== "stalls" || model.activeReason < 0;
    parts.caption.replaceChildren(made("b", "", `${what}, ${when}. `), how);
    parts.whole.hidden = !model.selection;
    parts.leave.hidden = this.focus === null;
    for (const button of parts.sources.querySelectorAll("button")) press(button, button.value === this.source);
    for (const button of parts.order.querySelectorAll("button"))
      press(button, this.focus === null && (button.value === "inverted") === this.inverted);
    parts.colouring.value = this.colouring;
    parts.colouring.querySelector("[value=reason]").disabled = this.source !== "stalls";
    this.canvas.setAttribute("aria-label", `Flame graph. ${parts.caption.textContent} Arrow keys move, Enter zooms, S shows callers and callees.`);
  }

  /** All that is to be said of a box: lines of text, the name first. */
  about(box) {
    const { picture } = this;
    const lines = [`${this.unit(box.value)}, ${percentOf(box.value, picture.total)}`];
    const own = picture.own(box);
    if (own && own !== box.value) lines.push(`in itself ${counted(own)}, ${percentOf(own, picture.total)}`);
    const divided = picture.divided(box);
    if (divided >= FLAME_MARKED) lines.push(`of which ${percentOf(divided, 1)} divided among stacks (~)`);
    if (box.frame >= 0) {
      const kind = this.model.kinds[this.tree.kinds[box.frame]];
      const module = this.model.modules[this.tree.modules[box.frame]];
      lines.push([kind, this.tree.places[box.frame] || module].filter(Boolean).join(" · "));
    }
    if (this.source === "stalls") {
      const by = [...picture.reasons(box)].map((count, reason) => [count, reason]).filter(([count]) => count);
      by.sort((a, b) => b[0] - a[0]);
      const top = by.slice(0, 3).map(([count, reason]) => `${this.model.reasons[reason]} ${percentOf(count, box.value)}`);
      if (top.length) lines.push(top.join(", "));
    }
    return [this.text(box), ...lines];
  }

  describe(box) {
    const { details, sandwich, kernel } = this.parts;
    const shown = box || this.zoomed;
    sandwich.disabled = !shown || shown.frame < 0;
    kernel.hidden = this.kernelOf(shown) === null;
    if (!shown) {
      details.textContent = "Click a frame to zoom in; drag to pan; Ctrl and wheel to zoom. Keys: arrows, Enter, Escape, S, /";
      return;
    }
    const [name, ...lines] = this.about(shown);
    details.replaceChildren(made("b", "", name), ` ${lines.join(" · ")}`);
  }

  hover(event) {
    if (event.pointerType !== "touch" && !event.buttons) this.hoverAt(this.at(event.offsetX, event.offsetY), event);
  }

  hoverAt(box, event) {
    if (box !== this.hovered) {
      this.hovered = box;
      this.canvas.style.cursor = box ? "pointer" : "default";
      this.tip.hidden = !box;
      if (box) {
        const [name, ...lines] = this.about(box);
        this.tip.replaceChildren(made("b", "", name), ...lines.map((line) => made("span", "", line)));
      }
      this.draw();
    }
    if (!box) return;
    const { offsetWidth: width, offsetHeight: height } = this.tip;
    const left = Math.min(event.clientX + 12, innerWidth - width - 8);
    const below = event.clientY + 18 + height < innerHeight;
    this.tip.style.left = `${Math.max(left, 8)}px`;
    this.tip.style.top = `${below ? event.clientY + 18 : event.clientY - height - 12}px`;
  }

  // ---- keyboard

  /** Goes to a box: it is told, and scrolled and panned to. */
  goto(box) {
    this.cursor = box;
    this.describe(box);
    const top = (box.depth + this.above) * FLAME_ROW, { scroller } = this;
    if (top < scroller.scrollTop) scroller.scrollTop = top;
    if (top + FLAME_ROW > scroller.scrollTop + this.height) scroller.scrollTop = top + FLAME_ROW - this.height;
    const [from, to] = this.view;
    if (box.begin + box.value <= from || box.begin >= to) this.see(box.begin, to - from);
    this.draw();
  }

  key(event) {
    const { picture } = this;
    const at = this.cursor || this.zoomed || picture.root;
    const on = (box) => picture.on(box).filter((each) => each.value);
    const siblings = at.above ? on(at.above) : at.depth ? on(picture.up) : [at];
    const place = siblings.indexOf(at);
    const moves = {
      ArrowRight: () => siblings[place + 1],
      ArrowLeft: () => siblings[place - 1],
      ArrowDown: () => (at.depth < 0 ? (at.above === picture.up ? picture.root : at.above) : on(at)[0]),
      ArrowUp: () => (at.depth < 0 ? on(at)[0] : at.above || (picture.up && on(picture.up)[0])),
      Home: () => picture.root,
    };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (moves[event.key]) {
      const next = moves[event.key]();
      if (next) this.goto(next);
    } else if (event.key === "Enter") this.enter(at);
    else if (event.key === "s" || event.key === "S") this.sandwich(at);
    else if (event.key === "Escape") this.back();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  /** One step back: from a search, a zoom, one function, a range. */
  back() {
    const whole = this.picture.root.value || 1;
    if (this.search) this.find("");
    else if (this.view[1] - this.view[0] < whole) this.cursor = null, this.zoom(null);
    else if (this.focus !== null) this.show({ focus: null });
    else this.model.select(null);
  }
}

function press(button, pressed) {
  button.setAttribute("aria-pressed", pressed);
}

/** Black or white, whichever can be read better on a colour (#rrggbb). */
function inkOn(fill) {
  const [red, green, blue] = [1, 3, 5].map((at) => {
    const share = parseInt(fill.slice(at, at + 2), 16) / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? "#000" : "#fff"; // where both contrasts are one (WCAG)
}
