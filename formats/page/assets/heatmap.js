// Sub-second offset heat maps, one above the other: a column for each second, fractions of it down.

const HEAT_ROWS = 50, HEAT_LEFT = 46, HEAT_ROW = 3; // intervals of a column; px
const HEAT_WIDEST = 120; // px of a column
// matplotlib's "magma" (Smith and van der Walt, CC0) in nine steps: even for the eye, and for colour-blind eyes.
const HEAT_COLOURS = ["#000004", "#1d1147", "#51127c", "#832681", "#b73779", "#e75263", "#fc8961", "#fec488", "#fcfdbf"];

/** The colour of a share, 0 to 1, of the largest number: [red, green, blue]. */
function heat(share, dark) {
  const last = HEAT_COLOURS.length - 1;
  // The ends of the palette would be the page's own white and black.
  const at = dark ? 1.3 + share * (last - 1.5) : last - 0.8 - share * (last - 2.4);
  const low = Math.min(Math.floor(at), last - 1), part = at - low;
  return [1, 3, 5].map((digit) => {
    const [from, to] = [low, low + 1].map((each) => parseInt(HEAT_COLOURS[each].slice(digit, digit + 2), 16));
    return Math.round(from + (to - from) * part);
  });
}

class HeatMaps {
  constructor(model, element) {
    this.model = model;
    this.columns = Math.ceil(model.intervals / HEAT_ROWS);
    this.columnSeconds = HEAT_ROWS * model.intervalSeconds;
    this.cursor = null; // the interval that the keyboard is at
    this.anchor = null; // where a range begins that has no end yet
    this.hovered = null;
    const get = (name) => element.querySelector(`[data-part=${name}]`);
    this.says = get("says");
    this.tip = get("tip");
    this.whole = get("whole");
    this.whole.onclick = () => {
      this.forget();
      model.select(null);
    };
    get("caption").append(this.captionText());
    this.maps = ["stalls", "cpu"].filter((name) => model.trees[name]).map((name) => {
      const figure = get(name);
      figure.hidden = false;
      const map = {
        name, canvas: figure.querySelector("canvas"), scale: figure.querySelector("[data-part=scale]"),
        image: document.createElement("canvas"),
      };
      map.canvas.onpointerdown = (event) => this.press(event);
      map.canvas.onpointermove = (event) => this.hover(event);
      map.canvas.onpointerleave = () => this.hoverAt(null);
      map.canvas.onkeydown = (event) => this.key(event);
      map.canvas.onfocus = map.canvas.onblur = () => this.draw();
      return map;
    });
    model.on("selection", () => { this.say(); this.draw(); });
    model.on("theme", () => this.paint());
    model.on("active", () => { this.count(); this.paint(); this.say(); });
    this.around = get("stalls");
    new ResizeObserver(() => this.draw()).observe(this.around);
    this.count();
    this.paint();
    this.say();
  }

  /** Adds up the samples of each cell. */
  count() {
    for (const map of this.maps) {
      map.sums = map.name === "stalls" ? this.model.stallsPerInterval : this.model.cpuPerInterval;
      map.most = map.sums.reduce((most, each) => Math.max(most, each), 0);
    }
  }

  captionText() {
    const column = this.columnSeconds === 1 ? "second" : seconds(this.columnSeconds);
    return `Each column is one ${column}, from top to bottom; each cell ${seconds(this.model.intervalSeconds)}. ` +
      "Stripes are bursts, blank cells are gaps. Drag, or click begin and end, to see the flame graph of that time.";
  }

  unit(map, count) {
    return several(count, map.name === "stalls" ? "GPU sample" : "CPU sample");
  }

  /** Paints the cells, one pixel each, and their scale. */
  paint() {
    const dark = isDark();
    for (const map of this.maps) {
      map.image.width = Math.max(this.columns, 1);
      map.image.height = HEAT_ROWS;
      const context = map.image.getContext("2d");
      const pixels = context.createImageData(map.image.width, HEAT_ROWS);
      map.sums.forEach((count, interval) => {
        if (!count) return;
        const at = 4 * ((interval % HEAT_ROWS) * map.image.width + Math.floor(interval / HEAT_ROWS));
        pixels.data.set([...heat(count / map.most, dark), 255], at);
      });
      context.putImageData(pixels, 0, 0);
      const steps = [0, 0.25, 0.5, 0.75, 1].map((share) => `rgb(${heat(share, dark)})`);
      const bar = made("i", "heat-bar");
      bar.style.background = `linear-gradient(to right, ${steps})`;
      map.scale.replaceChildren("1", bar, counted(map.most), made("span", "", ` per ${seconds(this.model.intervalSeconds)}`));
    }
    this.draw();
  }

  draw() {
    this.pending ||= requestAnimationFrame(() => {
      this.pending = 0;
      this.drawNow();
    });
  }

  drawNow() {
    for (const map of this.maps) this.drawMap(map);
  }

  drawMap(map) {
    const { canvas } = map, ratio = window.devicePixelRatio || 1;
    const room = this.around.clientWidth;
    this.cell = Math.min((room - HEAT_LEFT - 1) / this.columns, HEAT_WIDEST);
    const width = Math.round(this.cell * this.columns), height = HEAT_ROWS * HEAT_ROW, below = 18;
    const context = sized(canvas, room, height + below);
    context.fillStyle = colour("--panel-soft");
    context.fillRect(HEAT_LEFT, 0, width, height);
    context.imageSmoothingEnabled = this.cell * ratio < 1; // columns share pixels: their mean, not one of them
    context.drawImage(map.image, HEAT_LEFT, 0, width, height);
    this.axes(context, width, height);
    const chosen = this.model.selection;
    if (chosen) this.cells(context, chosen.first, chosen.last, colour("--accent"), width, height);
    if (this.anchor !== null && this.hovered !== null) {
      const [first, last] = this.ordered(this.anchor, this.hovered);
      this.cells(context, first, last, colour("--accent"), width, height);
    }
    const point = document.activeElement === canvas ? this.cursor : this.hovered;
    if (point !== null) this.outline(context, point, colour("--ink"));
  }

  axes(context, width, height) {
    context.fillStyle = colour("--muted");
    context.font = `11px ${colour("--sans") || "sans-serif"}`;
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (let quarter = 0; quarter <= 4; quarter += 2) {
      const y = Math.min(Math.max((height * quarter) / 4, 6), height - 6);
      context.fillText(quarter ? `+${seconds((this.columnSeconds * quarter) / 4)}` : "0", HEAT_LEFT - 6, y);
    }
    context.textBaseline = "top";
    const step = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600].find((each) => each * this.cell >= 44) || 1000;
    for (let column = 0; column < this.columns; column += step) {
      const text = seconds(column * this.columnSeconds), x = HEAT_LEFT + column * this.cell;
      context.textAlign = "left";
      if (x + context.measureText(text).width <= HEAT_LEFT + width + HEAT_LEFT) context.fillText(text, x, height + 4);
      context.fillRect(x, height, 1, 3);
    }
  }

  /** The outline of intervals, which go on at the top of the next column. */
  cells(context, first, last, ink, width, height) {
    const x = (column) => HEAT_LEFT + column * this.cell;
    const [begin, end] = [Math.floor(first / HEAT_ROWS), Math.floor((last - 1) / HEAT_ROWS)];
    const [top, bottom] = [(first % HEAT_ROWS) * HEAT_ROW, (((last - 1) % HEAT_ROWS) + 1) * HEAT_ROW];
    const shape = new Path2D();
    if (begin === end) shape.rect(x(begin), top, this.cell, bottom - top);
    else {
      const corners = [[x(begin), top], [x(begin + 1), top], [x(begin + 1), 0], [x(end + 1), 0], [x(end + 1), bottom],
        [x(end), bottom], [x(end), height], [x(begin), height]];
      corners.forEach(([left, y], i) => (i ? shape.lineTo(left, y) : shape.moveTo(left, y)));
      shape.closePath();
    }
    const around = new Path2D();
    around.rect(HEAT_LEFT, 0, width, height);
    around.addPath(shape);
    context.fillStyle = colour("--veil");
    context.fill(around, "evenodd");
    context.strokeStyle = ink;
    context.lineWidth = 2;
    context.stroke(shape);
  }

  outline(context, interval, ink) {
    const x = HEAT_LEFT + Math.floor(interval / HEAT_ROWS) * this.cell;
    context.strokeStyle = ink;
    context.lineWidth = 1;
    context.strokeRect(x + 0.5, (interval % HEAT_ROWS) * HEAT_ROW - 0.5, Math.max(this.cell - 1, 1), HEAT_ROW + 1);
  }

  ordered(one, other) {
    return [Math.min(one, other), Math.max(one, other) + 1];
  }

  /** The interval at a place; null beside the maps. */
  at(x, y, within = false) {
    const column = Math.floor((x - HEAT_LEFT) / this.cell), row = Math.floor(y / HEAT_ROW);
    if (!within && (column < 0 || column >= this.columns || row < 0 || row >= HEAT_ROWS)) return null;
    const fit = (value, most) => Math.min(Math.max(value, 0), most);
    const interval = fit(column, this.columns - 1) * HEAT_ROWS + fit(row, HEAT_ROWS - 1);
    return within ? fit(interval, this.model.intervals - 1) : interval < this.model.intervals ? interval : null;
  }

  /** A range begins, or ends where one has begun. */
  point(interval) {
    if (this.anchor === null) {
      this.anchor = this.hovered = interval;
      this.say();
      this.draw();
      return;
    }
    const [first, last] = this.ordered(this.anchor, interval);
    this.anchor = null;
    const { intervalSeconds } = this.model;
    this.model.select(first * intervalSeconds, last * intervalSeconds);
    this.say();
    this.draw();
  }

  press(event) {
    const interval = this.at(event.offsetX, event.offsetY);
    if (event.button !== 0 || interval === null) return;
    const canvas = event.target, begun = this.anchor === null;
    if (begun) this.point(interval);
    const done = (ended) => {
      canvas.removeEventListener("pointerup", done);
      canvas.removeEventListener("pointercancel", done);
      if (ended.type === "pointercancel") return this.forget(); // the page scrolls instead
      const last = this.at(ended.offsetX, ended.offsetY, true);
      // A click that begins a range waits for the one that ends it.
      if (!begun || last !== interval) this.point(last);
    };
    canvas.setPointerCapture(event.pointerId);
    canvas.addEventListener("pointerup", done);
    canvas.addEventListener("pointercancel", done);
  }

  /** There is no range that waits for its end. */
  forget() {
    this.anchor = null;
    this.say();
    this.draw();
  }

  hover(event) {
    this.hoverAt(this.at(event.offsetX, event.offsetY, Boolean(event.buttons)), event);
  }

  hoverAt(interval, event) {
    this.tip.hidden = interval === null;
    if (interval !== this.hovered && !(interval === null && this.anchor !== null)) {
      this.hovered = interval;
      this.draw();
    }
    if (interval === null) return;
    const lines = this.maps.map((map) => this.unit(map, map.sums[interval]));
    this.tip.replaceChildren(made("b", "", this.span(interval, interval + 1)), ...lines.map((line) => made("span", "", line)));
    this.tip.style.left = `${Math.max(Math.min(event.clientX + 12, innerWidth - this.tip.offsetWidth - 8), 8)}px`;
    this.tip.style.top = `${event.clientY + 18}px`;
  }

  span(first, last) {
    const { intervalSeconds } = this.model;
    return range({ begin: first * intervalSeconds, end: last * intervalSeconds });
  }

  samples(first, last) {
    return this.maps.map((map) => this.unit(map, map.sums.subarray(first, last).reduce((sum, each) => sum + each, 0))).join(", ");
  }

  /** The line below the maps, which screen readers read out as it changes. */
  say() {
    const { model } = this, chosen = model.selection;
    this.whole.disabled = !chosen && this.anchor === null;
    if (this.anchor !== null) this.says.textContent = `From ${seconds(this.anchor * model.intervalSeconds)}: click where the range ends.`;
    else if (chosen) this.says.textContent = `Selected ${this.span(chosen.first, chosen.last)}: ${this.samples(chosen.first, chosen.last)}.`;
    else this.says.textContent = `Whole recording, ${seconds(model.seconds)}: ${this.samples(0, model.intervals)}.`;
  }

  key(event) {
    const steps = { ArrowDown: 1, ArrowUp: -1, ArrowRight: HEAT_ROWS, ArrowLeft: -HEAT_ROWS };
    if (steps[event.key]) {
      const last = this.model.intervals - 1;
      const to = this.cursor === null ? 0 : this.cursor + steps[event.key];
      if (to >= 0 && to <= last) this.cursor = to;
      if (this.anchor !== null) this.hovered = this.cursor;
      this.says.textContent = `${this.span(this.cursor, this.cursor + 1)}: ${this.samples(this.cursor, this.cursor + 1)}.`;
      this.draw();
    } else if (event.key === "Enter" || event.key === " ") this.point((this.cursor ??= 0));
    else if (event.key === "Escape") {
      if (this.anchor !== null) this.forget();
      else this.model.select(null);
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }
}
