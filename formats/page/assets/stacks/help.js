// The help: what can be done with the page, and what its colours and reasons mean.

class Help {
  constructor(model, dialog) {
    this.dialog = dialog;
    const get = (name) => dialog.querySelector(`[data-part=${name}]`);
    get("close").onclick = () => dialog.close();
    dialog.onclick = (event) => {
      if (event.target === dialog) dialog.close(); // beside its contents
    };
    get("kinds").append(...model.kinds.map((name, kind) => {
      const item = made("li", "", name), patch = made("i");
      patch.style.background = `var(--kind-${kind})`;
      item.prepend(patch);
      return item;
    }));
    model.reasons.forEach((name, index) => {
      const term = made("dt", "", name);
      term.prepend(made("i", `reason-key reason-${index}`));
      get("reasons").append(term, made("dd", "", model.meanings[index]));
    });
  }

  toggle() {
    if (this.dialog.open) this.dialog.close();
    else this.dialog.showModal();
  }
}

/** What there is in the recording, in numbers: pairs for the list of facts. */
function statistics(model) {
  const facts = [];
  for (const [source, what] of [["stalls", "GPU samples"], ["cpu", "CPU samples"]]) {
    const tree = model.trees[source];
    if (!tree) continue;
    const samples = tree.leafCount.reduce((total, each) => total + each, 0);
    const deepest = tree.depth.reduce((most, each) => Math.max(most, each), 0);
    facts.push([what, counted(samples)]);
    facts.push(["frames", `${counted(tree.size - 1)} in the tree, ${counted(tree.texts.length)} different`]);
    facts.push(["deepest stack", several(deepest, "frame")]);
  }
  const most = model.stallsPerInterval.reduce((best, each, at) => (each > best.each ? { each, at } : best), { each: 0, at: 0 });
  if (model.intervals > 1 && most.each)
    facts.push(["most at once", `${counted(most.each)} GPU samples in ${seconds(model.intervalSeconds)}, at ${seconds(most.at * model.intervalSeconds)}`]);
  const { rows, others } = model.data.kernels;
  facts.push(["kernels", counted(rows.length + others.kernels)]);
  return facts;
}
