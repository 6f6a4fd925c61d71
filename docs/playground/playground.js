/* The page: one text, several models, and everything about them drawn again when a text or a gain changes. */
"use strict";

const BEGINNING = 'def read(path, encoding="utf-8"):\n    """Return the content of a file."""\n    with open(path, ';
const SHOWN = 8; // of the next tokens
const GAINS = {
  alpha: ["α", "the identity"],
  beta: ["β", "the attention"],
  gamma: ["γ", "the centring"],
  alpha_sa: ["α_SA", "skip around the attention"],
  beta_sa: ["β_SA", "attention branch"],
  alpha_ff: ["α_FF", "skip around the MLP"],
  beta_ff: ["β_FF", "MLP branch"],
  alpha_comb: ["α_comb", "skip around both"],
};
const CUTS = {
  sequential: [["alpha_sa", 0, "Cut the skip around the attention"], ["alpha_ff", 0, "Cut the skip around the MLP"]],
  parallel: [["alpha", 0, "Cut the identity, αI"], ["gamma", 0, "Cut the centring, γC"], ["alpha_comb", 1, "Add a skip"]],
};
const PARTS = { whole: "αI + βA − γC", identity: "αI", attention: "βA", centring: "−γC" };

const $ = id => document.getElementById(id);
const state = { ids: [], networks: [], results: [], trained: [], layer: 0, head: 0, writing: false };

function make(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) key in made ? (made[key] = value) : made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function card(number, small = "") {
  const heading = make("h3", {}, state.networks[number].about.name, " ", make("small", {}, small));
  const made = make("article", { className: "card" }, heading);
  made.style.setProperty("--colour", `var(--model-${number})`);
  return made;
}

function say(text, wrong = false) {
  $("state").textContent = text;
  $("state").classList.toggle("wrong", wrong);
}

const all = count => Array.from({ length: count }, (_, number) => number);
const decimals = value => value.toFixed(2).replace("-", "−");

/* ---------------------------------------------------------------------------------------------------- computing */

/* What the models read: the end of the text, at least two tokens, at most a context. */
function read() {
  const context = Math.min(...state.networks.map(network => network.about.context));
  return state.ids.length < 2 ? [state.tokenizer.end, ...(state.ids.length ? state.ids : [state.tokenizer.end])] : state.ids.slice(-context);
}

let busy = null, stale = false;

/* Run all models on the text as it is, and draw; what changes meanwhile is run again. */
function refresh() {
  stale = true;
  busy ??= (async () => {
    while (stale) {
      stale = false;
      const ids = read();
      state.results = [];
      for (const network of state.networks) state.results.push(await network.run(ids));
      showAll(ids);
    }
    busy = null;
  })();
  return busy;
}

/* The same text with the gains as they were trained, for comparison. */
async function remember() {
  for (const network of state.networks) {
    const [mixing, branches] = [network.mixing, network.branches];
    network.reset();
    state.trained[state.networks.indexOf(network)] = (await network.run(read())).similarity;
    [network.mixing, network.branches] = [mixing, branches];
  }
}

async function changeText(ids, text) {
  state.ids = ids;
  if (text !== undefined) $("text").value = text;
  await busy;
  await remember();
  await refresh();
}

function append(id) {
  const ids = [...state.ids, id];
  return changeText(ids, state.tokenizer.decode(ids));
}

async function write(count) {
  state.writing = true;
  showButtons();
  for (let number = 0; number < count && state.writing; number++) {
    const writer = Number(document.querySelector("[name=writer]:checked").value);
    const id = draw(softmax(state.results[writer].logits, $("temperature").valueAsNumber));
    if (id === state.tokenizer.end) break;
    await append(id);
    await new Promise(requestAnimationFrame);
  }
  state.writing = false;
  showButtons();
}

/* ------------------------------------------------------------------------------------------------------ drawing */

function showAll(ids) {
  const shown = ids.map(id => state.tokenizer.show(id));
  $("count").textContent = `${state.ids.length} tokens, of which the models read ${ids.length}`;
  $("tokens").replaceChildren(...shown.map(text => make("li", { className: "token" }, text)));
  state.shown = shown;
  state.networks.forEach((network, number) => {
    showNext(number);
    showMatrices(number);
    showGains(number);
  });
  showDepth();
}

function showNext(number) {
  const { logits, milliseconds } = state.results[number];
  const probabilities = softmax(logits);
  const rows = likeliest(probabilities, SHOWN).map(id => {
    const bar = make("span", { className: "bar" });
    bar.style.width = `${100 * probabilities[id]}%`;
    const share = make("span", { className: "number" }, `${(100 * probabilities[id]).toFixed(1)} %`);
    const button = make("button", { onclick: () => append(id) }, make("span", { className: "token" }, state.tokenizer.show(id)), bar, share);
    button.disabled = state.writing;
    return make("li", {}, button);
  });
  const list = $("next").children[number];
  list.querySelector("ol").replaceChildren(...rows);
  list.querySelector("small").textContent = `${milliseconds.toFixed(0)} ms a token`;
}

function showMatrices(number) {
  const network = state.networks[number], result = state.results[number];
  const found = network.matrices(result, state.layer, state.head);
  const largest = Math.max(...Object.values(found).flat().map(Math.abs));
  const place = $("mixing").children[number];
  for (const canvas of place.querySelectorAll("canvas")) {
    const part = canvas.dataset.part;
    canvas.values = found[part];
    drawMatrix(canvas, found[part], result.length, largest);
    const empty = found[part].every(value => value === 0) ? ", which is zero here" : "";
    canvas.setAttribute("aria-label", `${network.about.name}, layer ${state.layer + 1}, head ${state.head + 1}: ${PARTS[part]}${empty}`);
  }
  const gains = MIXING.map(name => `${GAINS[name][0]} = ${decimals(network.gain(name, [state.layer], [state.head]))}`);
  place.querySelector("small").textContent = gains.join(", ");
  const [low, , high] = place.querySelector(".scale").children;
  low.textContent = decimals(-largest);
  high.textContent = decimals(largest);
}

function showCell(canvas, { row, column }) {
  canvas.cell = { row, column };
  const value = canvas.values[row * state.shown.length + column];
  $("cell").textContent = `${PARTS[canvas.dataset.part]}: token ${row + 1} “${state.shown[row]}” from token ${column + 1} “${state.shown[column]}”: ${value.toFixed(3).replace("-", "−")}`;
}

function scope() {
  const { layers, heads } = state.networks[0].about;
  const wide = $("scope").value;
  return [wide === "all" ? all(layers) : [state.layer], wide === "head" ? [state.head] : all(heads)];
}

function showGains(number) {
  const network = state.networks[number];
  for (const slider of $("gains").children[number].querySelectorAll("input")) {
    const value = network.gain(slider.name, ...scope());
    if (document.activeElement !== slider) slider.value = value;
    slider.nextElementSibling.textContent = decimals(value);
  }
  for (const button of $("cuts").children[number].querySelectorAll("button[data-gain]")) {
    const { layers, heads } = network.about, { gain, value } = button.dataset;
    const same = all(layers).every(layer => all(heads).every(head => network.gain(gain, [layer], [head]) === Number(value)));
    button.setAttribute("aria-pressed", same);
  }
}

function showDepth() {
  const lines = state.networks.flatMap((network, number) => {
    const colour = `--model-${number}`, name = network.about.name;
    return [{ name, colour, values: state.trained[number], before: true }, { name, colour, values: state.results[number].similarity }];
  });
  drawSimilarity($("depth"), lines);
  const head = make("tr", {}, make("th", {}, "layer"), ...all(lines[0].values.length).map(layer => make("th", { scope: "col" }, String(layer))));
  const rows = lines.map(({ name, values, before }) =>
    make("tr", {}, make("th", { scope: "row" }, before ? `${name}, as trained` : name), ...Array.from(values, value => make("td", {}, decimals(value)))),
  );
  $("depth-table").replaceChildren(head, ...rows);
}

function showButtons() {
  for (const button of [$("one"), $("many"), ...document.querySelectorAll(".next button")]) button.disabled = state.writing;
  $("stop").disabled = !state.writing;
}

/* ------------------------------------------------------------------------------------------------------ the page */

function layOut() {
  const { layers, heads } = state.networks[0].about;
  state.networks.forEach(({ about }, number) => {
    const radio = make("input", { type: "radio", name: "writer", value: String(number), checked: number === state.networks.length - 1 });
    $("writers").append(make("label", {}, radio, ` ${about.name}`));
    const next = card(number);
    next.append(make("ol", { className: "next" }));
    $("next").append(next);
    $("mixing").append(layOutMatrices(number));
    $("gains").append(layOutGains(number));
    $("cuts").append(layOutCuts(number));
  });
  for (const [id, count] of [["layer", layers], ["head", heads]]) {
    $(id).append(...all(count).map(place => make("option", { value: String(place) }, String(place + 1))));
    $(id).onchange = () => ((state[id] = Number($(id).value)), showAll(read()));
  }
  $("scope").onchange = () => showAll(read());
  $("temperature").oninput = () => ($("temperature-value").textContent = $("temperature").value);
  $("temperature").oninput();
  $("text").oninput = () => changeText(state.tokenizer.encode($("text").value));
  $("one").onclick = () => write(1);
  $("many").onclick = () => write(20);
  $("stop").onclick = () => (state.writing = false);
  onresize = showDepth;
  matchMedia("(prefers-color-scheme: dark)").onchange = () => showAll(read());
}

function layOutMatrices(number) {
  const made = card(number);
  const figures = Object.entries(PARTS).map(([part, formula]) => {
    const canvas = make("canvas", { tabIndex: 0 });
    canvas.setAttribute("role", "img");
    canvas.dataset.part = part;
    canvas.onpointermove = event => showCell(canvas, cellAt(canvas, event, state.shown.length));
    canvas.onkeydown = event => moveCell(canvas, event);
    return make("figure", {}, canvas, make("figcaption", { className: "formula" }, formula));
  });
  made.append(make("div", { className: "maps" }, ...figures));
  made.append(make("div", { className: "scale", ariaHidden: "true" }, make("span"), make("i"), make("span")));
  return made;
}

function moveCell(canvas, event) {
  const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  if (!moves[event.key]) return;
  event.preventDefault();
  const { row, column } = canvas.cell ?? { row: 0, column: 0 }, [down, right] = moves[event.key];
  const inside = place => Math.max(0, Math.min(state.shown.length - 1, place));
  showCell(canvas, { row: inside(row + down), column: inside(column + right) });
}

function layOutGains(number) {
  const network = state.networks[number], made = card(number);
  for (const name of network.names) {
    const [letter, meaning] = GAINS[name];
    const slider = make("input", { type: "range", name, min: "-1", max: "2", step: "0.01" });
    slider.setAttribute("aria-label", `${network.about.name}: ${letter}, ${meaning}`);
    slider.oninput = () => (network.setGain(name, ...scope(), slider.valueAsNumber), refresh());
    made.append(make("div", { className: "gain" }, make("span", {}, letter, make("small", {}, meaning)), slider, make("output", { className: "number" })));
  }
  made.append(make("button", { onclick: () => (network.reset(), refresh()) }, "As trained"));
  return made;
}

function layOutCuts(number) {
  const network = state.networks[number], made = card(number), { layers, heads, layout } = network.about;
  const buttons = CUTS[layout].map(([gain, value, label]) => {
    const button = make("button", { onclick: () => cut(network, gain, value, button.getAttribute("aria-pressed") === "true") }, label);
    Object.assign(button.dataset, { gain, value });
    return button;
  });
  buttons.push(make("button", { onclick: () => (network.reset(), refresh()) }, "As trained"));
  made.append(make("div", { className: "buttons" }, ...buttons));
  return made;
}

/* Set a gain in every layer and head, or give back what was trained. */
function cut(network, gain, value, isCut) {
  const { layers, heads } = network.about, changed = [network.mixing, network.branches];
  network.reset();
  const trained = all(layers).map(layer => all(heads).map(head => network.gain(gain, [layer], [head])));
  [network.mixing, network.branches] = changed;
  all(layers).forEach(layer => all(heads).forEach(head => network.setGain(gain, [layer], [head], isCut ? trained[layer][head] : value)));
  return refresh();
}

function load(file) {
  return new Promise((done, failed) => {
    const script = make("script", { src: `assets/${file}` });
    script.onload = done;
    script.onerror = () => failed(new Error(`assets/${file} is missing`));
    document.head.append(script);
  });
}

async function start() {
  await load("manifest.js").catch(() => {
    throw new Error("The models are not here yet. `make playground` trains them and builds this page whole.");
  });
  say("Loading ONNX Runtime…");
  for (const file of ["ort.js", "ort.mjs.js", "ort.wasm.js"]) await load(file);
  await startRuntime();
  state.tokenizer = new Tokenizer(MANIFEST.tokenizer);
  for (const [number, about] of MANIFEST.models.entries()) {
    say(`Loading ${about.name}…`);
    await load(`${number}.onnx.js`);
    state.networks.push(await Network.load(about, number));
  }
  layOut();
  document.querySelector("main").hidden = false;
  await changeText(state.tokenizer.encode(BEGINNING), BEGINNING);
  const sizes = MANIFEST.models.map(({ name, parameters, steps, loss }) => `${name}: ${(parameters / 1e6).toFixed(2)} million parameters, ${steps.toLocaleString("en")} steps, held-out loss ${loss.toFixed(3)}`);
  const { layers, width, heads } = MANIFEST.models[0];
  $("about").textContent = `${layers} layers of width ${width} with ${heads} heads. ${sizes.join("; ")}. Computed by ONNX Runtime Web ${MANIFEST.runtime} in one thread.`;
  say("Ready.");
}

const ready = start().catch(error => say(error.message, true));
