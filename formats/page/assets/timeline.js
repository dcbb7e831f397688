"use strict";
// Launches, stalls and metrics over time, one chart below the other on one axis. Dragging over any of them selects.

function drawTimeline(model, element) {
  const WIDTH = 1000; // of a drawing, in units of its own: it is stretched to the width that there is
  const BUCKETS = 1000; // of stalls: one for each pixel or two
  const HEIGHT = 100;
  const CLICK = 3; // pixels that a pointer may move in a click
  const STEPS = 100; // of the arrow keys, over the whole time
  const seconds = Math.max(model.seconds || 0, model.data.seconds) || 1;
  const charts = []; // { plot, cursor, brush, value(seconds) }

  const inSeconds = (value) => `${value.toFixed(seconds < 20 ? 2 : 1)} s`;
  const scaled = (value) =>
    value >= 10000 ? counted(value) : value >= 100 ? value.toFixed(0) : String(Number(value.toPrecision(3)));
  const at = (value) => ((value / seconds) * WIDTH).toFixed(2);

  /** A row: what it is, its range of values, and a drawing. */
  function chart(name, range, className, value, label) {
    const row = made("div", `time-row ${className}`);
    const head = made("div", "time-head");
    const reading = made("span", "time-reading");
    const what = made("span", "time-name", name);
    what.title = name;
    head.append(what, made("span", "time-range", range), reading);
    const plot = made("div", "time-plot");
    const svg = drawn("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    svg.setAttribute("aria-label", label || `${name}, ${range}`);
    const brush = made("div", "time-brush"), cursor = made("div", "time-cursor");
    plot.append(svg, brush, cursor);
    row.append(head, plot);
    rows.append(row);
    charts.push({ plot, cursor, brush, reading, value });
    return svg;
  }

  /** An area of bars that touch one another, from counts in spans of equal length. */
  function area(svg, counts, step, most, className) {
    let path = `M0,${HEIGHT}`;
    counts.forEach((count, index) => {
      const y = (HEIGHT - (count / most) * (HEIGHT - 2)).toFixed(2);
      path += `L${at(index * step)},${y}L${at(Math.min((index + 1) * step, seconds))},${y}`;
    });
    path += `L${at(Math.min(counts.length * step, seconds))},${HEIGHT}Z`;
    svg.append(drawn("path", { d: path, class: className }));
  }

  /** A line through points. Where nothing was measured for long, it stops. */
  function line(svg, { x, y }, low, high, number) {
    const gap = x.length > 1 ? Math.max(5 * ((x[x.length - 1] - x[0]) / (x.length - 1)), 0.5) : 0;
    let path = "";
    for (let i = 0; i < x.length; i++) {
      const height = high > low ? (y[i] - low) / (high - low) : 0;
      const to = `${at(x[i])},${(HEIGHT - 3 - height * (HEIGHT - 6)).toFixed(2)}`;
      path += i && x[i] - x[i - 1] <= gap ? `L${to}` : `M${to}h0.01`;
    }
    svg.append(drawn("path", { d: path, class: `time-line time-line-${number % 4}` }));
  }

  /** The value of a metric at a moment: the last one before it. */
  function valueAt({ x, y }, moment) {
    let low = 0, high = x.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (x[middle] <= moment) low = middle + 1; else high = middle;
    }
    return low ? y[low - 1] : undefined;
  }

  element.classList.add("timeline");
  element.tabIndex = 0;
  element.setAttribute("role", "group");
  element.setAttribute(
    "aria-label", "Time line. Left and right move the cursor, with Shift they select a range, Escape selects all.");
  const said = made("p", "time-said");
  said.setAttribute("aria-live", "polite");
  const rows = made("div", "time-rows");
  element.append(said, rows);

  const operators = model.data.operators;
  if (operators && operators.threads.length) {
    rows.append(made("div", "time-heading", "Operators, the threads that are busiest with them"));
    for (const thread of operators.threads) {
      const shown = thread.begins.length;
      const many = shown === thread.all ? counted(shown) : `the ${counted(shown)} longest of ${counted(thread.all)}`;
      const svg = chart(
        thread.name, many, "time-operators", (moment) => operatorsAt(thread, operators.names, moment),
        `operators of ${thread.name}, ${many}`);
      drawOperators(svg, thread, at, HEIGHT);
    }
  }

  const launches = model.data.launches;
  if (launches && launches.rows.length) {
    const heading = made("div", "time-heading", "Launches per kernel, each at its own scale");
    rows.append(heading);
    for (const { name, counts, other } of launches.rows) {
      const sum = counts.reduce((total, count) => total + count, 0);
      const svg = chart(name, counted(sum), `time-launches${other ? " time-others" : ""}`, (moment) => {
        const index = Math.min(Math.floor(moment / launches.step), counts.length - 1);
        return `${counted(counts[index] / launches.step)}/s`;
      }, `launches of ${name}, ${counted(sum)} in all`);
      area(svg, counts, launches.step, Math.max(1, ...counts), "time-area");
    }
  }

  const waits = model.data.waits;
  if (waits && waits.rows.length) {
    rows.append(made("div", "time-heading", "Threads that wait for the GPU, each function at its own scale"));
    for (const { name, us } of waits.rows) {
      const sum = us.reduce((total, each) => total + each, 0);
      const svg = chart(name, `${(sum / 1e6).toFixed(3)} s`, "time-launches time-waits", (moment) => {
        const index = Math.min(Math.floor(moment / waits.step), us.length - 1);
        return `${(us[index] / waits.step / 1e6).toFixed(2)} threads`;
      }, `waits in ${name}, ${(sum / 1e6).toFixed(3)} s in all`);
      area(svg, us, waits.step, Math.max(1, ...us), "time-area");
    }
  }

  const stalls = model.stallsPerInterval;
  if (stalls && stalls.length) {
    rows.append(made("div", "time-heading", "GPU samples, active ones included"));
    const each = Math.max(Math.ceil(stalls.length / BUCKETS), 1);
    const counts = [];
    for (let from = 0; from < stalls.length; from += each) {
      let sum = 0;
      for (let i = from; i < Math.min(from + each, stalls.length); i++) sum += stalls[i];
      counts.push(sum);
    }
    const step = each * model.intervalSeconds;
    const most = Math.max(1, ...counts);
    const svg = chart(
      "samples", `0 to ${counted(most / step)} per s`, "time-stalls",
      (moment) => `${counted((counts[Math.min(Math.floor(moment / step), counts.length - 1)] || 0) / step)}/s`);
    area(svg, counts, step, most, "time-area");
  }

  const groups = new Map();
  for (const series of model.data.series) {
    const key = JSON.stringify([series.name, series.unit]);
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(series);
  }
  if (groups.size) rows.append(made("div", "time-heading", "Metrics"));
  const never = []; // they were all the time 0
  for (const group of groups.values()) {
    const { name, unit } = group[0];
    if (group.every((series) => series.low === 0 && series.high === 0)) {
      never.push(name);
      continue;
    }
    const low = Math.min(...group.map((series) => series.low)), high = Math.max(...group.map((series) => series.high));
    // From 0 on, or small changes of large values would look like large ones.
    const base = Math.min(low, 0);
    const range = low === high ? `${scaled(low)} ${unit}` : `${scaled(low)} to ${scaled(high)} ${unit}`;
    const svg = chart(name, range, "time-metric", (moment) =>
      group.map((series) => valueAt(series, moment)).filter((value) => value !== undefined).map(scaled).join(" · "));
    group.forEach((series, number) => line(svg, series, base, high, number));
    if (group.length > 1 || group[0].place) {
      const legend = made("div", "time-legend");
      group.slice(0, 8).forEach((series, number) => {
        const item = made("span", `time-key time-key-${number % 4}`, series.place || "all");
        legend.append(item);
      });
      if (group.length > 8) legend.append(made("span", "", `and ${group.length - 8} more`));
      charts[charts.length - 1].plot.parentElement.firstChild.append(legend);
    }
  }
  if (!charts.length) {
    said.textContent = "Nothing was recorded over time.";
    return;
  }

  const axis = made("div", "time-row time-axis");
  const ticks = made("div", "time-ticks");
  const wanted = seconds / 6;
  const unit = 10 ** Math.floor(Math.log10(wanted));
  const step = [1, 2, 5, 10].map((factor) => factor * unit).find((each) => each >= wanted);
  for (let tick = 0; tick <= seconds * 0.98; tick += step) {
    const label = made("span", "", `${Number(tick.toPrecision(6))} s`);
    label.style.left = `${(100 * tick) / seconds}%`;
    ticks.append(label);
  }
  axis.append(made("div", "time-head"), ticks);
  rows.append(axis);
  if (never.length) rows.append(made("p", "time-never", `Always 0: ${never.join(", ")}.`));

  function showSelection() {
    const { begin, end } = model.selection || {};
    for (const { brush } of charts) {
      brush.hidden = !model.selection;
      if (model.selection) setSpan(brush, begin, end);
    }
    said.textContent = model.selection
      ? `${range(model.selection)} selected. Click or press Escape for the whole recording.`
      : "Drag over a chart to select a range: flame graph and kernels follow.";
  }
  function setSpan(brush, begin, end) {
    brush.style.left = `${(100 * begin) / seconds}%`;
    brush.style.width = `${(100 * Math.max(end - begin, 0)) / seconds}%`;
  }
  function showCursor(moment) {
    for (const { cursor, reading, value } of charts) {
      cursor.hidden = moment === null;
      if (moment !== null) cursor.style.left = `${(100 * moment) / seconds}%`;
      reading.textContent = moment === null ? "" : value(moment);
    }
    const label = ticks.querySelector(".time-now") || ticks.appendChild(made("b", "time-now"));
    label.hidden = moment === null;
    if (moment !== null) {
      label.textContent = inSeconds(moment);
      label.style.left = `${(100 * moment) / seconds}%`;
    }
  }

  let anchor = null; // where a drag or a selection by keys began
  let moment = null; // of the cursor
  const momentOf = (plot, event) => {
    const box = plot.getBoundingClientRect();
    return (Math.min(Math.max(event.clientX - box.left, 0), box.width) / box.width) * seconds;
  };
  for (const { plot } of charts) {
    let pressed = null; // pixels
    plot.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      plot.setPointerCapture(event.pointerId);
      pressed = event.clientX;
      anchor = momentOf(plot, event);
    });
    plot.addEventListener("pointermove", (event) => {
      moment = momentOf(plot, event);
      showCursor(moment);
      if (pressed === null || Math.abs(event.clientX - pressed) <= CLICK) return;
      for (const { brush } of charts) {
        brush.hidden = false;
        setSpan(brush, Math.min(anchor, moment), Math.max(anchor, moment));
      }
    });
    plot.addEventListener("pointerup", (event) => {
      if (pressed === null) return;
      const moved = Math.abs(event.clientX - pressed) > CLICK;
      moment = momentOf(plot, event);
      pressed = null;
      if (moved) model.select(Math.min(anchor, moment), Math.max(anchor, moment));
      else model.select(null);
      showSelection();
    });
    plot.addEventListener("pointercancel", () => {
      pressed = null;
      showSelection();
    });
    plot.addEventListener("pointerleave", () => showCursor(null));
  }
  element.addEventListener("keydown", (event) => {
    const step = seconds / STEPS;
    const to = { ArrowLeft: (moment || 0) - step, ArrowRight: (moment || 0) + step, Home: 0, End: seconds };
    if (event.key === "Escape") {
      anchor = null;
      model.select(null);
    } else if (event.key in to) {
      const from = moment === null ? 0 : moment;
      moment = Math.min(Math.max(to[event.key], 0), seconds);
      if (!event.shiftKey) anchor = null;
      else {
        anchor = anchor === null ? from : anchor;
        if (anchor !== moment) model.select(Math.min(anchor, moment), Math.max(anchor, moment));
      }
      showCursor(moment);
    } else return;
    event.preventDefault();
    event.stopPropagation();
  });
  element.addEventListener("blur", () => showCursor(null));
  model.on("selection", showSelection);
  showSelection();
  showCursor(null);
}
