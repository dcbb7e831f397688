// Two captures as one flame graph: as wide as the samples of one of them, with the colours of what changed.

const LARGE_CHANGE = 0.05, SOME_CHANGE = 0.01, LEAST_CHANGE = 0.0005; // shares of all samples

/** A model whose sources of samples are the two captures. */
class DifferenceModel extends Model {
  constructor(payload) {
    super(payload);
    const tree = this.trees.stalls;
    this.leaves = { before: tree.leavesIn(0, 1), after: tree.leavesIn(1, 2) };
    this.trees = { before: tree, after: tree };
    this.activeReason = -1; // all samples of both are compared
    this.activeReason = -1; // active samples are compared, too
    this.first = { source: "after", inverted: false, colouring: "change" };
  }

  chosen(source) {
    return { tree: this.trees[source], leaves: this.leaves[source] };
  }

  select() {} // there is no time
}

class ChangeColours extends FrameColours {
  constructor(flame) {
    super(flame.model, flame.tree, flame.picture, "kind");
    this.flame = flame;
    const inked = (name) => ({ fill: colour(name), ink: inkOn(colour(name)) });
    [this.more, this.less] = ["more", "less"].map((name) => [1, 2, 3].map((step) => inked(`--${name}-${step}`)));
    const unit = flame.model.data.unit === "percent" ? "points" : "% of all samples";
    this.items = [
      [`−5 ${unit} or more`, this.less[2]], ["−1 to −5", this.less[1]], ["0 to −1", this.less[0]], ["unchanged", this.plain],
      ["0 to +1", this.more[0]], ["+1 to +5", this.more[1]], [`+5 ${unit} or more`, this.more[2]],
    ];
  }

  of(box) {
    const change = this.flame.changeOf(box), size = Math.abs(change.share);
    if (size < LEAST_CHANGE) return box.frame < 0 ? this.all : this.plain;
    return (change.share > 0 ? this.more : this.less)[size >= LARGE_CHANGE ? 2 : size >= SOME_CHANGE ? 1 : 0];
  }
}

class DifferenceFlame extends Flame {
  build(element) {
    super.build(element);
    const option = made("option", "", "change");
    option.value = "change";
    this.parts.colouring.prepend(option);
    element.querySelector(".call-head .call-samples").textContent = "Change";
  }

  chooseColours() {
    return this.colouring === "change" ? new ChangeColours(this) : super.chooseColours();
  }

  /** What changed in a box or in an entry of the call tree: its values before and after, and the change as a share. */
  changeOf({ value, order, above }) {
    const { picture, model } = this, all = picture.whole.total[0];
    const here = above ? [value, picture.total] : [0, 1];
    const there = above ? [order - value, all - picture.total] : [0, 1]; // order: the samples of both
    const [before, after] = this.source === "after" ? [there, here] : [here, there];
    const share = ([count, total]) => count / Math.max(total, 1);
    if (model.data.unit === "percent") {
      const change = share(after) - share(before);
      return { before: percentOf(...before) || "0.0 %", after: percentOf(...after) || "0.0 %", share: change, text: signed(100 * change, 1) };
    }
    const change = after[0] - before[0];
    return { before: counted(before[0]), after: counted(after[0]), share: change / Math.max(picture.total, all - picture.total, 1), text: signed(change, 0) };
  }

  number(entry) {
    return entry.above || entry.box.above ? this.changeOf({ ...entry, above: true }).text : "";
  }

  about(box) {
    const [name, ...lines] = super.about(box);
    if (!box.above) return [name, ...lines];
    const { before, after, text } = this.changeOf(box);
    return [name, `before ${before}, after ${after}: ${text}`, ...lines];
  }

  say() {
    super.say();
    const { sides } = this.model.data, at = this.source === "after" ? 1 : 0;
    const [shown] = this.parts.caption.children;
    shown.textContent = `${several(this.picture.total, "sample")} ${this.source} (${sides[at].name}). `;
    const other = at ? ["first", "Before"] : ["second", "After"];
    const gone = `Frames that are only in the ${other[0]} capture are not shown: choose ${other[1]} to see them.`;
    if (this.focus === null) this.parts.caption.children[1].textContent = gone;
  }
}

/** A number with its sign, unless it is 0 as it is shown. */
function signed(value, digits) {
  const text = Math.abs(value).toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  return Number(text.replaceAll(",", "")) ? `${value < 0 ? "−" : "+"}${text}` : text;
}

/** Draws the flame graph; returns what to call when colours change. */
function drawStacks(page, payload) {
  const model = new DifferenceModel(payload), element = (id) => document.getElementById(id);
  element("notes").append(...model.notes.map((note) => made("li", "", note)));
  element("notes").hidden = !model.notes.length;
  page.model = model;
  page.flame = new DifferenceFlame(model, element("flame"));
  page.help = new Help(model, element("help"));
  listenToKeys(page);
  page.link = new Link(model, page.flame);
  followPrinter(() => model.tell("theme"), () => page.flame.forPaper());
  return () => model.tell("theme");
}
