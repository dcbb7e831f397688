// The same stacks as a tree to open and close. Frames of groups that are left out share a row, until they are asked for.

const CALL_ROW = 24, CALL_HEAD = 28; // px
const FEW_CALLS = 40, LEAST_CALL = 0.02; // how many rows are open at first, and the least share of samples of those that are
const BRANCH = 16, CHAIN = 5, DEEPEST_INDENT = 420; // px: of one of several callees, of the only one
const NARROW_TREE = 600; // px: rows are less indented

class CallTree {
  constructor(flame, element) {
    this.flame = flame;
    this.element = element;
    const get = (name) => element.querySelector(`[data-part=${name}]`);
    [this.list, this.body] = [get("rows"), get("body")];
    this.rows = []; // entries that are shown
    this.selected = null;
    this.list.onscroll = () => this.draw();
    this.list.onkeydown = (event) => this.key(event);
    this.list.onfocus = () => {
      if (!this.selected && this.rows.length) this.select(this.rows[0]);
    };
    this.body.onclick = (event) => this.click(event, false);
    this.body.ondblclick = (event) => this.click(event, true);
    new ResizeObserver(() => this.draw()).observe(this.list);
  }

  /** Begins anew with the flame graph's picture. */
  renew() {
    const { flame } = this;
    this.element.hidden = flame.viewed !== "tree";
    this.selected = null;
    this.rows = [];
    if (this.element.hidden) return;
    this.hidden = flame.groups.among(flame.tree, flame.hidden.tree);
    const { root, up } = flame.picture;
    this.top = up
      ? [this.entry(root, null, false, "calls"), this.entry(up, null, false, "is called by")]
      : this.entries(flame.picture.on(root), null, false);
    this.flatten();
    this.openLargest();
    this.list.scrollTop = 0;
  }

  // ---- entries: a frame, or frames that share a row

  entry(box, above, revealed, label = "") {
    return { box, above, revealed, label, value: box.value, order: box.order, group: null, next: null, open: false };
  }

  /** Entries for boxes below an entry; `revealed`: frames that are left out have rows of their own. */
  entries(boxes, above, revealed) {
    const found = [], left = [];
    for (const box of boxes) {
      if (!box.value) continue;
      const hidden = this.hidden[box.frame];
      if (hidden && !revealed) left.push(box);
      else found.push(this.entry(box, above, revealed && Boolean(hidden)));
    }
    if (left.length) found.push(this.grouped(left, above));
    return found.sort((a, b) => b.order - a.order);
  }

  /** The entry of some frames that are left out, and of what is left out on them. */
  grouped(left, above) {
    const { picture } = this.flame;
    const group = { boxes: left, all: new Set(), shown: [], own: 0 };
    const waiting = left.slice();
    while (waiting.length) {
      const box = waiting.pop();
      group.all.add(box);
      group.own += picture.own(box);
      for (const each of picture.on(box))
        if (each.value) (this.hidden[each.frame] ? waiting : group.shown).push(each);
    }
    const sum = (key) => left.reduce((total, box) => total + box[key], 0);
    return { box: null, above, revealed: false, label: "", value: sum("value"), order: sum("order"), group, next: null, open: false };
  }

  /** What stands below an entry. */
  below(entry) {
    if (!entry.next) {
      const boxes = entry.group ? entry.group.shown : this.flame.picture.on(entry.box);
      entry.next = this.entries(boxes, entry, entry.revealed);
    }
    return entry.next;
  }

  indent(entries, above) {
    const left = above ? Math.min(above.indent + (entries.length > 1 ? BRANCH : CHAIN), DEEPEST_INDENT) : 0;
    for (const each of entries) Object.assign(each, { indent: left, level: above ? above.level + 1 : 1 });
  }

  flatten() {
    this.rows = [];
    const waiting = this.top.slice().reverse();
    this.indent(this.top, null);
    while (waiting.length) {
      const entry = waiting.pop();
      if (entry.open) this.indent(this.below(entry), entry);
      entry.row = this.rows.length;
      this.rows.push(entry);
      if (entry.open) waiting.push(...this.below(entry).slice().reverse());
    }
    this.body.style.height = `${this.rows.length * CALL_ROW}px`;
    this.list.setAttribute("aria-rowcount", this.rows.length);
    this.draw();
  }

  openLargest() {
    const least = LEAST_CALL * this.flame.picture.total;
    for (let entry; this.rows.length < FEW_CALLS; entry.open = true, this.flatten()) {
      const closed = this.rows.filter((each) => !each.open && each.value >= least && this.below(each).length);
      if (!closed.length) return;
      entry = closed.reduce((most, each) => (each.value > most.value ? each : most));
    }
  }

  toggle(entry, open = !entry.open) {
    entry.open = open && this.below(entry).length > 0;
    this.flatten();
  }

  /** Opens an entry and all below it, unless there are too many. */
  openAll(entry, most = 5000) {
    const waiting = [entry];
    for (let opened = 0; waiting.length && opened < most; opened++) {
      const each = waiting.shift();
      each.open = this.below(each).length > 0;
      waiting.push(...this.below(each));
    }
    this.flatten();
  }

  /** Gives frames that share a row their own. */
  reveal(entry) {
    const siblings = entry.above ? entry.above.next : this.top;
    const made = this.entries(entry.group.boxes, entry.above, true);
    siblings.splice(siblings.indexOf(entry), 1, ...made);
    const known = new Map(this.below(entry).map((each) => [each.box, each])), waiting = made.slice();
    while (waiting.length) { // what was open stays open
      const each = waiting.pop();
      each.open = entry.open && this.below(each).length > 0;
      this.below(each).forEach((below, index) => {
        if (below.revealed) waiting.push(below);
        else if (known.has(below.box)) each.next[index] = Object.assign(known.get(below.box), { above: each });
      });
    }
    this.flatten();
    this.select(made[0]);
    return made;
  }

  /** Opens the way to a box of the picture, and selects it. */
  goto(box) {
    const path = [];
    for (let at = box; at && at.above; at = at.above) path.unshift(at);
    let entries = this.top, at = null;
    for (const each of path) {
      if (at && at.group && at.group.all.has(each) && each !== box) continue;
      let next = entries.find((entry) => entry.box === each);
      const group = next ? null : entries.find((entry) => entry.group && entry.group.all.has(each));
      if (group && each === box) next = this.reveal(group).find((entry) => entry.box === each);
      next ||= group;
      if (!next) break;
      if (at) at.open = true;
      at = next;
      entries = this.below(at);
    }
    this.flatten();
    if (at) this.select(at);
  }

  select(entry) {
    const { flame } = this;
    this.selected = entry;
    flame.cursor = entry.box;
    flame.describe(entry.box);
    if (entry.group) flame.parts.details.replaceChildren(...this.saidOf(entry));
    const top = entry.row * CALL_ROW, { list } = this;
    if (top < list.scrollTop) list.scrollTop = top;
    const room = list.clientHeight - CALL_HEAD - CALL_ROW;
    if (top > list.scrollTop + room) list.scrollTop = top - room;
    this.draw();
    flame.model.tell("shown");
  }

  // ---- rows

  draw() {
    if (this.element.hidden) return;
    this.pending ||= requestAnimationFrame(() => {
      this.pending = 0;
      this.drawNow();
    });
  }

  /** Makes the rows that can be seen; on paper, all of them. */
  drawNow(all = false) {
    if (this.element.hidden || !this.flame.theme) return;
    const { list, rows } = this;
    const first = all ? 0 : Math.max(Math.floor(list.scrollTop / CALL_ROW) - 5, 0);
    const last = all ? rows.length : Math.min(first + Math.ceil(list.clientHeight / CALL_ROW) + 10, rows.length);
    this.body.replaceChildren(...rows.slice(first, last).map((entry) => this.line(entry)));
    if (this.selected) list.setAttribute("aria-activedescendant", `call-${this.selected.row}`);
    else list.removeAttribute("aria-activedescendant");
  }

  line(entry) {
    const { flame } = this, { picture, tree } = flame;
    const line = made("div", "call"), { box, group } = entry;
    line.id = `call-${entry.row}`;
    line.style.top = `${entry.row * CALL_ROW}px`;
    line.setAttribute("role", "row");
    line.setAttribute("aria-level", entry.level);
    line.setAttribute("aria-rowindex", entry.row + 1);
    line.setAttribute("aria-selected", entry === this.selected);
    const opens = this.below(entry).length > 0;
    if (opens) line.setAttribute("aria-expanded", entry.open);
    const own = group ? group.own : picture.own(box);
    const bar = made("span", "call-bar"), of = Math.max(picture.total, 1);
    for (const [part, name] of [[entry.value, "call-all"], [own, "call-self"]]) {
      if (!part) continue;
      const fill = made("i", name);
      fill.style.width = `${(100 * part) / of}%`;
      bar.append(fill);
    }
    const name = made("span", "call-name");
    name.style.paddingLeft = `${entry.indent * (this.list.clientWidth < NARROW_TREE ? 0.4 : 1)}px`;
    name.append(made("i", opens ? "call-opener" : "call-end"));
    if (group) {
      const show = made("button", "call-reveal", "show");
      show.type = "button";
      show.tabIndex = -1;
      name.append(made("span", "call-hidden", this.title(entry)), show);
    } else {
      const patch = made("i", "call-patch"), text = made("b", "", labelled(flame.text(box), picture, box));
      patch.style.background = flame.theme.of(box).fill;
      if (flame.found && flame.found[box.frame]) text.className = "call-match";
      if (entry.revealed) text.classList.add("call-revealed");
      name.append(patch, text, made("span", "call-label", entry.label));
    }
    const where = box && box.frame >= 0 ? tree.places[box.frame] || flame.model.modules[tree.modules[box.frame]] : "";
    const cells = [made("span", "call-share", percentOf(entry.value, picture.total)), bar, made("span", "call-samples", flame.number(entry)),
      made("span", "call-own", own ? percentOf(own, picture.total) : ""), name, made("span", "call-where")];
    if (where) cells[5].append(made("bdi", "", where)); // which is cut at its beginning
    for (const cell of cells) cell.setAttribute("role", "gridcell");
    name.title = group ? "" : flame.text(box);
    line.append(...cells);
    return line;
  }

  title({ group }) {
    const { flame } = this, numbers = flame.groups.of(flame.tree);
    const names = new Set(Array.from(group.all, (box) => FRAME_GROUPS[numbers[box.frame]].name));
    return `${several(group.all.size, "frame")} of ${[...names].join(", ")}`;
  }

  saidOf(entry) {
    const { flame } = this;
    const names = [...new Set(Array.from(entry.group.all, (box) => flame.text(box)))];
    const some = names.slice(0, 6).join(", ") + (names.length > 6 ? `, and ${counted(names.length - 6)} more` : "");
    return [made("b", "", this.title(entry)), ` ${flame.unit(entry.value)}, ${percentOf(entry.value, flame.picture.total)} · ${some}`];
  }

  // ---- mouse and keyboard

  click(event, twice) {
    const line = event.target.closest(".call");
    const entry = line && this.rows[Number(line.id.slice(5))];
    if (!entry) return;
    this.list.focus({ preventScroll: true });
    if (event.target.closest(".call-reveal")) this.reveal(entry);
    else if (!twice || event.target.closest(".call-opener")) {
      this.select(entry);
      if (event.target.closest(".call-opener") && !twice) this.toggle(entry);
    } else this.toggle(entry);
  }

  key(event) {
    const { rows, flame } = this, at = this.selected;
    if (event.ctrlKey || event.metaKey || event.altKey || !rows.length) return;
    const page = Math.max(Math.floor(this.list.clientHeight / CALL_ROW) - 1, 1);
    const row = at ? at.row : -1;
    const steps = { ArrowDown: row + 1, ArrowUp: row - 1, Home: 0, End: rows.length - 1, PageDown: row + page, PageUp: row - page };
    if (event.key in steps) this.select(rows[Math.min(Math.max(steps[event.key], 0), rows.length - 1)]);
    else if (event.key === "Escape") flame.back();
    else if (!at) return;
    else if (event.key === "ArrowRight") {
      if (at.open) this.select(rows[row + 1]);
      else this.toggle(at, true);
    } else if (event.key === "ArrowLeft") {
      if (at.open) this.toggle(at, false);
      else if (at.above) this.select(at.above);
    } else if (event.key === "Enter" || event.key === " ") {
      if (at.group) this.reveal(at);
      else this.toggle(at);
    } else if (event.key === "*") this.openAll(at);
    else if ((event.key === "s" || event.key === "S") && at.box) flame.sandwich(at.box);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  /** Selects the next row that matches the search, and opens the way to it. */
  nextMatch() {
    const { found } = this.flame;
    if (!found) return;
    const waiting = this.top.slice().reverse();
    let passed = this.selected === null, first = null;
    while (waiting.length) {
      const entry = waiting.pop();
      const boxes = entry.group ? entry.group.all : [entry.box];
      if ([...boxes].some((box) => box.frame >= 0 && found[box.frame])) {
        if (passed && entry !== this.selected) return this.show(entry);
        first ||= entry;
      }
      passed ||= entry === this.selected;
      waiting.push(...this.below(entry).slice().reverse());
    }
    if (first) this.show(first);
  }

  show(entry) {
    for (let above = entry.above; above; above = above.above) above.open = true;
    this.flatten();
    this.select(entry);
  }
}
