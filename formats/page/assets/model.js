"use strict";
// What the page shows: trees of stacks with their samples by time, the chosen range, and who wants to know of changes.
// Panels read `model` and call its select...; they never change its arrays.

const REASON_COUNT = 10;

/** Numbers as html_data.py packs them: the lowest byte of all, then the next one of all, and so on. */
function unpacked(bytes, begin, width, length) {
  const values = width > 4 ? new Float64Array(length) : new Uint32Array(length);
  let at = begin, scale = 1;
  for (let plane = 0; plane < width; plane++, scale *= 256)
    for (let i = 0; i < length; i++) values[i] += bytes[at++] * scale;
  return values;
}

/** The payload of the page: a JSON text behind its length, then the arrays it tells of. */
async function readPayload(element) {
  const text = atob(element.textContent.trim());
  const packed = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) packed[i] = text.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const buffer = await new Response(stream).arrayBuffer();
  const bytes = new Uint8Array(buffer);
  const length = new DataView(buffer).getUint32(0, true);
  const payload = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + length)));
  let at = 4 + length;
  for (const tree of Object.values(payload.trees)) {
    const arrays = {};
    for (const [name, width, count] of tree.arrays) {
      arrays[name] = unpacked(bytes, at, width, count);
      at += width * count;
    }
    tree.arrays = arrays;
  }
  return payload;
}

/**
 * Stacks as a tree. Nodes stand in the order in which one walks down the tree, node 0 is the root of all; those below
 * node n are n + 1 up to end[n]. Samples belong to leaves: a node where stacks end, with a reason and a kernel.
 */
class Tree {
  constructor(described, intervals) {
    const arrays = described.arrays;
    this.texts = described.texts; // of frames
    this.kinds = described.kinds; // index into model.kinds, of frames
    this.modules = described.modules; // index into model.modules, of frames
    this.places = described.places; // source file and line, of frames
    this.gpu = described.gpu; // samples have reasons and kernels
    this.setNodes(arrays.frame, arrays.depth); // the root's frame means nothing
    this.leafNode = arrays.leafNode;
    this.leafReason = arrays.leafReason;
    this.leafKernel = arrays.leafKernel;
    this.leafCount = arrays.leafCount;
    this.divided = arrays.divided; // of nodes: the part of their samples that is divided with others, 0 to 255; or undefined
    this.timed = Boolean(arrays.perInterval);
    if (!this.timed) return;
    // Entries are sorted by interval and leaf; entryLeaf holds the way from the one before, in an interval.
    this.start = new Uint32Array(intervals + 1);
    for (let i = 0; i < intervals; i++) this.start[i + 1] = this.start[i] + arrays.perInterval[i];
    this.entryLeaf = arrays.entryLeaf;
    this.entryCount = arrays.entryCount;
    for (let i = 0; i < intervals; i++)
      for (let entry = this.start[i] + 1; entry < this.start[i + 1]; entry++)
        this.entryLeaf[entry] += this.entryLeaf[entry - 1];
  }

  /** Sets the nodes' frames and depths, and computes their parents and ends. */
  setNodes(frame, depth) {
    this.frame = frame;
    this.depth = depth;
    this.size = depth.length;
    this.parent = new Int32Array(this.size).fill(-1);
    this.end = new Int32Array(this.size);
    const above = [];
    for (let node = 0; node < this.size; node++) {
      if (depth[node]) this.parent[node] = above[depth[node] - 1];
      above[depth[node]] = node;
    }
    for (let node = this.size - 1; node >= 0; node--) {
      if (!this.end[node]) this.end[node] = node + 1;
      const parent = this.parent[node];
      if (parent >= 0 && this.end[parent] < this.end[node]) this.end[parent] = this.end[node];
    }
  }

  /** The same samples without some frames (Uint8Array: 1 is left out): what these called is called by their callers. */
  without(hidden) {
    const kept = new Uint32Array(this.size); // the new number of each node, or of the nearest caller that stays
    const frame = [0], depth = [0], divided = [0];
    for (let node = 1; node < this.size; node++) {
      const caller = kept[this.parent[node]];
      if (hidden[this.frame[node]]) kept[node] = caller;
      else {
        kept[node] = frame.length;
        frame.push(this.frame[node]);
        depth.push(depth[caller] + 1);
        if (this.divided) divided.push(this.divided[node]);
      }
    }
    const found = Object.assign(Object.create(Tree.prototype), this);
    found.setNodes(Uint32Array.from(frame), Uint32Array.from(depth));
    found.leafNode = this.leafNode.map((node) => kept[node]);
    if (this.divided) found.divided = Uint8Array.from(divided);
    return found;
  }

  /** Samples of each interval, but for those of one reason; -1: of all. */
  perInterval(intervals, without = -1) {
    const sums = new Float64Array(intervals);
    if (this.timed)
      for (let i = 0; i < intervals; i++)
        for (let entry = this.start[i]; entry < this.start[i + 1]; entry++)
          if (this.leafReason[this.entryLeaf[entry]] !== without) sums[i] += this.entryCount[entry];
    return sums;
  }

  /** Samples of each leaf in intervals first up to last. */
  leavesIn(first, last) {
    const sums = new Float64Array(this.leafNode.length);
    for (let entry = this.start[first]; entry < this.start[last]; entry++)
      sums[this.entryLeaf[entry]] += this.entryCount[entry];
    return sums;
  }

  /** Samples of each node, alone and with all below it, and by reason: n * 10 + reason. */
  weighed(leaves) {
    const own = new Float64Array(this.size), ownBy = new Float64Array(this.size * REASON_COUNT);
    for (let leaf = 0; leaf < leaves.length; leaf++) {
      own[this.leafNode[leaf]] += leaves[leaf];
      ownBy[this.leafNode[leaf] * REASON_COUNT + this.leafReason[leaf]] += leaves[leaf];
    }
    const total = own.slice(), totalBy = ownBy.slice();
    for (let node = this.size - 1; node > 0; node--) {
      if (!total[node]) continue;
      const parent = this.parent[node];
      total[parent] += total[node];
      for (let reason = 0; reason < REASON_COUNT; reason++)
        totalBy[parent * REASON_COUNT + reason] += totalBy[node * REASON_COUNT + reason];
    }
    return { own, ownBy, total, totalBy };
  }
}

class Model {
  constructor(payload) {
    this.data = payload.panels;
    this.reasons = payload.reasons;
    this.meanings = payload.meanings; // of reasons
    this.kinds = payload.kinds;
    this.modules = payload.modules;
    this.kernels = payload.kernels; // names
    this.notes = payload.notes;
    this.first = { source: payload.source, inverted: payload.inverted, colouring: "kind" }; // what to show at the beginning
    this.intervalSeconds = payload.intervalSeconds; // 0: nothing is known of when
    this.intervals = payload.intervals;
    this.seconds = this.intervals * this.intervalSeconds;
    this.selection = null;
    this.kernel = null;
    this.divided = payload.divided || []; // what is said of samples that are divided among stacks, and why they are
    this.activeReason = (this.reasons || []).indexOf("active"); // of samples that are not stalls: an instruction was issued
    this.active = true; // these samples are shown
    this.listeners = { selection: [], kernel: [], theme: [], shown: [], active: [] };
    this.trees = {};
    for (const [name, described] of Object.entries(payload.trees)) {
      const tree = (this.trees[name] = new Tree(described, this.intervals));
      tree.code = Uint8Array.from(tree.kinds, (kind) => (this.kinds[kind].startsWith("GPU") ? 1 : 0)); // of frames
    }
    this.stallsPerInterval = this.timed("stalls").perInterval(this.intervals);
    this.cpuPerInterval = this.trees.cpu ? this.timed("cpu").perInterval(this.intervals) : new Float64Array(this.intervals);
  }

  /** The tree that has samples by time. */
  timed(source) {
    return this.trees[`${source}Ranges`] || this.trees[source];
  }

  /** Calls fn at every "selection", "kernel", "theme" or "active" that changes, and when the flame graph shows something else. */
  on(event, fn) {
    this.listeners[event].push(fn);
  }

  tell(event) {
    for (const fn of this.listeners[event]) fn();
  }

  /** Chooses a range in seconds, widened to whole intervals; null: the whole recording. */
  select(begin, end) {
    let chosen = null;
    if (begin !== null && begin !== undefined && this.intervals) {
      const fit = (value, round) => Math.min(Math.max(round(value / this.intervalSeconds), 0), this.intervals);
      // A begin that is whole but for the rounding of a sum must not take in the interval before it.
      const first = Math.min(fit(begin + 1e-6, Math.floor), this.intervals - 1);
      const last = Math.max(fit(end - 1e-6, Math.ceil), first + 1);
      chosen = { begin: first * this.intervalSeconds, end: last * this.intervalSeconds, first, last };
    }
    const same = chosen && this.selection
      ? chosen.first === this.selection.first && chosen.last === this.selection.last
      : chosen === this.selection;
    this.selection = chosen;
    if (!same) this.tell("selection");
  }

  /** Shows active samples, or stalls alone. */
  showActive(shown) {
    this.active = shown;
    this.stallsPerInterval = this.timed("stalls").perInterval(this.intervals, shown ? -1 : this.activeReason);
    this.tell("active");
  }

  /** Whether samples of a reason are shown. */
  isShown(reason) {
    return this.active || reason !== this.activeReason;
  }

  /** Chooses a kernel by name; null: none. */
  selectKernel(name) {
    if (name === this.kernel) return;
    this.kernel = name;
    this.tell("kernel");
  }

  /** The tree that a source ("stalls" or "cpu") has in the chosen range, and the samples of its leaves. */
  chosen(source) {
    const chosen = this.selection;
    const tree = chosen ? this.timed(source) : this.trees[source];
    const leaves = chosen ? tree.leavesIn(chosen.first, chosen.last) : tree.leafCount;
    if (!tree.gpu || this.active) return { tree, leaves };
    return { tree, leaves: leaves.map((count, leaf) => (this.isShown(tree.leafReason[leaf]) ? count : 0)) };
  }

  /** Samples by reason of each kernel in a range of seconds; without one, in the whole recording: name -> Float64Array[10]. */
  kernelsIn(begin, end) {
    const whole = begin === undefined || begin === null;
    const tree = whole ? this.trees.stalls : this.timed("stalls");
    const leaves = whole
      ? tree.leafCount
      : tree.leavesIn(Math.round(begin / this.intervalSeconds), Math.round(end / this.intervalSeconds));
    const found = new Map();
    for (let leaf = 0; leaf < leaves.length; leaf++) {
      if (!leaves[leaf] || !this.isShown(tree.leafReason[leaf])) continue;
      const name = this.kernels[tree.leafKernel[leaf]];
      if (!found.has(name)) found.set(name, new Float64Array(REASON_COUNT));
      found.get(name)[tree.leafReason[leaf]] += leaves[leaf];
    }
    return found;
  }
}

/** Gives a canvas a size in px; returns its context, which is in px, too. */
function sized(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  canvas.width = Math.max(Math.round(width * ratio), 1);
  canvas.height = Math.max(Math.round(height * ratio), 1);
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

/** The value of a CSS variable, such as "--muted", in the theme of now. */
function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
