// The slices of each row over time, on a canvas.

const ROW = 17, GAP = 8; // px: of a row, and above a rank
const KINDS = [
  ["host", "--frame-plain"], ["device, others", "--series-3"], ["computation", "--series-0"],
  ["communication", "--series-1"], ["copies", "--series-2"],
];

class Tracks {
  constructor(view, described, element) {
    this.view = view;
    this.data = described;
    this.hovered = -1; // box
    this.drag = null; // { from, to } in ns
    const get = (name) => element.querySelector(`[data-part=${name}]`);
    [this.canvas, this.around, this.axis, this.says, this.tip, this.whole] =
      ["canvas", "around", "axis", "says", "tip", "whole"].map(get);
    this.legend = get("legend");
    const { rows, more, hidden, binNs, arrays } = described;
    this.first = new Uint32Array(rows.length + 1); // box of each row
    for (let box = 0; box < arrays.row.length; box++) this.first[arrays.row[box] + 1]++;
    for (let row = 0; row < rows.length; row++) this.first[row + 1] += this.first[row];
    this.longest = new Float64Array(rows.length); // box of each row
    for (let box = 0; box < arrays.row.length; box++)
      this.longest[arrays.row[box]] = Math.max(this.longest[arrays.row[box]], arrays.length[box]);
    this.tops = [];
    let y = 0;
    rows.forEach((row, index) => {
      if (index && rows[index - 1][0] !== row[0]) y += GAP;
      this.tops.push(y);
      y += ROW;
    });
    this.height = y;
    const left = more ? ` ${several(more, "row")} with ${several(hidden, "slice")} ${more === 1 ? "is" : "are"} not drawn.` : "";
    get("caption").textContent = "Drag to zoom; a click or Escape shows the whole time. " +
      `Slices shorter than ${inTime(binNs)} are drawn together with those beside them.${left}`;
    this.whole.onclick = () => view.show();
    this.canvas.onpointerdown = (event) => this.press(event);
    this.canvas.onpointermove = (event) => this.hover(event);
    this.canvas.onpointerleave = () => {
      this.tip.hidden = true;
      this.hovered = -1;
      this.draw();
    };
    this.canvas.onkeydown = (event) => this.key(event);
    view.on(() => this.draw());
    new ResizeObserver(() => this.draw()).observe(this.around);
    this.showLegend();
  }

  showLegend() {
    const used = new Set(this.data.arrays.kind);
    this.legend.replaceChildren(...KINDS.map(([name, ink], kind) => {
      const item = made("li"), key = made("i");
      key.style.background = colour(ink);
      item.append(key, name);
      item.hidden = !used.has(kind);
      return item;
    }));
    this.draw();
  }

  draw() {
    this.pending ||= requestAnimationFrame(() => {
      this.pending = 0;
      this.drawAll();
    });
  }

  drawAll() {
    const { view } = this, room = this.around.clientWidth;
    this.left = leftOf(room);
    this.width = Math.max(room - this.left - 1, 50);
    const context = lettered(this.canvas, room, Math.max(this.height, 1));
    this.inks = KINDS.map(([, ink]) => colour(ink));
    this.text = [colour("--ink"), ...new Array(4).fill(colour("--accent-ink"))];
    this.data.rows.forEach((row, index) => this.drawRow(context, row, index));
    if (this.drag) {
      const x = (ns) => this.left + ((ns - view.begin) / (view.end - view.begin)) * this.width;
      const [from, to] = [this.drag.from, this.drag.to].sort((a, b) => a - b).map(x);
      context.fillStyle = colour("--accent");
      context.globalAlpha = 0.2;
      context.fillRect(from, 0, to - from, this.height);
      context.globalAlpha = 1;
    }
    drawTimes(lettered(this.axis, room, 20), view.begin, view.end, this.left, this.width, 0);
    this.whole.disabled = view.whole;
    this.says.textContent = view.whole
      ? `The whole time, ${inTime(view.ns)}.`
      : `${inTime(view.begin, view.ns)} to ${inTime(view.end, view.ns)}: ${inTime(view.end - view.begin)}.`;
  }

  label([rank, device, pid, tid, depth]) {
    if (depth) return "";
    return this.left === LEFT ? `rank ${rank} · ${device ? "device" : "host"} ${tid}` : `${rank} ${device ? "dev" : "host"} ${tid}`;
  }

  drawRow(context, row, index) {
    const y = this.tops[index], { view } = this, { start, length, kind, name } = this.data.arrays;
    context.fillStyle = colour("--muted");
    context.textAlign = "right";
    context.globalAlpha = 1;
    context.fillText(fitted(context, this.label(row), this.left - 12), this.left - 8, y + ROW / 2);
    context.fillStyle = colour("--panel-soft");
    context.fillRect(this.left, y, this.width, ROW - 1);
    context.textAlign = "left";
    const scale = this.width / (view.end - view.begin);
    let reached = -1; // px that is drawn already
    for (let box = this.from(index); box < this.first[index + 1]; box++) {
      if (start[box] > view.end) break;
      const from = Math.max((start[box] - view.begin) * scale, 0);
      const to = Math.min((start[box] + length[box] - view.begin) * scale, this.width);
      if (to < 0 || (to <= reached && to - from < 1)) continue;
      const wide = Math.max(to - from, 0.6);
      context.fillStyle = box === this.hovered ? colour("--match") : this.inks[kind[box]];
      context.globalAlpha = 0.72 + 0.14 * (name[box] % 3);
      context.fillRect(this.left + from, y, wide > 3 ? wide - 0.5 : wide, ROW - 1);
      context.globalAlpha = 1;
      if (wide > 30) {
        context.fillStyle = box === this.hovered ? colour("--match-ink") : this.text[kind[box]];
        context.fillText(fitted(context, this.title(box), wide - 8), this.left + from + 4, y + ROW / 2);
      }
      reached = Math.floor(to) + (to - from < 1 ? 1 : 0);
    }
  }

  /** The first box of a row that can reach into the time that is shown. */
  from(row) {
    const { start } = this.data.arrays;
    let low = this.first[row], high = this.first[row + 1];
    const begin = this.view.begin - this.longest[row];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (start[middle] < begin) low = middle + 1; else high = middle;
    }
    return low;
  }

  title(box) {
    const { name, slices } = this.data.arrays;
    const text = this.data.names[name[box]];
    if (!text) return slices[box] === 1 ? "(unnamed)" : `${counted(slices[box])} slices`;
    return slices[box] === 1 ? text : `${text} ×${counted(slices[box])}`;
  }

  nsAt(event) {
    const share = Math.min(Math.max((event.offsetX - this.left) / this.width, 0), 1);
    return this.view.begin + share * (this.view.end - this.view.begin);
  }

  boxAt(event) {
    const row = this.tops.findIndex((top) => event.offsetY >= top && event.offsetY < top + ROW);
    if (row < 0 || event.offsetX < this.left) return -1;
    const { start, length } = this.data.arrays, ns = this.nsAt(event);
    const near = (2 * (this.view.end - this.view.begin)) / this.width;
    let found = -1, away = near;
    for (let box = this.from(row); box < this.first[row + 1] && start[box] <= ns + near; box++) {
      const distance = Math.max(start[box] - ns, ns - start[box] - length[box], 0);
      if (distance < away || distance === 0) [found, away] = [box, distance];
    }
    return found;
  }

  hover(event) {
    if (this.drag) this.drag.to = this.nsAt(event);
    this.hovered = this.boxAt(event);
    if (this.hovered < 0) this.tip.hidden = true;
    else {
      const box = this.hovered, { start, length, busy, slices } = this.data.arrays;
      const lines = [`at ${inTime(start[box], this.view.ns)}, ${inTime(length[box])}`];
      if (slices[box] > 1) lines.push(`${several(slices[box], "slice")} of ${inTime(busy[box])} together`);
      placeTip(this.tip, event, this.title(box), lines);
    }
    this.draw();
  }

  press(event) {
    if (event.button !== 0) return;
    const from = this.nsAt(event), x = event.offsetX;
    this.drag = { from, to: from };
    const done = (ended) => {
      this.canvas.removeEventListener("pointerup", done);
      this.canvas.removeEventListener("pointercancel", done);
      this.drag = null;
      if (ended.type === "pointercancel") return this.draw();
      if (Math.abs(ended.offsetX - x) < 4) return this.view.show();
      const to = this.nsAt(ended);
      this.view.show(Math.min(from, to), Math.max(from, to));
    };
    this.canvas.setPointerCapture(event.pointerId);
    this.canvas.addEventListener("pointerup", done);
    this.canvas.addEventListener("pointercancel", done);
  }

  key(event) {
    const { begin, end } = this.view, length = end - begin, middle = (begin + end) / 2;
    if (event.key === "ArrowLeft") this.view.show(begin - length / 5, end - length / 5);
    else if (event.key === "ArrowRight") this.view.show(begin + length / 5, end + length / 5);
    else if (event.key === "+" || event.key === "=") this.view.show(middle - length / 4, middle + length / 4);
    else if (event.key === "-") this.view.show(middle - length, middle + length);
    else if (event.key === "Escape") this.view.show();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}
