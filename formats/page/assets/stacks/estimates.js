// What is said of the samples above the graph: which part is active, and which is divided among stacks.

const MARKED = 0.01; // the part of a box's samples that are divided among stacks: it is marked
const GUESSED = "_[guessed]"; // the end of the name of a frame that is a guess: formats/guesses.py

class SampleNotes {
  constructor(model, element) {
    this.model = model;
    const get = (name) => element.querySelector(`[data-part=${name}]`);
    [this.divided, this.activity] = ["divided", "activity"].map(get);
    const [said, why] = model.divided;
    this.divided.querySelector("summary").textContent = said || "";
    this.divided.querySelector("p").textContent = why || "";
    this.active = get("active");
    this.active.onchange = () => model.showActive(this.active.checked);
  }

  /** Shows what belongs to GPU samples, or to CPU samples. */
  show(gpu) {
    this.divided.hidden = !gpu || !this.model.divided.length;
    this.activity.hidden = !gpu || this.model.activeReason < 0;
    this.active.checked = this.model.active;
  }

  /** What a picture shows. */
  title(gpu) {
    if (!gpu) return "What the CPUs did";
    return this.model.active ? "What the GPU's threads did" : "Where the GPU's threads waited";
  }

  /** The share of a picture's samples that are active, with a comma before it; "" if none is shown. */
  share({ root }, reasons) {
    const active = this.model.active && this.model.activeReason >= 0 ? reasons[this.model.activeReason] : 0;
    return active ? `, ${percentOf(active, root.value)} active` : "";
  }
}

/** A frame's name without the mark of a guess. */
function unmarked(name) {
  return name.endsWith(GUESSED) ? name.slice(0, -GUESSED.length) : name;
}

/** A frame's name as it is drawn: marked if part of its samples are divided among stacks, or if it is a guess. */
function labelled(name, picture, box) {
  const shown = name.endsWith(GUESSED) ? `? ${unmarked(name)}` : name;
  return picture.divided(box) >= MARKED ? `~ ${shown}` : shown;
}

/** What is said of a box of which samples are divided; null if none are. */
function divisionOf(picture, box) {
  const divided = picture.divided(box);
  return divided >= MARKED ? `of which ${percentOf(divided, 1)} divided among stacks (~)` : null;
}
