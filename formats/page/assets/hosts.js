// The heat map of many captures: a row for each host, or for some hosts that are next to each other, and time along it.

const HOSTS_LOWEST = 3, HOSTS_HIGHEST = 20; // px of a row
const HOSTS_NARROWEST = 3, HOSTS_WIDEST = 40; // px of a column
const HOSTS_BELOW = 34; // px of the axis: time of day, and the date below it
const HOSTS_SAID = 12; // px: the least distance of two names
const HOSTS_STEPS = [1, 10, 60, 300, 900, 1800, 3600, 10800, 21600, 43200, 86400, 172800, 604800, 1209600, 2419200];

class HostMap {
  constructor(model, element) {
    this.data = model.data.hosts;
    this.factor = 0; // columns of the data that are one here
    this.cursor = null; // the cell that the keyboard is at
    this.hovered = null;
    this.image = document.createElement("canvas");
    const get = (name) => element.querySelector(`[data-part=${name}]`);
    for (const part of ["canvas", "caption", "unit", "scale", "says", "tip"]) this[part] = get(part);
    this.unit.textContent = this.shares ? "GPU samples of a host" : "GPU samples";
    this.canvas.onpointermove = (event) => this.hover(event);
    this.canvas.onpointerdown = (event) => this.hover(event);
    this.canvas.onpointerleave = () => this.hover(null);
    this.canvas.onkeydown = (event) => this.key(event);
    this.canvas.onfocus = this.canvas.onblur = () => this.draw();
    model.on("theme", () => {
      this.paint();
      this.draw();
    });
    this.around = element.querySelector("figure");
    new ResizeObserver(() => this.draw()).observe(this.around);
    this.draw();
  }

  /** Adds up columns, if there is no room for each; their begins stay round times. */
  fit(factor) {
    if (factor === this.factor) return;
    const { rows, columns, steps, samples, width, begin } = this.data;
    this.factor = factor;
    this.width = factor * width;
    this.begin = Math.floor(begin / this.width) * this.width;
    const before = (begin - this.begin) / width;
    this.columns = Math.ceil((before + columns) / factor);
    this.samples = new Float64Array(rows.length * this.columns).fill(-1); // -1: nothing was recorded
    let at = 0;
    steps.forEach((step, index) => {
      at += step;
      const cell = Math.floor(at / columns) * this.columns + Math.floor((before + (at % columns)) / factor);
      this.samples[cell] = Math.max(this.samples[cell], 0) + samples[index];
    });
    this.most = 0; // samples of one host
    this.samples.forEach((count, cell) => {
      this.most = Math.max(this.most, count / rows[Math.floor(cell / this.columns)].hosts);
    });
    this.cursor = this.hovered = null;
    this.caption.textContent = this.captionText();
    this.paint();
    this.say(null);
  }

  /** Whether rows are of several hosts. */
  get shares() {
    return this.data.rows.some((row) => row.hosts > 1);
  }

  captionText() {
    const { rows, timeless } = this.data;
    const row = this.shares ? `Each row is ${several(rows[0].hosts, "host")}, by name` : "Each row is a host";
    const late = timeless ? ` The time of ${several(timeless, "sample")} is not known.` : "";
    return `${row}, each column ${this.length(this.width)}, UTC. The samples of a capture are spread evenly over its time. ` +
      `Blank cells were not recorded.${late}`;
  }

  /** A length of time in one unit. */
  length(value) {
    for (const [unit, size] of [["day", 86400], ["hour", 3600], ["minute", 60]])
      if (value >= size && value % size === 0) return several(value / size, unit);
    return several(value, "second");
  }

  /** A time of day or a date, UTC. */
  moment(value, options) {
    return new Date(value * 1000).toLocaleString("en-GB", { timeZone: "UTC", ...options });
  }

  /** Paints the cells, one pixel each, and their scale. */
  paint() {
    const dark = isDark(), { columns } = this, { rows } = this.data;
    this.image.width = columns;
    this.image.height = rows.length;
    const context = this.image.getContext("2d");
    const pixels = context.createImageData(columns, rows.length);
    this.samples.forEach((count, cell) => {
      if (count < 0) return;
      const share = this.most ? count / rows[Math.floor(cell / columns)].hosts / this.most : 0;
      pixels.data.set([...heat(share, dark), 255], 4 * cell);
    });
    context.putImageData(pixels, 0, 0);
    const stops = [0, 0.25, 0.5, 0.75, 1].map((share) => `rgb(${heat(share, dark)})`);
    const bar = made("i", "heat-bar");
    bar.style.background = `linear-gradient(to right, ${stops})`;
    this.scale.replaceChildren("0", bar, counted(this.most), made("span", "", ` per ${this.length(this.width).replace(/^1 /, "")}`));
  }

  draw() {
    this.pending ||= requestAnimationFrame(() => {
      this.pending = 0;
      this.drawNow();
    });
  }

  drawNow() {
    const { canvas } = this, { rows } = this.data;
    const room = this.around.clientWidth;
    const context = canvas.getContext("2d");
    const font = `11px ${colour("--sans") || "sans-serif"}`;
    context.font = font;
    const widest = rows.reduce((most, row) => Math.max(most, context.measureText(this.name(row)).width), 0);
    this.left = Math.ceil(Math.min(widest + 8, room * 0.3));
    this.fit(Math.ceil((HOSTS_NARROWEST * this.data.columns) / Math.max(room - this.left - 1, HOSTS_NARROWEST)));
    const { columns } = this;
    this.cell = Math.min((room - this.left - 1) / columns, HOSTS_WIDEST);
    this.row = Math.min(Math.max(Math.floor(480 / rows.length), HOSTS_LOWEST), HOSTS_HIGHEST);
    const width = this.cell * columns, height = this.row * rows.length;
    sized(canvas, room, height + HOSTS_BELOW);
    context.font = font;
    context.fillStyle = colour("--panel-soft");
    context.fillRect(this.left, 0, width, height);
    context.imageSmoothingEnabled = false;
    context.drawImage(this.image, this.left, 0, width, height);
    this.drawNames(context);
    this.drawTimes(context, width, height);
    const cell = document.activeElement === canvas && this.cursor !== null ? this.cursor : this.hovered;
    if (cell === null) return;
    context.strokeStyle = colour("--ink");
    const x = this.left + (cell % columns) * this.cell, y = Math.floor(cell / columns) * this.row;
    context.strokeRect(x + 0.5, y + 0.5, Math.max(this.cell - 1, 1), this.row - 1);
  }

  /** The name of a row. */
  name(row) {
    return row.hosts > 1 ? `${row.first} …` : row.first;
  }

  drawNames(context) {
    context.fillStyle = colour("--muted");
    context.textAlign = "right";
    context.textBaseline = "middle";
    const each = Math.ceil(HOSTS_SAID / this.row);
    this.data.rows.forEach((row, number) => {
      if (number % each) return;
      let text = this.name(row);
      while (text.length > 2 && context.measureText(text).width > this.left - 6) text = `${text.slice(0, -2)}…`;
      context.fillText(text, this.left - 5, number * this.row + Math.max(this.row, HOSTS_SAID) / 2);
    });
  }

  /** Times of day, and below them the date where it changes. */
  drawTimes(context, width, height) {
    const { begin, width: step, columns } = this;
    const end = begin + columns * step, pixels = this.cell / step;
    const every = HOSTS_STEPS.find((each) => each >= step && each * pixels >= 52) || 4 * HOSTS_STEPS.at(-1);
    context.textAlign = "left";
    context.textBaseline = "top";
    const hour = { hour: "2-digit", minute: "2-digit", ...(every < 60 ? { second: "2-digit" } : {}) };
    let free = -1;
    let day = null;
    for (let time = Math.ceil(begin / every) * every; time <= end; time += every) {
      const x = this.left + (time - begin) * pixels;
      context.fillRect(x, height, 1, 4);
      const room = this.around.clientWidth;
      const clock = this.moment(time, hour);
      if (every < 86400 && x + context.measureText(clock).width <= room) context.fillText(clock, x + 2, height + 4);
      const date = this.moment(time, { day: "numeric", month: "short", ...(day === null ? { year: "numeric" } : {}) });
      const length = context.measureText(date).width;
      if (Math.floor(time / 86400) === day || x < free || x + length > room) continue;
      context.fillText(date, x + 2, height + (every < 86400 ? 18 : 5));
      day = Math.floor(time / 86400);
      free = x + length + 8;
    }
  }

  /** What a cell says, in lines. */
  told(cell) {
    const { columns, begin, width } = this, { rows } = this.data;
    const row = rows[Math.floor(cell / columns)], from = begin + (cell % columns) * width;
    const host = row.hosts > 1 ? `${row.first} to ${row.last} (${several(row.hosts, "host")})` : row.first;
    const clock = { dateStyle: "medium", timeStyle: width < 60 ? "medium" : "short" };
    const count = this.samples[cell];
    return [host, `${this.moment(from, clock)} UTC, ${this.length(width)}`, count < 0 ? "not recorded" : several(count, "sample")];
  }

  say(cell) {
    if (cell !== null) {
      this.says.textContent = `${this.told(cell).join(": ")}.`;
      return;
    }
    const { begin, columns, width } = this, { rows } = this.data;
    const hosts = rows.reduce((sum, row) => sum + row.hosts, 0);
    const [from, to] = [begin, begin + columns * width].map((time) => this.moment(time, { dateStyle: "medium", timeStyle: "short" }));
    this.says.textContent = `${several(hosts, "host")}, from ${from} to ${to} UTC.`;
  }

  hover(event) {
    const { columns } = this, { rows } = this.data;
    const column = event ? Math.floor((event.offsetX - this.left) / this.cell) : -1;
    const row = event ? Math.floor(event.offsetY / this.row) : -1;
    const within = column >= 0 && column < columns && row >= 0 && row < rows.length;
    this.hovered = within ? row * columns + column : null;
    this.tip.hidden = !within;
    this.draw();
    if (!within) return;
    const [host, ...lines] = this.told(this.hovered);
    this.tip.replaceChildren(made("b", "", host), ...lines.map((line) => made("span", "", line)));
    this.tip.style.left = `${Math.max(Math.min(event.clientX + 12, innerWidth - this.tip.offsetWidth - 8), 8)}px`;
    this.tip.style.top = `${event.clientY + 18}px`;
  }

  key(event) {
    const { columns } = this, { rows } = this.data;
    const steps = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] };
    if (!steps[event.key]) return;
    const [right, down] = this.cursor === null ? [0, 0] : steps[event.key];
    const fit = (value, most) => Math.min(Math.max(value, 0), most - 1);
    const cursor = this.cursor ?? 0;
    this.cursor = fit(Math.floor(cursor / columns) + down, rows.length) * columns + fit((cursor % columns) + right, columns);
    this.say(this.cursor);
    this.draw();
    event.preventDefault();
  }
}
