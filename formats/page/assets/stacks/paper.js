// The page on paper: light, whole pictures, as wide as the sheet.

const HIGHEST_ON_PAPER = 2400; // px of a picture

function followPrinter(page) {
  const root = document.documentElement;
  let before = null; // the theme
  addEventListener("beforeprint", () => {
    before = root.dataset.theme;
    root.dataset.theme = "light";
    root.dataset.printing = "yes";
    page.model.tell("theme");
    const { flame } = page;
    flame.scroller.style.maxHeight = `${HIGHEST_ON_PAPER}px`;
    flame.resized();
    flame.drawNow();
    flame.calls.drawNow(true);
    for (const each of [page.strip, page.heat, page.hosts]) if (each && each.drawNow) each.drawNow();
  });
  addEventListener("afterprint", () => {
    if (before === null) return;
    root.dataset.theme = before;
    before = null;
    delete root.dataset.printing;
    page.flame.scroller.style.maxHeight = "";
    page.flame.resized();
    page.flame.calls.draw();
    page.model.tell("theme");
  });
}
