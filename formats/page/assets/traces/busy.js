// The time that is shown, and the heat map of busy time: a row for each rank, a cell for each span of time.

const LEFT = 150, LEFT_NARROW = 84, NARROW = 700; // px beside pictures, for names

/** The part of the time that pictures show, in ns from the first slice's start on. */
class View {
  constructor(ns) {
    this.ns = ns;
    this.begin = 0;
    this.end = ns;
    this.listeners = [];
  }

  get whole() {
    return this.begin === 0 && this.end === this.ns;
  }

  on(fn) {
    this.listeners.push(fn);
  }

  tell() {
    for (const fn of this.listeners) fn();
  }

  /** Shows a range; without one, the whole time. */
  show(begin, end) {
    const length = Math.min(Math.max(end - begin, Math.min(100, this.ns)), this.ns) || this.ns;
    this.begin = begin === undefined ? 0 : Math.min(Math.max(begin, 0), this.ns - length);
    this.end = begin === undefined ? this.ns : this.begin + length;
    this.tell();
  }
}

/** A time or length with the unit that fits it. */
function inTime(ns, of = ns) {
  const units = [[1e9, "s"], [1e6, "ms"], [1e3, "us"]];
  const [scale, unit] = units.find(([each]) => Math.abs(of) >= each) || [1, "ns"];
  return `${(ns / scale).toLocaleString("en-US", { maximumFractionDigits: 3 })} ${unit}`;
}

/** The context of a canvas of this size, to write in. */
function lettered(canvas, width, height) {
  const context = sized(canvas, width, height);
  context.font = `11px ${colour("--sans") || "sans-serif"}`;
  context.textBaseline = "middle";
  return context;
}

const leftOf = (width) => (width < NARROW ? LEFT_NARROW : LEFT);

/** Times below a picture. */
function drawTimes(context, begin, end, left, width, y) {
  const wanted = (end - begin) / Math.max(Math.floor(width / 110), 1);
  const unit = 10 ** Math.floor(Math.log10(wanted));
  const step = [1, 2, 5, 10].map((factor) => factor * unit).find((each) => each >= wanted) || wanted;
  context.fillStyle = colour("--muted");
  context.textAlign = "left";
  for (let tick = Math.ceil(begin / step) * step; tick <= end; tick += step) {
    const x = left + ((tick - begin) / (end - begin)) * width;
    const text = inTime(Math.round(tick), end);
    context.fillRect(x, y, 1, 4);
    if (x + context.measureText(text).width <= left + width + 4) context.fillText(text, x + 3, y + 10);
  }
}

/** Puts a text into the space that there is. */
function fitted(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  let low = 0, high = text.length;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (context.measureText(`${text.slice(0, middle)}…`).width <= room) low = middle; else high = middle - 1;
  }
  return low ? `${text.slice(0, low)}…` : "";
}

function placeTip(tip, event, title, lines) {
  tip.hidden = false;
  tip.replaceChildren(made("b", "", title), ...lines.map((line) => made("span", "", line)));
  tip.style.left = `${Math.max(Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8), 8)}px`;
  tip.style.top = `${Math.max(Math.min(event.clientY + 18, innerHeight - tip.offsetHeight - 8), 8)}px`;
}

class BusyMap {
  constructor(view, described, element) {
    this.view = view;
    this.data = described;
    this.chosen = 0; // class
    this.cursor = null; // { row, bin } of the keyboard
    this.anchor = null; // bin where a range begins that has no end yet
    this.hovered = null;
    const get = (name) => element.querySelector(`[data-part=${name}]`);
    [this.canvas, this.around, this.says, this.tip, this.whole] = ["canvas", "around", "says", "tip", "whole"].map(get);
    this.scale = get("scale");
    this.buttons = described.classes.map((name, index) => {
      const button = made("button", "", name);
      button.type = "button";
      button.onclick = () => {
        this.chosen = index;
        this.paint();
      };
      return button;
    });
    get("classes").append(...this.buttons);
    this.whole.onclick = () => this.leave();
    this.canvas.onpointerdown = (event) => this.press(event);
    this.canvas.onpointermove = (event) => this.hover(event);
    this.canvas.onpointerleave = () => this.out();
    this.canvas.onkeydown = (event) => this.key(event);
    this.canvas.onfocus = this.canvas.onblur = () => this.draw();
    view.on(() => {
      this.say();
      this.draw();
    });
    new ResizeObserver(() => this.draw()).observe(this.around);
    this.paint();
    this.say();
  }

  percent(row, bin, of = this.chosen) {
    const { ranks, bins, arrays } = this.data;
    return arrays.percent[(of * ranks.length + row) * bins + bin];
  }

  /** Paints the cells, one pixel each, and their scale. */
  paint() {
    const { ranks, bins } = this.data, dark = isDark();
    this.buttons.forEach((button, index) => button.setAttribute("aria-pressed", String(index === this.chosen)));
    this.image = document.createElement("canvas");
    this.image.width = bins;
    this.image.height = Math.max(ranks.length, 1);
    const context = this.image.getContext("2d");
    const pixels = context.createImageData(bins, this.image.height);
    for (let row = 0; row < ranks.length; row++)
      for (let bin = 0; bin < bins; bin++) {
        const percent = this.percent(row, bin);
        if (percent) pixels.data.set([...heat(percent / 100, dark), 255], 4 * (row * bins + bin));
      }
    context.putImageData(pixels, 0, 0);
    const steps = [0, 0.25, 0.5, 0.75, 1].map((share) => `rgb(${heat(share, dark)})`);
    const bar = made("i", "heat-bar");
    bar.style.background = `linear-gradient(to right, ${steps})`;
    this.scale.replaceChildren("1 %", bar, "100 %");
    this.draw();
  }

  draw() {
    this.pending ||= requestAnimationFrame(() => {
      this.pending = 0;
      this.drawAll();
    });
  }

  drawAll() {
    const { ranks, bins } = this.data, room = this.around.clientWidth;
    this.cell = Math.max(Math.min(Math.floor(300 / Math.max(ranks.length, 1)), 22), 3);
    this.left = leftOf(room);
    this.width = Math.max(room - this.left - 1, 50);
    const height = this.cell * ranks.length;
    const context = lettered(this.canvas, room, height + 20);
    context.fillStyle = colour("--panel-soft");
    context.fillRect(this.left, 0, this.width, height);
    context.imageSmoothingEnabled = false;
    if (ranks.length) context.drawImage(this.image, this.left, 0, this.width, height);
    context.fillStyle = colour("--muted");
    context.textAlign = "right";
    const each = Math.max(Math.ceil(13 / this.cell), 1);
    ranks.forEach((rank, row) => {
      if (row % each) return;
      const mean = this.left === LEFT ? `  ${this.data.mean[this.chosen][row].toFixed(1)} %` : "";
      context.fillText(`rank ${rank}${mean}`, this.left - 8, Math.max((row + 0.5) * this.cell, 6));
    });
    drawTimes(context, 0, this.view.ns, this.left, this.width, height);
    const x = (ns) => this.left + (ns / this.view.ns) * this.width;
    if (!this.view.whole) this.span(context, x(this.view.begin), x(this.view.end), height);
    if (this.anchor !== null && this.hovered) {
      const [first, last] = this.ordered(this.anchor, this.hovered.bin);
      this.span(context, x(this.ns(first)), x(this.ns(last)), height);
    }
    const at = document.activeElement === this.canvas && this.cursor ? this.cursor : this.hovered;
    if (at) {
      context.strokeStyle = colour("--ink");
      const size = this.width / bins;
      context.strokeRect(this.left + at.bin * size - 0.5, at.row * this.cell - 0.5, Math.max(size, 2) + 1, this.cell + 1);
    }
    this.whole.disabled = this.view.whole && this.anchor === null;
  }

  span(context, from, to, height) {
    context.fillStyle = colour("--veil");
    context.fillRect(this.left, 0, from - this.left, height);
    context.fillRect(to, 0, this.left + this.width - to, height);
    context.strokeStyle = colour("--accent");
    context.lineWidth = 2;
    context.strokeRect(from, 1, Math.max(to - from, 2), Math.max(height - 2, 1));
    context.lineWidth = 1;
  }

  ns(bin) {
    return (bin / this.data.bins) * this.view.ns;
  }

  ordered(one, other) {
    return [Math.min(one, other), Math.max(one, other) + 1];
  }

  at(event, within) {
    const { ranks, bins } = this.data;
    const bin = Math.floor(((event.offsetX - this.left) / this.width) * bins), row = Math.floor(event.offsetY / this.cell);
    if (!within && (bin < 0 || bin >= bins || row < 0 || row >= ranks.length)) return null;
    const fit = (value, most) => Math.min(Math.max(value, 0), most);
    return { bin: fit(bin, bins - 1), row: fit(row, Math.max(ranks.length - 1, 0)) };
  }

  /** A range begins, or ends where one has begun. */
  point(bin) {
    if (this.anchor === null) this.anchor = bin;
    else {
      const [first, last] = this.ordered(this.anchor, bin);
      this.anchor = null;
      this.view.show(this.ns(first), this.ns(last));
    }
    this.say();
    this.draw();
  }

  press(event) {
    const place = this.at(event, false);
    if (event.button !== 0 || !place) return;
    const begun = this.anchor === null;
    if (begun) this.point(place.bin);
    const done = (ended) => {
      this.canvas.removeEventListener("pointerup", done);
      this.canvas.removeEventListener("pointercancel", done);
      if (ended.type === "pointercancel") {
        this.anchor = null;
        this.draw();
        return;
      }
      const last = this.at(ended, true).bin;
      if (!begun || last !== place.bin) this.point(last);
    };
    this.canvas.setPointerCapture(event.pointerId);
    this.canvas.addEventListener("pointerup", done);
    this.canvas.addEventListener("pointercancel", done);
  }

  hover(event) {
    this.hovered = this.at(event, Boolean(event.buttons));
    if (!this.hovered) return this.out();
    placeTip(this.tip, event, this.title(this.hovered), this.lines(this.hovered));
    this.draw();
  }

  out() {
    this.tip.hidden = true;
    if (this.anchor === null) this.hovered = null;
    this.draw();
  }

  title({ row, bin }) {
    return `rank ${this.data.ranks[row]}, ${inTime(this.ns(bin), this.view.ns)} to ${inTime(this.ns(bin + 1), this.view.ns)}`;
  }

  lines({ row, bin }) {
    return this.data.classes.map((name, of) => `${name} ${this.percent(row, bin, of)} %`);
  }

  leave() {
    this.anchor = null;
    this.view.show();
    this.say();
  }

  say(text) {
    const { ranks, more } = this.data;
    const whole = `${several(ranks.length, "rank")}, ${inTime(this.view.ns)}${more ? `; ${several(more, "more rank")} not drawn` : ""}.`;
    if (text) this.says.textContent = text;
    else if (this.anchor !== null) this.says.textContent = `From ${inTime(this.ns(this.anchor), this.view.ns)}: choose where the range ends.`;
    else this.says.textContent = this.view.whole ? whole : `Shown below: ${inTime(this.view.begin, this.view.ns)} to ${inTime(this.view.end, this.view.ns)}.`;
  }

  key(event) {
    const steps = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] };
    const { ranks, bins } = this.data;
    if (steps[event.key] && ranks.length) {
      const [down, right] = steps[event.key];
      const { row, bin } = this.cursor || { row: 0, bin: 0 };
      this.cursor = { row: Math.min(Math.max(row + down, 0), ranks.length - 1), bin: Math.min(Math.max(bin + right, 0), bins - 1) };
      this.hovered = this.cursor;
      this.say(`${this.title(this.cursor)}: ${this.lines(this.cursor).join(", ")}.`);
      this.draw();
    } else if (event.key === "Enter" || event.key === " ") this.point((this.cursor ||= { row: 0, bin: 0 }).bin);
    else if (event.key === "Escape") this.leave();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}
