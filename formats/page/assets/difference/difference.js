// What changed between two captures, or two sets of them: a row for each entry, the largest changes first.

class Difference {
  constructor(data, element) {
    this.data = data;
    this.most = data.entries.reduce((most, each) => Math.max(most, Math.abs(each.change)), 0);
    this.percent = data.unit === "percent";
    this.hasChances = data.entries.some((each) => each.by_chance !== undefined);
    this.order = { by: "change", down: true };
    this.body = element.querySelector("tbody");
    this.head = element.querySelector("thead tr");
    this.filter = element.querySelector("[data-part=filter]");
    this.says = element.querySelector("[data-part=says]");
    const chances = this.hasChances
      ? " By chance: how often a row changed at least as much when the captures of both sets were divided into two at random."
      : "";
    element.querySelector("[data-part=caption]").textContent =
      `${this.percent ? "Shares of the samples of each side; changes in percentage points." : "Samples of each side."}${chances}`;
    this.columns = [
      { name: "before", text: "Before", cell: (row) => this.value(row.before), key: (row) => row.before },
      { name: "after", text: "After", cell: (row) => this.value(row.after), key: (row) => row.after },
      { name: "change", text: "Change", cell: (row) => this.change(row.change), key: (row) => Math.abs(row.change) },
      { name: "bar", text: "", cell: (row) => this.bar(row) },
      ...(this.hasChances
        ? [{ name: "chance", text: "By chance", cell: (row) => this.chance(row.by_chance), key: (row) => -(row.by_chance ?? 2) }]
        : []),
      { name: "mostly", text: "Most changed", cell: (row) => this.mostly(row) },
      { name: "name", text: data.by[0].toUpperCase() + data.by.slice(1), cell: (row) => this.name(row), key: (row) => row.name },
    ];
    this.filter.oninput = () => this.draw();
    this.draw();
  }

  value(number) {
    return this.percent ? `${number.toFixed(1)} %` : counted(number);
  }

  change(number) {
    const text = this.percent ? Math.abs(number).toFixed(1) : counted(Math.abs(number));
    return Number(text.replaceAll(",", "")) ? `${number < 0 ? "−" : "+"}${text}` : text;
  }

  chance(number) {
    if (number === undefined) return "";
    return number < 0.001 ? "< 0.1 %" : `${(100 * number).toFixed(1)} %`;
  }

  mostly(row) {
    const [reason, change] = Object.entries(row.reasons).reduce((most, each) => (Math.abs(each[1]) > Math.abs(most[1]) ? each : most), ["", 0]);
    return reason ? `${reason} ${this.change(change)}` : "";
  }

  bar(row) {
    const svg = drawn("svg", { viewBox: "-100 0 200 10", preserveAspectRatio: "none", "aria-hidden": "true" });
    const length = this.most ? (100 * Math.abs(row.change)) / this.most : 0;
    svg.setAttribute("class", row.change > 0 ? "difference-more" : "difference-less");
    svg.append(drawn("rect", { x: row.change > 0 ? 0 : -length, y: 1, width: length, height: 8 }), drawn("line", { x1: 0, x2: 0, y1: 0, y2: 10 }));
    return svg;
  }

  name(row) {
    const cell = document.createDocumentFragment();
    cell.append(made("span", "", row.name));
    if (row.state === "new" || row.state === "gone") cell.append(made("b", "", row.state));
    if (row.place) cell.append(made("small", "", row.place));
    return cell;
  }

  draw() {
    const { entries, more, total } = this.data, { by, down } = this.order;
    const wanted = this.filter.value.toLowerCase();
    const rows = entries.filter((row) => `${row.name} ${row.place}`.toLowerCase().includes(wanted));
    const { key } = this.columns.find((column) => column.name === by);
    rows.sort((one, other) => {
      const [a, b] = [key(one), key(other)];
      return (a < b ? -1 : a > b ? 1 : 0) * (down ? -1 : 1);
    });
    this.head.replaceChildren(...this.columns.map((column) => this.heading(column)));
    const sums = [...(more.entries ? [[more, `(${counted(more.entries)} more)`]] : []), [total, "(total)"]];
    this.body.replaceChildren(
      ...rows.map((row) => this.row(row, "")),
      ...(wanted ? [] : sums.map(([sum, name]) => this.row({ ...sum, name }, "difference-sum"))),
    );
    this.says.textContent = wanted ? `${counted(rows.length)} of ${several(entries.length, "row")}` : "";
  }

  heading(column) {
    const head = made("th", `difference-${column.name}`);
    head.scope = "col";
    if (!column.key) {
      head.textContent = column.text;
      return head;
    }
    const button = made("button", "", column.text);
    button.type = "button";
    button.onclick = () => {
      this.order = { by: column.name, down: this.order.by === column.name ? !this.order.down : column.name !== "name" };
      this.draw();
      this.head.querySelector(`.difference-${column.name} button`).focus();
    };
    head.append(button);
    if (this.order.by === column.name) head.ariaSort = this.order.down ? "descending" : "ascending";
    return head;
  }

  row(entry, className) {
    const row = made("tr", className);
    for (const column of this.columns) {
      const cell = made("td", `difference-${column.name}`);
      if (!(className && column.name === "bar")) cell.append(column.cell(entry));
      row.append(cell);
    }
    return row;
  }
}

async function openPage() {
  let told = () => {};
  followTheme(() => told());
  await new Promise((done) => document.addEventListener("DOMContentLoaded", done, { once: true }));
  const element = (id) => document.getElementById(id);
  const payload = await readPayload(element("payload")), data = payload.panels;
  element("payload").remove();
  document.getElementById("subtitle").textContent = data.sides.map((side) => side.name).join("  →  ");
  element("reading").remove();
  element("content").hidden = false;
  const sides = document.querySelector("[data-part=sides]");
  data.sides.forEach((side) => sides.append(made("dt", "", side.name), made("dd", "", side.facts)));
  const page = { difference: new Difference(data, element("difference")) };
  if (payload.trees.stalls) {
    told = drawStacks(page, payload);
    element("helping").hidden = false;
    element("helping").onclick = () => page.help.toggle();
  }
  window.iaprof = Object.freeze(page); // for tests and curious readers
  document.documentElement.dataset.ready = "yes";
}

openPage().catch((error) => {
  const reading = document.getElementById("reading");
  if (reading) reading.textContent = `This page cannot be shown: ${error.message}. It needs a browser of 2023 or later.`;
  throw error;
});
