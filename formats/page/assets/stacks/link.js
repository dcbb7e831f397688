// What is shown as a part of the page's address, after the #: a link that opens the page as it is now.

const LINK_DELAY = 400; // ms without a change, before the address changes
const LONGEST_SEARCH = 500; // letters of a link's search

class Link {
  constructor(model, flame) {
    this.model = model;
    this.flame = flame;
    this.restore(location.hash);
    for (const event of ["selection", "kernel", "active", "shown"]) model.on(event, () => this.later());
    addEventListener("hashchange", () => {
      if (location.hash !== this.written) this.restore(location.hash);
    });
  }

  /** The state as text; what is as at first is left out. */
  text() {
    const { model, flame } = this, found = new URLSearchParams();
    const put = (key, value, unless) => {
      if (value !== unless) found.set(key, value);
    };
    if (model.selection) found.set("time", `${tidy(model.selection.begin)}-${tidy(model.selection.end)}`);
    put("samples", flame.source, model.first.source);
    put("active", model.active ? "yes" : "no", "yes");
    put("view", flame.viewed, "graph");
    put("order", flame.inverted ? "leaves" : "callers", model.first.inverted ? "leaves" : "callers");
    put("root", flame.upward ? "bottom" : "top", "top");
    put("colour", flame.colouring, model.first.colouring);
    put("without", [...flame.hidden.graph].join(), "");
    put("ungrouped", FRAME_GROUPS.filter((group) => group && !flame.hidden.tree.has(group.key)).map((group) => group.key).join(), "");
    if (flame.focus !== null) found.set("function", flame.tree.texts.indexOf(flame.focus));
    const box = flame.viewed === "tree" ? flame.cursor : flame.zoomed, frames = [];
    for (let at = box; at && at.above; at = at.above) frames.unshift(at.frame);
    put("frame", frames.join("."), "");
    put("search", flame.search, "");
    if (model.kernel !== null) found.set("kernel", model.kernel);
    return found.toString();
  }

  later() {
    clearTimeout(this.waiting);
    this.waiting = setTimeout(() => this.write(), LINK_DELAY);
  }

  write() {
    const text = this.text();
    this.written = text ? `#${text}` : "";
    if (location.hash !== this.written) history.replaceState(null, "", this.written || location.pathname + location.search);
  }

  /** Shows what a link says. Whoever wrote it is unknown: what does not fit is left out. */
  restore(hash) {
    const { model, flame } = this, given = new URLSearchParams(hash.slice(1));
    const among = (key, values, first) => (values.includes(given.get(key)) ? given.get(key) : first);
    const keys = (key, first) =>
      given.has(key) ? new Set(given.get(key).split(",").filter((each) => FRAME_GROUPS.some((group) => group && group.key === each))) : first;
    const time = /^([\d.]+)-([\d.]+)$/.exec(given.get("time") || "");
    flame.source = among("samples", Object.keys(model.trees).filter((name) => !name.endsWith("Ranges")), model.first.source);
    flame.viewed = among("view", ["graph", "tree"], "graph");
    flame.inverted = among("order", ["callers", "leaves"], model.first.inverted ? "leaves" : "callers") === "leaves";
    flame.upward = among("root", ["top", "bottom"], "top") === "bottom";
    flame.colouring = among("colour", [...flame.parts.colouring.options].map((option) => option.value), model.first.colouring);
    flame.hidden.graph = keys("without", new Set());
    const ungrouped = keys("ungrouped", new Set());
    flame.hidden.tree = new Set(FRAME_GROUPS.slice(1).map((group) => group.key).filter((key) => !ungrouped.has(key)));
    flame.search = (given.get("search") || "").slice(0, LONGEST_SEARCH);
    flame.parts.search.value = flame.search;
    if (time && Number(time[1]) < Number(time[2])) model.select(Number(time[1]), Number(time[2]));
    else model.select(null);
    const active = among("active", ["yes", "no"], "yes") === "yes";
    if (active !== model.active) model.showActive(active);
    const name = model.chosen(flame.source).tree.texts[Number(given.get("function") ?? NaN)];
    flame.focus = name === undefined ? null : name;
    flame.renew(true);
    let box = flame.picture.root;
    for (const frame of (given.get("frame") || "").split(".").filter(Boolean).map(Number)) {
      const next = flame.picture.on(box).find((each) => each.frame === frame && each.value);
      if (!next) break;
      box = next;
    }
    if (box.above && flame.viewed === "tree") flame.calls.goto(box);
    else if (box.above) flame.enter(box, false);
    const kernel = given.get("kernel");
    model.selectKernel(model.kernels.includes(kernel) ? kernel : null);
  }
}

/** A number of seconds without the rounding of a product. */
function tidy(value) {
  return Number(value.toFixed(6));
}
