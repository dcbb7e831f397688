// Counters over time, each at its own scale: a value holds until the next one.

const CURVE = 36, CURVE_GAP = 8; // px: of a curve, and below it

class Counters {
  constructor(view, described, element) {
    [this.view, this.data] = [view, described];
    const get = (name) => element.querySelector(`[data-part=${name}]`);
    [this.canvas, this.around, this.axis, this.tip] = ["canvas", "around", "axis", "tip"].map(get);
    const { curves, more } = described;
    const names = curves.map((curve) => `${this.label(curve)} up to ${this.valueOf(curve, Math.max(...curve.y))}`);
    this.canvas.setAttribute("aria-label", `Counters over time: ${names.join(", ")}.`);
    const left = more ? ` ${several(more, "counter")} more ${more === 1 ? "is" : "are"} not drawn.` : "";
    get("caption").textContent = `Each at its own scale; where values are too close to be seen, the largest one.${left}`;
    this.canvas.onpointermove = (event) => this.hover(event);
    this.canvas.onpointerleave = () => (this.tip.hidden = true);
    view.on(() => this.draw());
    new ResizeObserver(() => this.draw()).observe(this.around);
    this.draw();
  }

  label({ owner, name }) {
    return `${owner} · ${name}`;
  }

  valueOf({ unit }, value) {
    return `${value.toLocaleString("en-US", { maximumFractionDigits: 3 })} ${unit}`.trim();
  }

  draw() {
    this.pending ||= requestAnimationFrame(() => {
      this.pending = 0;
      this.drawAll();
    });
  }

  drawAll() {
    const { view } = this, room = this.around.clientWidth, { curves } = this.data;
    this.left = leftOf(room);
    this.width = Math.max(room - this.left - 1, 50);
    const context = lettered(this.canvas, room, Math.max(curves.length * (CURVE + CURVE_GAP), 1));
    curves.forEach((curve, row) => this.drawCurve(context, curve, row * (CURVE + CURVE_GAP)));
    drawTimes(lettered(this.axis, room, 20), view.begin, view.end, this.left, this.width, 0);
  }

  drawCurve(context, curve, top) {
    const { view } = this, { x, y } = curve, most = Math.max(...y, 0), least = Math.min(...y, 0);
    const height = (value) => top + CURVE - ((value - least) / (most - least || 1)) * (CURVE - 2);
    const place = (ns) => this.left + (Math.min(Math.max(ns, view.begin), view.end) - view.begin) / (view.end - view.begin) * this.width;
    context.fillStyle = colour("--muted");
    context.textAlign = "right";
    context.fillText(fitted(context, this.label(curve), this.left - 12), this.left - 8, top + CURVE / 3);
    context.fillText(fitted(context, this.valueOf(curve, most), this.left - 12), this.left - 8, top + (2.4 * CURVE) / 3);
    context.textAlign = "left";
    context.fillStyle = colour("--panel-soft");
    context.fillRect(this.left, top, this.width, CURVE);
    context.fillStyle = colour("--series-0");
    for (let at = Math.max(this.before(curve, view.begin), 0); at < x.length && x[at] <= view.end; at++) {
      const from = place(x[at]), to = at + 1 < x.length ? place(x[at + 1]) : from + 1;
      const [low, high] = [height(0), height(y[at])];
      if (y[at]) context.fillRect(from, Math.min(low, high), Math.max(to - from, 0.6), Math.abs(low - high));
    }
  }

  /** The number of the last value at a time or before it; -1 without one. */
  before({ x }, ns) {
    let low = 0, high = x.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (x[middle] <= ns) low = middle + 1; else high = middle;
    }
    return low - 1;
  }

  hover(event) {
    const { view } = this, curve = this.data.curves[Math.floor(event.offsetY / (CURVE + CURVE_GAP))];
    const ns = view.begin + ((event.offsetX - this.left) / this.width) * (view.end - view.begin);
    const at = curve && event.offsetX >= this.left ? this.before(curve, ns) : -1;
    this.tip.hidden = at < 0;
    if (at >= 0) placeTip(this.tip, event, this.label(curve), [`${this.valueOf(curve, curve.y[at])} since ${inTime(curve.x[at], view.ns)}`]);
  }
}
