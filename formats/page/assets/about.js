"use strict";
// What the page says of the recording and of itself, and how all panels make elements: names are set as text only.

/** An element with a class and a text. */
function made(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

/** The same, for drawings. */
function drawn(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

/** An element of which two lines are shown, until a button asks for all: much that is said must not push pictures away. */
function foldable(element) {
  const around = made("div", "foldable folded"), button = made("button", "unfold", "Show all");
  button.type = "button";
  button.onclick = () => {
    const folded = around.classList.toggle("folded");
    button.textContent = folded ? "Show all" : "Show less";
    button.setAttribute("aria-expanded", !folded);
  };
  button.setAttribute("aria-expanded", "false");
  around.append(element, button);
  new ResizeObserver(() => {
    button.hidden = around.classList.contains("folded") && element.scrollHeight <= element.clientHeight + 1;
  }).observe(element);
  return around;
}

/** Warnings, then groups of facts. */
function drawAbout(model, element) {
  const about = model.data.about;
  if (about.warnings.length) {
    const list = made("ul", "about-warnings");
    for (const text of about.warnings) list.append(made("li", "", text));
    element.append(list);
  }
  const groups = made("div", "about-groups");
  for (const { heading, facts } of about.facts) {
    const group = made("div", "about-group");
    const list = made("dl");
    for (const [name, text] of facts) {
      const term = made("dt", "", name);
      if (!name) term.className = "about-nameless";
      list.append(term, made("dd", "", text));
    }
    group.append(made("h3", "", heading), list);
    groups.append(group);
  }
  element.append(groups);
}
