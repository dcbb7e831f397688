// Puts the page together.

/** The title: what was recorded, on what, when. */
function drawTitle(model) {
  const { command, gpus, host, begun, seconds: length } = model.data.about;
  const title = document.querySelector("h1");
  title.textContent = title.title = command || gpus || host || "GPU samples"; // long commands are cut
  const facts = [command && gpus, (command || gpus) && host];
  if (begun) facts.push(new Date(begun * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "short" }));
  if (length) facts.push(seconds(Number(length.toFixed(2))));
  document.getElementById("subtitle").textContent = facts.filter(Boolean).join("  ·  ");
  const lines = made("p");
  lines.append(...model.data.about.headline.map((text) => made("span", "", text)));
  if (lines.childNodes.length) document.getElementById("headline").append(foldable(lines));
}

async function openPage() {
  let told = () => {};
  followTheme(() => told());
  // The payload stands behind this script, so that the page has its colours before all of it is read.
  await new Promise((done) => document.addEventListener("DOMContentLoaded", done, { once: true }));
  const element = (id) => document.getElementById(id);
  const model = new Model(await readPayload(element("payload")));
  element("payload").remove();
  told = () => model.tell("theme");
  drawTitle(model);
  element("notes").append(...model.notes.map((note) => made("li", "", note)));
  element("notes").hidden = !model.notes.length;
  element("reading").remove();
  element("content").hidden = false;
  const page = { model, strip: null, heat: null, hosts: null, flame: null };
  if (model.intervals > 1) {
    element("heat").hidden = false;
    page.heat = new HeatMaps(model, element("heat"));
    element("times").hidden = false;
    page.strip = new RangeStrip(model, element("flame"));
  }
  if (model.data.hosts) {
    element("hosts").hidden = false;
    page.hosts = new HostMap(model, element("hosts"));
  }
  page.flame = new Flame(model, element("flame"));
  page.help = new Help(model, element("help"));
  element("helping").onclick = () => page.help.toggle();
  model.data.about.facts.push({ heading: "On this page", facts: statistics(model) });
  for (const [id, draw] of [["timeline", drawTimeline], ["kernels", drawKernels], ["about", drawAbout]])
    draw(model, element(id).querySelector("div"));
  document.querySelector("header").after(...[...element("about").querySelectorAll(".about-warnings")].map((list) => foldable(list)));
  listenToKeys(page);
  page.link = new Link(model, page.flame);
  const drawn = [page.strip, page.heat, page.hosts].filter(Boolean);
  followPrinter(() => model.tell("theme"), () => [page.flame.forPaper(), ...drawn.map((each) => each.drawNow())]);
  window.iaprof = Object.freeze(page); // for tests and curious readers
  document.documentElement.dataset.ready = "yes";
}

openPage().catch((error) => {
  const reading = document.getElementById("reading");
  if (reading) reading.textContent = `This page cannot be shown: ${error.message}. It needs a browser of 2023 or later.`;
  throw error;
});
