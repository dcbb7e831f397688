// What colours the frames of a flame graph and of a call tree have, and the legend that says so.

const OTHER_MODULES = 9; // colours that modules have, before the others share one

class FrameColours {
  /** Chooses colours by "kind", "reason" or "module", for what a picture shows of a tree. */
  constructor(model, tree, picture, colouring) {
    this.tree = tree;
    this.picture = picture;
    this.colouring = tree.gpu || colouring !== "reason" ? colouring : "kind";
    const reason = (index) => colour(`--reason-${index}`);
    const inked = (fill) => ({ fill, ink: inkOn(fill) });
    this.plain = { fill: colour("--frame-plain"), ink: colour("--ink") };
    this.match = { fill: colour("--match"), ink: colour("--match-ink") };
    this.all = { fill: colour("--frame-all"), ink: colour("--ink") };
    this.page = colour("--panel");
    this.ring = colour("--accent");
    this.kinds = model.kinds.map((_, kind) => ({ fill: colour(`--kind-${kind}`), ink: colour(`--kind-ink-${kind}`) }));
    this.reasons = model.reasons.map((_, index) => inked(reason(index)));
    const weights = new Map(), used = new Set(); // samples of modules; kinds
    const { own, total } = picture.sums;
    for (let node = 1; node < tree.size; node++) {
      if (!total[node]) continue;
      const frame = tree.frame[node], module = tree.modules[frame];
      used.add(tree.kinds[frame]);
      if (module) weights.set(module, (weights.get(module) || 0) + own[node] + 1e-9 * total[node]);
    }
    const ranked = [...weights].sort((a, b) => b[1] - a[1]).map(([module]) => module);
    this.modules = new Map(ranked.map((module, rank) => [module, rank < OTHER_MODULES ? inked(reason(rank)) : this.plain]));
    const inRoot = picture.reasons(picture.root);
    this.items = {
      kind: () => model.kinds.map((name, kind) => [name, this.kinds[kind], used.has(kind)]),
      reason: () => model.reasons.map((name, index) => [name, this.reasons[index], inRoot[index] > 0]),
      module: () => [...ranked.slice(0, OTHER_MODULES).map((module) => [model.modules[module], this.modules.get(module), true]),
        ["others", this.plain, ranked.length > OTHER_MODULES]],
    }[this.colouring]().filter(([, , there]) => there);
  }

  /** The colours { fill, ink } of a box. */
  of(box) {
    if (box.frame < 0) return this.all;
    if (this.colouring === "kind") return this.kinds[this.tree.kinds[box.frame]];
    if (this.colouring === "reason") return this.reasons[this.picture.mainReason(box)];
    return this.modules.get(this.tree.modules[box.frame]) || this.all;
  }

  /** The legend's items. */
  legend() {
    return this.items.map(([name, { fill }]) => {
      const item = made("li", "", name), patch = made("i");
      patch.style.background = fill;
      item.prepend(patch);
      return item;
    });
  }
}

/** Black or white, whichever can be read better on a colour (#rrggbb). */
function inkOn(fill) {
  const [red, green, blue] = [1, 3, 5].map((at) => {
    const share = parseInt(fill.slice(at, at + 2), 16) / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? "#000" : "#fff"; // where both contrasts are one (WCAG)
}
