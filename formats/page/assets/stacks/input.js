// What the mouse and the keyboard do to a flame graph, and to the page that it is on.

class FlameInput {
  constructor(flame) {
    this.flame = flame;
    const { canvas } = flame;
    canvas.onpointerdown = (event) => this.grab(event);
    canvas.onpointermove = (event) => this.hover(event);
    canvas.onpointerleave = () => this.hoverAt(null);
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.onkeydown = (event) => this.key(event);
  }

  wheel(event) {
    const { flame } = this;
    const [from, to] = flame.view, width = to - from;
    if (event.ctrlKey || event.metaKey) {
      const factor = Math.exp(Math.max(Math.min(event.deltaY, 100), -100) * 0.005);
      const x = event.offsetX / flame.width;
      flame.see(from + width * x * (1 - factor), width * factor);
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      flame.see(from + ((event.shiftKey ? event.deltaY || event.deltaX : event.deltaX) / flame.width) * width, width);
    } else return; // the page scrolls
    event.preventDefault();
  }

  grab(event) {
    if (event.button !== 0) return;
    const { flame } = this, { canvas } = flame;
    const x = event.offsetX, [from, to] = flame.view;
    const box = flame.at(x, event.offsetY);
    let dragged = false;
    const move = (moved) => {
      if (moved.pointerId !== event.pointerId) return;
      dragged ||= Math.abs(moved.offsetX - x) > 4;
      if (dragged && moved.pointerType !== "touch") flame.see(from - ((moved.offsetX - x) / flame.width) * (to - from), to - from);
    };
    const done = (ended) => {
      canvas.removeEventListener("pointermove", move);
      canvas.removeEventListener("pointerup", done);
      canvas.removeEventListener("pointercancel", done);
      if (ended.type === "pointerup" && !dragged && box) flame.enter(box);
    };
    canvas.setPointerCapture(event.pointerId);
    canvas.addEventListener("pointermove", move);
    canvas.addEventListener("pointerup", done);
    canvas.addEventListener("pointercancel", done);
  }

  hover(event) {
    const { flame } = this;
    if (event.pointerType !== "touch" && !event.buttons) this.hoverAt(flame.at(event.offsetX, event.offsetY), event);
  }

  hoverAt(box, event) {
    const { flame } = this;
    if (box !== flame.hovered) {
      flame.hovered = box;
      flame.canvas.style.cursor = box ? "pointer" : "default";
      flame.tip.hidden = !box;
      if (box) {
        const [name, ...lines] = flame.about(box);
        flame.tip.replaceChildren(made("b", "", name), ...lines.map((line) => made("span", "", line)));
      }
      flame.draw();
    }
    if (!box) return;
    const { offsetWidth: width, offsetHeight: height } = flame.tip;
    const left = Math.min(event.clientX + 12, innerWidth - width - 8);
    const below = event.clientY + 18 + height < innerHeight;
    flame.tip.style.left = `${Math.max(left, 8)}px`;
    flame.tip.style.top = `${below ? event.clientY + 18 : event.clientY - height - 12}px`;
  }

  key(event) {
    const { flame } = this, { picture } = flame;
    const at = flame.cursor || flame.zoomed || picture.root;
    const on = (box) => picture.on(box).filter((each) => each.value);
    const siblings = at.above ? on(at.above) : at.depth ? on(picture.up) : [at];
    const place = siblings.indexOf(at);
    const moves = {
      ArrowRight: () => siblings[place + 1],
      ArrowLeft: () => siblings[place - 1],
      [flame.upward ? "ArrowUp" : "ArrowDown"]: () => (at.depth < 0 ? (at.above === picture.up ? picture.root : at.above) : on(at)[0]),
      [flame.upward ? "ArrowDown" : "ArrowUp"]: () => (at.depth < 0 ? on(at)[0] : at.above || (picture.up && on(picture.up)[0])),
      Home: () => picture.root,
    };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (moves[event.key]) {
      const next = moves[event.key]();
      if (next) flame.goto(next);
    } else if (event.key === "Enter") flame.enter(at);
    else if (event.key === "s" || event.key === "S") flame.sandwich(at);
    else if (event.key === "Escape") flame.back();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}

/** Keys that work wherever the focus is, but for fields in which one types. */
function listenToKeys(page) {
  document.addEventListener("keydown", (event) => {
    if (event.target.closest("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
    const { flame, help } = page;
    if (event.key === "?") help.toggle();
    else if (help.dialog.open) return;
    else if (event.key === "/") {
      flame.parts.search.focus();
      flame.parts.search.select();
    } else if (event.key === "t" || event.key === "T") flame.look(flame.viewed === "tree" ? "graph" : "tree");
    else if ((event.key === "i" || event.key === "I") && flame.viewed === "graph") flame.turn(!flame.upward);
    else if (event.key === "Escape") flame.back();
    else return;
    event.preventDefault();
  });
}
