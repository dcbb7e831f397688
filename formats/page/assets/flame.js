const FLAME_ROW = 18, FLAME_TEXT = 11, FLAME_LEAST = 0.5; // px
const HIGHEST_ON_PAPER = 2400; // px

class Flame {
  constructor(model, element) {
    this.model = model;
    this.source = model.first.source;
    this.inverted = model.first.inverted;
    this.colouring = model.first.colouring;
    this.focus = null; // the function of a sandwich view, by its text
    this.viewed = "graph"; // or "tree"
    this.upward = false; // the root is at the bottom
    this.groups = new FrameGroups(model);
    // Groups of frames that are left out of the graph, and those whose frames the tree shows as one row.
    this.hidden = { graph: new Set(), tree: new Set(FRAME_GROUPS.slice(1).map((group) => group.key)) };
    this.search = "";
    this.found = null; // frames that match: Uint8Array
    this.cursor = null; // the box that the keyboard is at
    this.hovered = null;
    this.zoomed = null;
    this.view = [0, 1]; // samples from and to which the canvas shows
    this.build(element);
    this.input = new FlameInput(this);
    for (const event of ["selection", "active"]) model.on(event, () => this.renew());
    model.on("theme", () => [this.resized(), this.recolour()]);
    this.calls = new CallTree(this, element.querySelector("[data-part=calls]"));
    new ResizeObserver(() => this.resized()).observe(this.scroller);
    this.renew();
  }

  // ---- the elements around the canvas

  build(element) {
    const get = (name) => element.querySelector(`[data-part=${name}]`);
    this.parts = Object.fromEntries(
      ["sources", "views", "order", "direction", "groups", "colouring", "search", "clear", "share", "reset",
        "caption", "legend", "details", "sandwich", "kernel", "leave"].map((name) => [name, get(name)]));
    this.notes = new SampleNotes(this.model, element);
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
    for (const button of parts.views.querySelectorAll("button")) button.onclick = () => this.look(button.value);
    for (const button of parts.direction.querySelectorAll("button"))
      button.onclick = () => this.turn(button.value === "flames");
    parts.colouring.onchange = () => this.show({ colouring: parts.colouring.value });
    parts.search.oninput = () => this.find(parts.search.value);
    parts.search.onkeydown = (event) => {
      if (event.key === "Escape") this.find(""), canvas.focus(), event.stopPropagation();
      if (event.key === "Enter") (this.viewed === "tree" ? this.calls.nextMatch() : canvas.focus());
    };
    parts.clear.onclick = () => this.find("");
    parts.reset.onclick = () => this.zoom(null);
    parts.sandwich.onclick = () => this.sandwich(this.cursor || this.zoomed);
    parts.kernel.onclick = () => this.model.selectKernel(this.kernelOf(this.cursor || this.zoomed));
    parts.leave.onclick = () => this.show({ focus: null });
    this.scroller.onscroll = () => this.draw();
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
    this.model.tell("shown");
  }

  /** Changes to the graph or to the tree, and to the same frame there. */
  look(viewed) {
    if (viewed === this.viewed) return;
    const path = this.path(this.cursor || this.zoomed);
    this.viewed = viewed;
    this.renew(true);
    if (path.length) {
      const box = this.follow(path);
      if (viewed === "tree") this.calls.goto(box);
      else this.enter(box);
    }
    this.model.tell("shown");
  }

  /** Has the root at the bottom, or at the top. */
  turn(upward) {
    this.upward = upward;
    this.measure();
    this.say();
    this.model.tell("shown");
  }

  /** Shows the frames of a group, or leaves them out. */
  leaveOut(key, out) {
    const keys = this.hidden[this.viewed];
    if (out) keys.add(key);
    else keys.delete(key);
    this.renew();
    this.model.tell("shown");
  }

  /** Makes the picture anew: other samples, another order. Keeps the zoom where the same stack is there. */
  renew(forget = false) {
    const path = forget ? [] : this.path(this.zoomed);
    const { tree, leaves } = this.model.chosen(this.source);
    this.tree = this.viewed === "tree" ? tree : this.groups.without(tree, this.hidden.graph);
    if (this.focus !== null && !this.tree.texts.includes(this.focus)) this.focus = null;
    this.picture = new Picture(this.tree, leaves, this.inverted, this.focus);
    this.cursor = this.hovered = null;
    this.tip.hidden = true;
    this.match();
    this.measure();
    const zoomed = path.length ? this.follow(path) : null;
    this.zoom(zoomed, false);
    this.recolour();
    this.say();
    this.calls.renew();
  }

  text(box) {
    return box.frame < 0 ? "all" : this.tree.texts[box.frame];
  }

  path(box) {
    const texts = [];
    for (let at = box; at && at.above; at = at.above) texts.unshift(this.text(at));
    return texts;
  }

  /** The box at the end of a path of texts, as far as it goes; frames of groups, which may be left out, are passed over. */
  follow(path) {
    let at = this.picture.root;
    const group = this.groups.of(this.tree);
    const passed = new Set(this.tree.texts.filter((_, frame) => group[frame]));
    for (const text of path) {
      let row = this.picture.on(at), next;
      while (row.length && !(next = row.find((each) => this.text(each) === text && each.value)))
        row = row.filter((each) => group[each.frame]).flatMap((each) => this.picture.on(each));
      if (!next && !passed.has(text)) return at;
      at = next || at;
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
    if (picture.up) this.scroller.scrollTop = (this.upward ? below : above) * FLAME_ROW - this.scroller.clientHeight / 2;
    else if (this.upward) this.scroller.scrollTop = this.rows * FLAME_ROW;
  }

  /** Fits the canvas into the scroller, or makes it as high as paper wants it. */
  resized(height = 0) {
    if (!height && document.documentElement.dataset.printing) return;
    const ratio = window.devicePixelRatio || 1;
    this.width = this.scroller.clientWidth;
    this.height = height || this.scroller.clientHeight;
    this.canvas.style.width = `${this.width}px`;
    this.canvas.style.height = `${this.height}px`;
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    this.ratio = ratio;
    this.draw();
  }

  /** Draws all of it, for a print. */
  forPaper() {
    this.resized(Math.min(this.rows * FLAME_ROW + 1, HIGHEST_ON_PAPER));
    this.drawNow();
    this.calls.drawNow(true);
  }

  // ---- colours

  recolour() {
    this.theme = this.chooseColours();
    this.parts.legend.replaceChildren(...this.theme.legend());
    this.draw();
    this.calls.draw();
  }

  chooseColours() {
    return new FrameColours(this.model, this.tree, this.picture, this.colouring);
  }

  colours(box) {
    if (this.found && box.frame >= 0) return this.found[box.frame] ? this.theme.match : this.theme.plain;
    return this.theme.of(box);
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
    if (!this.theme || !this.width || this.viewed === "tree") return;
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
    return [(box.begin - this.view[0]) * this.scale, this.topOf(box) - this.top, box.value * this.scale];
  }

  /** Pixels from the top of the picture to a box. */
  topOf(box) {
    const row = box.depth + this.above;
    return (this.upward ? this.rows - 1 - row : row) * FLAME_ROW;
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
        const text = labelled(this.text(box), this.picture, box);
        context.fillStyle = ink;
        const cut = text[0] === "/" ? `…${text.slice(1 - letters)}` : `${text.slice(0, letters - 1)}…`;
        const shown = text.length <= letters ? text : cut; // of a path, its end
        context.fillText(shown, begin + 4, top + FLAME_ROW / 2, end - begin - 6);
      }
      this.drawn++;
    }
    if (box.depth < 0 !== this.upward ? top > 0 : top < this.height) for (const each of this.picture.on(box)) this.drawBox(each);
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
    const fromTop = Math.floor((y + this.scroller.scrollTop) / FLAME_ROW);
    const row = (this.upward ? this.rows - 1 - fromTop : fromTop) - this.above;
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
    this.model.tell("shown");
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

  /** Zooms to a box and goes there. */
  enter(box, smoothly = true) {
    this.cursor = box;
    this.zoom(box, smoothly);
  }

  /** The kernel that a box is; null: it is none. */
  kernelOf(box) {
    return box && this.tree.gpu && this.model.kernels.includes(this.text(box)) ? this.text(box) : null;
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
    this.calls.draw();
    this.model.tell("shown");
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
    return several(count, this.tree.gpu ? "sample" : "CPU sample");
  }

  /** What a row of the call tree says beside its share. */
  number(entry) {
    return counted(entry.value);
  }

  /** The line above the picture: what it is, and of which samples. */
  say() {
    const { parts, model, picture } = this;
    const { gpu } = this.tree, what = this.notes.title(gpu);
    const active = gpu ? this.notes.share(picture, picture.reasons(picture.root)) : "";
    const [above, below] = this.upward ? ["Below", "Above"] : ["Above", "Below"];
    const how = this.focus !== null
      ? `${above} ${this.focus}: who calls it. ${below}: what it calls.`
      : this.inverted
        ? "From where samples ended to their callers."
        : this.tree.gpu
          ? "From the process through the launch of a kernel to its instructions and reasons."
          : "From the process to the function that ran.";
    const samples = this.focus === null
      ? this.unit(picture.total)
      : `${this.unit(picture.root.value)} of ${counted(picture.total)}, ${percentOf(picture.root.value, picture.total)}`;
    const when = `${model.selection ? range(model.selection) : "whole recording"}: ${samples}${active}`;
    this.notes.show(gpu);
    parts.caption.replaceChildren(made("b", "", `${what}, ${when}. `), made("span", "", how));
    parts.leave.hidden = this.focus === null;
    for (const button of parts.sources.querySelectorAll("button")) press(button, button.value === this.source);
    for (const button of parts.views.querySelectorAll("button")) press(button, button.value === this.viewed);
    for (const button of parts.direction.querySelectorAll("button"))
      press(button, (button.value === "flames") === this.upward);
    parts.direction.hidden = parts.reset.hidden = this.scroller.hidden = this.viewed === "tree";
    this.sayGroups();
    for (const button of parts.order.querySelectorAll("button"))
      press(button, this.focus === null && (button.value === "inverted") === this.inverted);
    parts.colouring.value = this.colouring;
    parts.colouring.querySelector("[value=reason]").disabled = !this.tree.gpu;
    this.canvas.setAttribute("aria-label", `Flame graph. ${parts.caption.textContent} Arrow keys move, Enter zooms, S shows callers and callees.`);
  }

  /** The groups that this recording has frames of, as switches. */
  sayGroups() {
    const keys = this.groups.present(this.model.chosen(this.source).tree);
    const { groups } = this.parts;
    const had = document.activeElement && groups.contains(document.activeElement) ? document.activeElement.value : null;
    groups.hidden = !keys.length;
    groups.replaceChildren(made("span", "", "Show"), ...FRAME_GROUPS.filter((group) => group && keys.includes(group.key)).map((group) => {
      const button = made("button", "", group.name), out = this.hidden[this.viewed].has(group.key);
      button.type = "button";
      button.value = group.key;
      button.title = `${group.title}${out ? "" : ": shown"}`;
      press(button, !out);
      button.onclick = () => this.leaveOut(group.key, !out);
      return button;
    }));
    if (had) (groups.querySelector(`[value=${had}]`) || this.canvas).focus();
  }

  /** All that is to be said of a box: lines of text, the name first. */
  about(box) {
    const { picture } = this;
    const lines = [`${this.unit(box.value)}, ${percentOf(box.value, picture.total)}`];
    const own = picture.own(box);
    if (own && own !== box.value) lines.push(`in itself ${counted(own)}, ${percentOf(own, picture.total)}`);
    const division = divisionOf(picture, box);
    if (division) lines.push(division);
    if (box.frame >= 0) {
      const kind = this.model.kinds[this.tree.kinds[box.frame]];
      const module = this.model.modules[this.tree.modules[box.frame]];
      lines.push([kind, this.tree.places[box.frame] || module].filter(Boolean).join(" · "));
    }
    if (this.tree.gpu) {
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
      details.textContent = this.viewed === "tree"
        ? "Click a row to select it, its triangle to open it. Press ? for all keys."
        : "Click a frame to zoom in, drag to pan. Press ? for all keys.";
      return;
    }
    const [name, ...lines] = this.about(shown);
    details.replaceChildren(made("b", "", name), ` ${lines.join(" · ")}`);
  }

  /** Goes to a box: it is told, and scrolled and panned to. */
  goto(box) {
    this.cursor = box;
    this.describe(box);
    const top = this.topOf(box), { scroller } = this;
    if (top < scroller.scrollTop) scroller.scrollTop = top;
    if (top + FLAME_ROW > scroller.scrollTop + this.height) scroller.scrollTop = top + FLAME_ROW - this.height;
    const [from, to] = this.view;
    if (box.begin + box.value <= from || box.begin >= to) this.see(box.begin, to - from);
    this.draw();
    this.model.tell("shown");
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
