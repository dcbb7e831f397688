"use strict";
// The table of kernels with the reasons of their samples, and the instructions of the chosen one.

function drawKernels(model, element) {
  const FEW = 20; // kernels that are shown at first
  const HOT = 0.05; // of a kernel's samples: an instruction that is worth a look
  const table = model.data.kernels;
  const sum = (counts) => counts.reduce((total, count) => total + count, 0);
  const mostly = (counts) => counts.indexOf(Math.max(...counts));
  const columns = [
    { key: "name", label: "Kernel", text: true },
    { key: "samples", label: "Samples" },
    { key: "share", label: "Share" },
    { key: "reasons", label: "Reasons", text: true },
    { key: "mostly", label: "Top reason", text: true },
    { key: "launches", label: "Launches" },
    { key: "processes", label: "Processes" },
  ];
  const hasEnergy = table.others.joules !== undefined;
  if (hasEnergy) columns.push({ key: "joules", label: "Joules" });
  const joules = (value) => (value >= 100 ? counted(value) : value.toPrecision(3));
  let sorted = { key: "samples", down: true };
  let all = false; // kernels are shown

  const state = made("p", "kernels-state");
  state.setAttribute("aria-live", "polite");
  const filter = made("input", "kernels-filter");
  filter.type = "search";
  filter.placeholder = "Filter kernels";
  filter.setAttribute("aria-label", "Show only kernels whose name or file has this in it");
  const legend = made("ul", "kernels-legend");
  legend.setAttribute("aria-label", "Reasons");
  const grid = made("table", "kernels-table");
  const head = made("thead"), body = made("tbody");
  const titles = made("tr");
  for (const column of columns) {
    const title = made("th", `kernels-${column.key}`);
    title.scope = "col";
    const button = made("button", "", column.label);
    button.type = "button";
    button.addEventListener("click", () => {
      sorted = { key: column.key, down: sorted.key === column.key ? !sorted.down : !column.text };
      showTable();
    });
    title.append(button);
    titles.append(title);
  }
  head.append(titles);
  grid.append(head, body);
  const more = made("button", "kernels-more");
  more.type = "button";
  more.addEventListener("click", () => {
    all = true;
    showTable();
  });
  const listing = made("div", "listing");
  listing.tabIndex = -1;
  const tools = made("div", "kernels-tools");
  tools.append(filter, state);
  element.append(tools, legend, grid, more, listing);

  /** The rows of the table in the chosen range. */
  function rowsNow() {
    const shown = (count, reason) => (model.isShown(reason) ? count : 0);
    const found = model.selection ? model.kernelsIn(model.selection.begin, model.selection.end) : null;
    const known = new Set();
    const rows = table.rows.map((row) => {
      known.add(row.name);
      return { ...row, counts: found ? Array.from(found.get(row.name) || new Array(REASON_COUNT).fill(0)) : row.counts.map(shown) };
    });
    const others = found ? new Array(REASON_COUNT).fill(0) : table.others.counts.map(shown);
    if (found)
      for (const [name, counts] of found)
        if (!known.has(name)) counts.forEach((count, reason) => (others[reason] += count));
    for (const row of rows) row.samples = sum(row.counts);
    return { rows, others, total: sum(others) + sum(rows.map((row) => row.samples)) };
  }

  function reasonBar(counts, total, label) {
    const bar = made("span", "reasons");
    const order = counts.map((_, reason) => reason).filter((reason) => counts[reason]);
    order.sort((a, b) => counts[b] - counts[a]);
    for (const reason of order) {
      const part = made("span", `reason reason-${reason}`);
      part.style.width = `${(100 * counts[reason]) / total}%`;
      part.title = `${model.reasons[reason]}: ${counted(counts[reason])} (${percentOf(counts[reason], total)})`;
      bar.append(part);
    }
    bar.setAttribute("role", "img");
    const texts = order.map((reason) => `${model.reasons[reason]} ${percentOf(counts[reason], total)}`);
    bar.setAttribute("aria-label", `${label}${texts.join(", ") || "no samples"}`);
    return bar;
  }

  function showTable() {
    const { rows, others, total } = rowsNow();
    const wanted = filter.value.trim().toLowerCase();
    const matching = rows.filter((row) => `${row.name}\n${row.file}`.toLowerCase().includes(wanted));
    const of = {
      name: (row) => row.name,
      samples: (row) => row.samples,
      share: (row) => row.samples,
      reasons: (row) => (row.samples ? Math.max(...row.counts) / row.samples : 0),
      mostly: (row) => (row.samples ? model.reasons[mostly(row.counts)] : ""),
      launches: (row) => row.launches || 0,
      processes: (row) => row.processes,
      joules: (row) => row.joules || 0,
    }[sorted.key];
    matching.sort((a, b) => {
      const [one, other] = [of(a), of(b)];
      const order = typeof one === "string" ? one.localeCompare(other) : one - other;
      return (sorted.down ? -order : order) || b.samples - a.samples;
    });
    [...titles.children].forEach((title, index) => {
      const mine = columns[index].key === sorted.key;
      title.setAttribute("aria-sort", mine ? (sorted.down ? "descending" : "ascending") : "none");
    });
    const most = Math.max(1, ...rows.map((row) => row.samples));
    const shown = all || wanted ? matching : matching.slice(0, FEW);
    body.replaceChildren(...shown.map((row) => tableRow(row, total, most)));
    if (!wanted && table.others.kernels && (all || matching.length <= FEW)) {
      body.append(othersRow(others, total));
    }
    more.hidden = shown.length === matching.length;
    const beyond = table.others.kernels; // which the page has no rows of
    const here = counted(rows.length);
    more.textContent = beyond ? `Show ${here} of ${counted(rows.length + beyond)} kernels` : `Show all ${here} kernels`;
    const when = model.selection ? range(model.selection) : "Whole recording";
    const found = wanted ? `${counted(matching.length)} of ${beyond ? `the ${here} kernels with most samples` : `${here} kernels`} match. ` : "";
    const launched = model.selection ? ` Launches${hasEnergy ? ", joules" : ""} and processes are those of the whole recording.` : "";
    state.textContent = `${found}${when}: ${counted(total)} samples.${launched}`;
  }

  function tableRow(row, total, most) {
    const line = made("tr");
    const chosen = row.name === model.kernel;
    if (chosen) line.className = "chosen";
    const name = made("td", "kernels-name");
    const button = made("button", "", row.name);
    button.type = "button";
    button.title = row.name;
    button.setAttribute("aria-expanded", String(chosen));
    name.append(button);
    if (row.file) {
      const file = made("span", "kernels-file"); // which is cut at its beginning
      file.append(made("bdi", "", row.file));
      name.append(file);
    }
    const share = made("td", "kernels-share");
    share.append(made("span", "", percentOf(row.samples, total)));
    const reasons = made("td", "kernels-reasons");
    const bar = reasonBar(row.counts, row.samples, `${row.name}: `);
    bar.style.width = `${(100 * row.samples) / most}%`;
    reasons.append(bar);
    const main = mostly(row.counts);
    const text = row.samples ? `${model.reasons[main]} ${percentOf(row.counts[main], row.samples)}` : "";
    line.append(
      name,
      made("td", "kernels-samples", counted(row.samples)),
      share,
      reasons,
      made("td", "kernels-mostly", text),
      made("td", "kernels-launches", row.launches === null ? "–" : counted(row.launches)),
      made("td", "kernels-processes", counted(row.processes)),
    );
    if (hasEnergy) line.append(made("td", "kernels-joules", joules(row.joules)));
    line.addEventListener("click", () => model.selectKernel(chosen ? null : row.name));
    return line;
  }

  function othersRow(counts, total) {
    const line = made("tr", "kernels-others");
    const samples = sum(counts);
    line.append(
      made("td", "kernels-name", `${counted(table.others.kernels)} other kernels`),
      made("td", "kernels-samples", counted(samples)),
      made("td", "kernels-share", percentOf(samples, total)),
      made("td", "kernels-reasons"), made("td", "kernels-mostly"),
      made("td", "kernels-launches"), made("td", "kernels-processes"),
    );
    if (hasEnergy) line.append(made("td", "kernels-joules", joules(table.others.joules)));
    return line;
  }

  function showLegend() {
    const totals = table.rows.reduce((all, row) => all.map((count, reason) => count + row.counts[reason]), new Array(REASON_COUNT).fill(0));
    legend.replaceChildren(
      ...model.reasons.flatMap((reason, number) => {
        if (!totals[number]) return [];
        const item = made("li");
        item.append(made("span", `reason-key reason reason-${number}`), reason);
        return [item];
      }),
    );
  }

  function showListing(focus) {
    listing.replaceChildren();
    listing.hidden = model.kernel === null;
    if (listing.hidden) return;
    const row = table.rows.find((each) => each.name === model.kernel);
    const header = made("div", "listing-header");
    const close = made("button", "", "Close");
    close.type = "button";
    close.addEventListener("click", () => {
      model.selectKernel(null);
      const button = [...body.querySelectorAll("button")].find((each) => row && each.textContent === row.name);
      (button || filter).focus();
    });
    header.append(made("h3", "", model.kernel), close);
    listing.append(header);
    const indices = row ? row.listings : [];
    if (!indices.length)
      listing.append(made(
        "p", "listing-note", "This page has the instructions of the hottest kernels only: 'iaprof annotate' prints those of this one."));
    for (const index of indices) listing.append(instructions(model.data.listings[index], indices.length > 1));
    if (focus) {
      listing.focus({ preventScroll: true });
      listing.scrollIntoView({ block: "nearest" });
    }
  }

  /** The instructions of one kernel's code. */
  function instructions(kernel, several) {
    const box = made("div", "listing-code");
    const count = (row) => row[2].reduce((total, [, samples]) => total + samples, 0);
    const most = Math.max(1, ...kernel.rows.map(count));
    const notes = [`${counted(kernel.samples)} samples in the whole recording`];
    if (kernel.simd) notes.push(`SIMD${kernel.simd}`);
    if (several) notes.unshift("One of several kernels of this name");
    if (kernel.leftOut) notes.push(`${counted(kernel.leftOut)} instructions with few or no samples are left out`);
    notes.push("a stall is counted at the instruction that waits");
    box.append(made("p", "listing-note", `${notes.join("; ")}.`));
    const said = made("p", "listing-said");
    said.setAttribute("aria-live", "polite");
    const list = made("div", "listing-rows");
    list.setAttribute("role", "list");
    list.setAttribute("aria-label", `Instructions of ${kernel.kernel}. Up and down move, Enter goes to what one waits for, H to the hottest.`);
    if (!kernel.places.some((place) => place.line)) list.classList.add("placeless");
    box.append(list, said); // below, so that the list keeps its place whatever is said
    const lines = []; // { line, row, waits: offsets }
    const byOffset = new Map();
    let hottest = 0;
    let before = null, last = null;
    for (const row of kernel.rows) {
      const [offset, text, reasons, waits, placeNumber] = row;
      const place = kernel.places[placeNumber];
      if (last !== null && offset - last > 16) list.append(made("div", "listing-gap", "⋯"));
      last = offset;
      source(list, before, place);
      before = place;
      const samples = count(row);
      const line = made("div", "listing-row");
      line.setAttribute("role", "listitem");
      line.tabIndex = -1;
      const bar = made("span", "listing-bar");
      if (samples) {
        const fill = made("span", "listing-fill");
        fill.style.width = `${(100 * samples) / most}%`;
        const order = reasons.slice().sort((a, b) => b[1] - a[1]);
        for (const [reason, part] of order) {
          const piece = made("span", `reason reason-${reason}`);
          piece.style.width = `${(100 * part) / samples}%`;
          fill.append(piece);
        }
        bar.append(fill);
        line.title = order.map(([reason, part]) => `${model.reasons[reason]} ${percentOf(part, samples)}`).join(", ");
      } else line.classList.add("idle");
      if (samples >= HOT * kernel.samples) line.classList.add("hot");
      const [top] = reasons.slice().sort((a, b) => b[1] - a[1]);
      line.append(
        made("span", "listing-samples", samples ? counted(samples) : ""),
        made("span", "listing-share", samples ? percentOf(samples, kernel.samples) : ""),
        bar,
        made("span", "listing-reason", top ? model.reasons[top[0]] : ""),
        made("span", "listing-offset", `0x${offset.toString(16)}`),
        placed(place),
        made("span", "listing-text", text.trim().split(/\s+/).join(" ")),
      );
      const number = lines.length;
      line.addEventListener("focus", () => show(number));
      line.addEventListener("pointerenter", () => show(number));
      line.addEventListener("click", () => line.focus());
      if (samples > count(kernel.rows[hottest])) hottest = number;
      byOffset.set(offset, number);
      lines.push({ line, row, waits: waits.flatMap(([, offsets]) => offsets) });
      list.append(line);
    }
    if (!lines.length) return box;
    lines[hottest].line.classList.add("hottest");
    lines[hottest].line.tabIndex = 0;

    /** Tells of an instruction, and marks those that it waits for. */
    function show(number) {
      for (const marked of list.querySelectorAll(".awaited")) marked.classList.remove("awaited");
      const { row: [offset, , reasons, waits], waits: offsets } = lines[number];
      for (const each of offsets)
        if (byOffset.has(each)) lines[byOffset.get(each)].line.classList.add("awaited");
      const samples = count(lines[number].row);
      const parts = reasons.slice().sort((a, b) => b[1] - a[1]).slice(0, 3);
      const why = parts.map(([reason, part]) => `${model.reasons[reason]} ${percentOf(part, samples)}`).join(", ");
      const waiting = waits.map(([what, givers]) => {
        const back = /@([0-9]+)$/.exec(what);
        if (back) return `waits for the instruction ${back[1]} back in its pipe (${what})`;
        const names = givers.map((each) => named(each)).join(" or ");
        return `waits for ${names ? `${names} (${what})` : what}`;
      });
      said.textContent = [`0x${offset.toString(16)}`, samples ? `${counted(samples)} samples, ${why}` : "no samples", ...waiting].join(" · ");
    }
    function named(offset) {
      const number = byOffset.get(offset);
      const opcode = number === undefined ? "" : ` ${lines[number].row[1].trim().replace(/^\([^)]*\)\s*/, "").split(/\s+/)[0]}`;
      return `0x${offset.toString(16)}${opcode}`;
    }
    function go(number) {
      for (const { line } of lines) line.tabIndex = -1;
      lines[number].line.tabIndex = 0;
      lines[number].line.focus();
    }
    list.addEventListener("keydown", (event) => {
      const now = lines.findIndex(({ line }) => line === document.activeElement);
      if (now < 0) return;
      const key = event.key.toLowerCase();
      const giver = lines[now].waits.find((offset) => byOffset.has(offset));
      const to = {
        arrowup: now - 1, arrowdown: now + 1, home: 0, end: lines.length - 1, h: hottest,
        enter: giver === undefined ? now : byOffset.get(giver),
      }[key];
      if (to === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
      go(Math.min(Math.max(to, 0), lines.length - 1));
      event.preventDefault();
      event.stopPropagation();
    });
    show(hottest);
    // The list scrolls for itself: its beginning need not be where time is spent.
    requestAnimationFrame(() => {
      list.scrollTop = lines[hottest].line.offsetTop - list.clientHeight / 2;
    });
    return box;
  }

  function placed(place) {
    const where = made("span", "listing-place", place.line ? `${place.file.split("/").pop() || "?"}:${place.line}` : "");
    where.title = place.file;
    return where;
  }

  /** Where the following instructions are from, as far as it is not where those before them are. */
  function source(list, before, place) {
    const inside = place.functions.slice(1).join(" › ");
    if (inside !== (before ? before.functions.slice(1).join(" › ") : ""))
      list.append(made("div", "listing-function", inside ? `in ${inside}` : `in ${place.functions[0]}`));
    if (place.source === null || (before && before.file === place.file && before.line === place.line)) return;
    list.append(made("div", "listing-source", place.source));
  }

  filter.addEventListener("input", showTable);
  model.on("selection", showTable);
  model.on("active", showTable);
  model.on("kernel", () => {
    showTable();
    showListing(true);
  });
  showLegend();
  showTable();
  showListing(false);
}
