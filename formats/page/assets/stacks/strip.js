// The recording's time above the flame graph: GPU and CPU samples in it. A drag over it chooses a range.

const STRIP_HEIGHT = 34, STRIP_AXIS = 16; // px
const STRIP_STEPS = 100; // of the arrow keys, over the whole time

class RangeStrip {
  constructor(model, element) {
    this.model = model;
    const get = (name) => element.querySelector(`[data-part=${name}]`);
    [this.canvas, this.says, this.whole] = ["strip", "strip-says", "whole"].map(get);
    this.moment = null; // seconds, where the pointer or the keyboard is
    this.anchor = null; // seconds, where a range begins
    const { canvas } = this;
    canvas.onpointerdown = (event) => this.press(event);
    canvas.onpointermove = (event) => this.move(event);
    canvas.onpointerleave = () => this.point(null);
    canvas.onblur = () => this.point(null);
    canvas.onkeydown = (event) => this.key(event);
    this.whole.onclick = () => model.select(null);
    for (const event of ["selection", "active"]) model.on(event, () => this.point(this.moment));
    model.on("theme", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
    this.point(null);
  }

  /** Sums of samples per pixel. */
  sums(samples, width) {
    const sums = new Float64Array(width), { intervals } = this.model;
    for (let interval = 0; interval < intervals; interval++)
      sums[Math.min(Math.floor((interval * width) / intervals), width - 1)] += samples[interval];
    if (width > intervals) // an interval has several pixels
      for (let x = 0; x < width; x++) sums[x] = samples[Math.floor((x * intervals) / width)];
    return sums;
  }

  draw() {
    this.pending ||= requestAnimationFrame(() => {
      this.pending = 0;
      this.drawNow();
    });
  }

  drawNow() {
    const { canvas, model } = this;
    const width = (this.width = Math.max(canvas.parentElement.clientWidth, 50)), height = STRIP_HEIGHT;
    const context = sized(canvas, width, height + STRIP_AXIS);
    context.fillStyle = colour("--panel-soft");
    context.fillRect(0, 0, width, height);
    const stalls = this.sums(model.stallsPerInterval, width), most = Math.max(1, ...stalls);
    context.fillStyle = colour("--strip");
    stalls.forEach((count, x) => {
      const high = count ? Math.max((count / most) * (height - 2), 1) : 0;
      context.fillRect(x, height - high, 1, high);
    });
    const x = (value) => (value / model.seconds) * width;
    const chosen = this.dragged || model.selection;
    if (chosen) {
      context.fillStyle = colour("--veil");
      context.fillRect(0, 0, x(chosen.begin), height);
      context.fillRect(x(chosen.end), 0, width - x(chosen.end), height);
      context.strokeStyle = colour("--accent");
      context.lineWidth = 2;
      context.strokeRect(Math.max(x(chosen.begin), 1), 1, Math.max(Math.min(x(chosen.end), width - 1) - x(chosen.begin), 1), height - 2);
    }
    context.fillStyle = colour("--muted");
    context.font = `11px ${colour("--sans") || "sans-serif"}`;
    context.textBaseline = "top";
    const wanted = model.seconds / Math.max(Math.floor(width / 110), 2), unit = 10 ** Math.floor(Math.log10(wanted));
    const step = [1, 2, 5, 10].map((factor) => factor * unit).find((each) => each >= wanted);
    for (let tick = 0; tick < model.seconds; tick += step) {
      const text = seconds(tick);
      context.fillRect(x(tick), height, 1, 3);
      if (x(tick) + context.measureText(text).width + 3 <= width) context.fillText(text, x(tick) + 3, height + 4);
    }
    if (this.moment !== null) {
      context.fillStyle = colour("--ink");
      context.fillRect(Math.min(x(this.moment), width - 1), 0, 1, height);
    }
  }

  /** Tells of a moment; of the chosen range where there is none. */
  point(moment) {
    this.moment = moment;
    const { model } = this;
    const sum = (samples, first, last) => samples.slice(first, last).reduce((total, each) => total + each, 0);
    let begin = 0, end = 0, what = "";
    if (moment !== null) {
      begin = Math.min(Math.floor(moment / model.intervalSeconds), model.intervals - 1);
      end = begin + 1;
      what = `At ${seconds(begin * model.intervalSeconds)}`;
    } else if (model.selection) {
      ({ first: begin, last: end } = model.selection);
      what = `Selected ${range(model.selection)}`;
    }
    const parts = [several(sum(model.stallsPerInterval, begin, end), "GPU sample")];
    if (model.trees.cpu) parts.push(several(sum(model.cpuPerInterval, begin, end), "CPU sample"));
    this.says.textContent = what ? `${what}: ${parts.join(", ")}.` : "Drag over the strip to select a range of time.";
    this.whole.hidden = !model.selection;
    this.draw();
  }

  at(event) {
    return Math.min(Math.max(event.offsetX / this.width, 0), 1) * this.model.seconds;
  }

  press(event) {
    if (event.button) return;
    this.canvas.setPointerCapture(event.pointerId);
    this.anchor = this.at(event);
    const from = event.clientX;
    const done = (ended) => {
      this.canvas.onpointerup = this.canvas.onpointercancel = null;
      const { anchor } = this, to = this.at(ended);
      this.anchor = this.dragged = null;
      if (ended.type === "pointerup")
        if (Math.abs(ended.clientX - from) > 3) this.model.select(Math.min(anchor, to), Math.max(anchor, to));
        else this.model.select(null);
      this.draw();
    };
    this.canvas.onpointerup = this.canvas.onpointercancel = done;
  }

  move(event) {
    const to = this.at(event);
    if (this.anchor !== null && event.buttons) this.dragged = { begin: Math.min(this.anchor, to), end: Math.max(this.anchor, to) };
    this.point(to);
  }

  key(event) {
    const { model } = this, step = model.seconds / STRIP_STEPS, from = this.moment ?? (model.selection ? model.selection.begin : 0);
    const to = { ArrowLeft: from - step, ArrowRight: from + step, Home: 0, End: model.seconds }[event.key];
    if (event.key === "Escape") {
      this.anchor = null;
      model.select(null);
    } else if (to === undefined) return;
    else {
      const moment = Math.min(Math.max(to, 0), model.seconds);
      this.anchor = event.shiftKey ? this.anchor ?? from : null;
      if (this.anchor !== null && this.anchor !== moment)
        model.select(Math.min(this.anchor, moment), Math.max(this.anchor, moment));
      this.point(moment);
    }
    event.preventDefault();
    event.stopPropagation();
  }
}
