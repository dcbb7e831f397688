// A page on paper: light, with whole pictures.

/** Calls `draw` before paper gets the page, when it must be drawn at once, and `tell` when colours have changed. */
function followPrinter(tell, draw) {
  const root = document.documentElement;
  let before = null; // the theme
  addEventListener("beforeprint", () => {
    before = root.dataset.theme;
    root.dataset.theme = "light";
    root.dataset.printing = "yes";
    tell();
    draw();
  });
  addEventListener("afterprint", () => {
    if (before === null) return;
    root.dataset.theme = before;
    before = null;
    delete root.dataset.printing;
    tell();
  });
}
