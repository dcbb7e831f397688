// The colours of a page: light or dark.

function isDark() {
  return document.documentElement.dataset.theme === "dark";
}

/** The page's colours: the system's, until the button is pressed. */
function followTheme(tell) {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement, button = document.getElementById("theme");
  let chosen = null;
  const set = () => {
    root.dataset.theme = chosen || (system.matches ? "dark" : "light");
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", isDark() ? "Light colours" : "Dark colours");
    tell();
  };
  system.addEventListener("change", set);
  button.onclick = () => {
    chosen = isDark() ? "light" : "dark";
    set();
  };
  set();
}
