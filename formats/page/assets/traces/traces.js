// Puts the page of a time line together: its pictures, tables and warnings.

const FEW_ROWS = 12; // of a table, until more are asked for

/** A table that is sorted by the column that is chosen. */
function drawTable({ title, caption, columns, rows: given, more }) {
  const section = made("section");
  const table = made("table", "grid"), head = made("thead"), body = made("tbody"), titles = made("tr");
  const button = made("button", "grid-more");
  button.type = "button";
  const says = made("p", "caption", caption);
  let sorted = { column: -1, down: true }, all = false, rows = given;
  const shown = (value) => (typeof value === "number" ? value.toLocaleString("en-US", { maximumFractionDigits: 4 }) : value ?? "");
  const show = () => {
    const order = rows.slice();
    if (sorted.column >= 0)
      order.sort((one, other) => {
        const [a, b] = [one[sorted.column], other[sorted.column]];
        if (a === b) return 0;
        if (a === null || b === null) return a === null ? 1 : -1;
        return (a < b ? -1 : 1) * (sorted.down ? -1 : 1);
      });
    const some = all ? order : order.slice(0, FEW_ROWS);
    body.replaceChildren(...some.map((row) => {
      const line = made("tr");
      row.forEach((value, index) => {
        const cell = made("td", columns[index].number ? "number" : "", shown(value));
        if (!columns[index].number) cell.title = shown(value);
        line.append(cell);
      });
      return line;
    }));
    [...titles.children].forEach((cell, index) =>
      cell.setAttribute("aria-sort", index !== sorted.column ? "none" : sorted.down ? "descending" : "ascending"));
    button.hidden = some.length === rows.length;
    button.textContent = `Show all ${counted(rows.length)}`;
  };
  columns.forEach(({ name, number, unit }, index) => {
    const cell = made("th", number ? "number" : ""), press = made("button", "", unit ? `${name}, ${unit}` : name);
    cell.scope = "col";
    press.type = "button";
    press.onclick = () => {
      sorted = { column: index, down: sorted.column === index ? !sorted.down : Boolean(number) };
      show();
    };
    cell.append(press);
    titles.append(cell);
  });
  button.onclick = () => {
    all = true;
    show();
  };
  head.append(titles);
  table.append(head, body);
  const around = made("div", "grid-around");
  around.tabIndex = 0; // for keys to scroll it
  around.append(table);
  section.append(made("h2", "", title), says, around, button);
  if (more) section.append(made("p", "caption", `${counted(more)} more: iaprof timeline -o writes them all.`));
  section.showRows = (others, text) => {
    rows = others;
    says.textContent = text;
    show();
  };
  show();
  return section;
}

/** A rank's iterations as bars; of several that share one, the slowest. */
function drawRun({ pid, Iterations: count, Mean, StDev, Min, Max, Slowest, Kernel, each, us, ...excesses }) {
  const WIDTH = 1000, HEIGHT = 100;
  const run = made("div", "run"), facts = made("div"), plot = made("div", "run-plot");
  const { "Idle Excess": idle, "Kernel Excess": excess } = excesses;
  const inUs = (value) => inTime(value * 1000);
  facts.append(
    made("b", "", `rank ${pid}: ${several(count, "iteration")}`),
    made("span", "", `mean ${inUs(Mean)}, deviation ${inUs(StDev)}`),
    made("span", "", `${inUs(Min)} to ${inUs(Max)}`));
  if (Slowest !== null) {
    const longer = [[idle, "idle"], [excess, Kernel]].filter(([value]) => value > 0).sort(([a], [b]) => b - a);
    const texts = longer.map(([value, what]) => `+${inUs(value)} ${what}`);
    facts.append(made("span", "", `slowest: number ${Slowest}${texts.length ? `, ${texts.join(", ")}` : ""}`));
  }
  const label = `Iterations of rank ${pid}, ${inUs(Min)} to ${inUs(Max)}`;
  const svg = drawn("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label });
  const step = WIDTH / us.length, most = Max || 1;
  const bar = (index) => {
    const y = HEIGHT - (us[index] / most) * (HEIGHT - 3);
    return `M${(index * step).toFixed(2)},${HEIGHT}V${y.toFixed(2)}H${((index + 1) * step).toFixed(2)}V${HEIGHT}Z`;
  };
  svg.append(drawn("path", { d: us.map((_, index) => bar(index)).join(""), class: "run-area" }));
  if (Slowest !== null) svg.append(drawn("path", { d: bar(Math.floor(Slowest / each)), class: "run-slowest" }));
  const y = HEIGHT - (Mean / most) * (HEIGHT - 3);
  svg.append(drawn("line", { x1: 0, x2: WIDTH, y1: y, y2: y, class: "run-mean" }));
  plot.append(svg);
  run.append(facts, plot);
  return run;
}

function drawFindings(data, element) {
  const groups = [{ heading: "Found by the stages", facts: data.notes.map((text) => ["", text]) }];
  const model = { data: { about: { warnings: data.warnings.concat(data.about.warnings), facts: data.about.facts.concat(data.notes.length ? groups : []) } } };
  drawAbout(model, element);
  const warnings = element.querySelector(".about-warnings");
  if (warnings) document.querySelector("header").after(foldable(warnings));
}

async function openPage() {
  let told = () => {};
  followTheme(() => told());
  // The payload stands behind this script, so that the page has its colours before all of it is read.
  await new Promise((done) => document.addEventListener("DOMContentLoaded", done, { once: true }));
  const element = (id) => document.getElementById(id);
  const payload = await readPayload(element("payload"));
  element("payload").remove();
  const data = payload.panels;
  const title = document.querySelector("h1");
  title.textContent = title.title = data.title;
  const { busy, tracks } = payload.trees;
  const parts = [several(busy.ranks.length + busy.more, "rank"), inTime(busy.ns), data.about.host];
  element("subtitle").textContent = parts.filter(Boolean).join("  ·  ");
  element("reading").remove();
  element("content").hidden = false;
  const view = new View(busy.ns);
  const page = { view, busy: null, tracks: null, counters: null };
  if (busy.ranks.length) page.busy = new BusyMap(view, busy, element("busy"));
  element("busy").hidden = !busy.ranks.length;
  page.tracks = new Tracks(view, tracks, element("tracks"));
  element("counters").hidden = !data.counters.curves.length;
  if (data.counters.curves.length) page.counters = new Counters(view, data.counters, element("counters"));
  told = () => {
    if (page.busy) page.busy.paint();
    if (page.counters) page.counters.draw();
    page.tracks.showLegend();
  };
  element("iterations").hidden = !data.iterations.length;
  element("iterations").querySelector("[data-part=charts]").append(...data.iterations.map(drawRun));
  element("tables").append(...data.tables.map((table) => {
    const section = drawTable(table);
    if (table.title === "Energy") page.energy = new EnergyTable(view, payload.trees.energy, table, section);
    return section;
  }));
  drawFindings(data, element("about").querySelector("div"));
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") view.show();
  });
  followPrinter(() => told(), () => [page.busy && page.busy.drawAll(), page.tracks.drawAll(), page.counters && page.counters.drawAll()]);
  window.iaprof = Object.freeze(page); // for tests and curious readers
  document.documentElement.dataset.ready = "yes";
}

openPage().catch((error) => {
  const reading = document.getElementById("reading");
  if (reading) reading.textContent = `This page cannot be shown: ${error.message}. It needs a browser of 2023 or later.`;
  throw error;
});
