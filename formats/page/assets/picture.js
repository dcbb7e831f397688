// Flame graphs on a canvas: of all stacks from the root, from the leaf, and of one function with its callers and callees.

/** A frame of a picture: nodes of the tree that have one frame and one way to the picture's root. */
class Box {
  constructor(above, frame, depth) {
    this.above = above; // the box it stands on; null: none
    this.frame = frame; // of the tree; -1: all samples
    this.depth = depth; // rows from the picture's root; negative: callers
    this.nodes = []; // where in the tree
    this.leaves = null; // callers first: of each of nodes, the node whose samples it brings
    this.value = 0; // samples
    this.order = 0; // samples of the whole recording: siblings keep their order in every range
    this.begin = 0; // samples left of it
    this.next = null; // boxes on it, once they were wanted
  }
}

/** Which boxes a picture consists of. They are made when they are wanted: most are never wide enough to be seen. */
class Picture {
  constructor(tree, leaves, inverted, focus) {
    this.tree = tree;
    this.sums = tree.weighed(leaves);
    this.whole = leaves === tree.leafCount ? this.sums : tree.weighed(tree.leafCount);
    this.inverted = inverted;
    this.total = this.sums.total[0];
    if (focus === null) {
      this.root = new Box(null, -1, 0);
      this.root.nodes.push(0);
      if (inverted) {
        this.root.nodes = this.root.leaves = this.nodesWhere((node) => this.sums.own[node] > 0);
      }
      this.root.value = this.total;
      this.up = null;
    } else {
      // The outermost frames of a function that calls itself have all its samples, once.
      const found = [];
      for (let node = 1; node < tree.size; node++) {
        if (tree.texts[tree.frame[node]] !== focus) continue;
        if (this.sums.total[node] > 0) found.push(node);
        node = tree.end[node] - 1;
      }
      const frame = tree.texts.indexOf(focus);
      this.root = new Box(null, frame, 0);
      this.root.nodes = found;
      for (const node of found) this.root.value += this.sums.total[node];
      this.up = new Box(null, frame, 0);
      this.up.nodes = this.up.leaves = found;
      this.up.value = this.root.value;
    }
  }

  nodesWhere(holds) {
    const found = [];
    for (let node = 0; node < this.tree.size; node++) if (holds(node)) found.push(node);
    return found;
  }

  /** The boxes on a box, largest first. */
  on(box) {
    if (box.next) return box.next;
    const { tree, sums, whole } = this;
    const found = new Map();
    const put = (frame) => {
      let made = found.get(frame);
      if (!made) found.set(frame, (made = new Box(box, frame, box.depth + (box.leaves && this.up ? -1 : 1))));
      return made;
    };
    if (box.leaves) {
      const own = !this.up; // inverted: samples of stacks that end there; callers of a function: all of its samples
      const begin = box.depth === 0 && own; // on the root of all stand the leaves themselves
      for (let i = 0; i < box.nodes.length; i++) {
        const node = begin ? box.nodes[i] : tree.parent[box.nodes[i]];
        if (node <= 0) continue;
        const leaf = box.leaves[i];
        const made = put(tree.frame[node]);
        made.nodes.push(node);
        (made.leaves ||= []).push(leaf);
        made.value += own ? sums.own[leaf] : sums.total[leaf];
        made.order += own ? whole.own[leaf] : whole.total[leaf];
      }
    } else {
      for (const above of box.nodes)
        for (let node = above + 1; node < tree.end[above]; node = tree.end[node]) {
          if (!sums.total[node]) continue;
          const made = put(tree.frame[node]);
          made.nodes.push(node);
          made.value += sums.total[node];
          made.order += whole.total[node];
        }
    }
    box.next = [...found.values()].sort((a, b) => b.order - a.order || a.frame - b.frame);
    let begin = box.begin;
    for (const each of box.next) {
      each.begin = begin;
      begin += each.value;
    }
    return box.next;
  }

  /** Samples of a box by reason. */
  reasons(box) {
    const found = new Float64Array(REASON_COUNT);
    const by = box.leaves && !this.up ? this.sums.ownBy : this.sums.totalBy;
    for (const node of box.leaves || box.nodes)
      for (let reason = 0; reason < REASON_COUNT; reason++) found[reason] += by[node * REASON_COUNT + reason];
    return found;
  }

  /** The reason that a box has most samples of; kept, as colours ask at every drawing. */
  mainReason(box) {
    if (box.main === undefined) {
      const found = this.reasons(box);
      box.main = found.indexOf(Math.max(...found));
    }
    return box.main;
  }

  /**
   * The part of a box's samples that were divided between it and boxes beside it, 0 to 1. Leaves first, a box has its
   * samples for certain as long as it has all those of the instruction that it stands on.
   */
  divided(box) {
    const { tree, sums } = this;
    if (!tree.divided || !box.value || box.frame < 0) return 0;
    if (box.part === undefined) {
      let part = 0;
      if (!box.leaves) for (const node of box.nodes) part += tree.divided[node] * sums.total[node];
      else if (!this.sure(box)) {
        const counts = this.up ? sums.total : sums.own;
        for (const node of box.leaves) part += tree.divided[node] * counts[node];
      }
      box.part = Math.min(part / 255 / box.value, 1);
    }
    return box.part;
  }

  /** Whether a box of a picture with the leaves first is GPU code, or has all samples of the GPU code that it stands on. */
  sure(box) {
    let code = box;
    while (code.above && !this.tree.code[code.frame]) code = code.above;
    return code.value === box.value;
  }

  /** Samples of a box that end in it: none of its callees has them. */
  own(box) {
    if (box.leaves) return box.depth === 1 && !this.up ? box.value : 0;
    let own = 0;
    for (const node of box.nodes) own += this.sums.own[node];
    return own;
  }

  /** Samples whose stacks have one of some frames. */
  matching(frames) {
    const { tree } = this;
    let found = 0;
    for (let node = 1; node < tree.size; node++)
      if (frames[tree.frame[node]]) {
        found += this.sums.total[node];
        node = tree.end[node] - 1;
      }
    return found;
  }
}
