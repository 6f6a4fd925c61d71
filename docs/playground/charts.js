/* Heat maps on canvases, and lines over depth as SVG. Colours are those of the page, so they follow light and dark. */
"use strict";

const colourOf = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function channels(colour) {
  return colour.match(/[0-9a-f]{2}/gi).map(part => parseInt(part, 16));
}

/* A T×T matrix, one cell a number: the paper's colour at 0, one colour above it and another below. */
function drawMatrix(canvas, values, length, largest) {
  const [zero, above, below] = ["--zero", "--above", "--below"].map(name => channels(colourOf(name)));
  canvas.width = canvas.height = length;
  const image = new ImageData(length, length);
  values.forEach((value, place) => {
    const share = largest ? Math.min(Math.abs(value) / largest, 1) : 0;
    const full = value > 0 ? above : below;
    for (let channel = 0; channel < 3; channel++) {
      image.data[4 * place + channel] = zero[channel] + share * (full[channel] - zero[channel]);
    }
    image.data[4 * place + 3] = 255;
  });
  canvas.getContext("2d").putImageData(image, 0, 0);
}

/* The cell of a matrix under a pointer. */
function cellAt(canvas, event, length) {
  const box = canvas.getBoundingClientRect();
  const place = (at, start, size) => Math.max(0, Math.min(length - 1, Math.floor(((at - start) / size) * length)));
  return { row: place(event.clientY, box.top, box.height), column: place(event.clientX, box.left, box.width) };
}

function element(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/* Similarity from 0, before the first block, to L: a line for each model, a dashed one where it was trained otherwise. */
function drawSimilarity(svg, lines) {
  const width = Math.max(svg.clientWidth, 280), height = 260, left = 44, right = 96, top = 12, bottom = 40;
  const last = Math.max(...lines.map(line => line.values.length - 1));
  const lowest = Math.min(0, ...lines.flatMap(line => [...line.values]));
  const floor = Math.max(-1, Math.floor(lowest * 5) / 5);
  const x = layer => left + (layer / last) * (width - left - right);
  const y = value => top + ((1 - value) / (1 - floor)) * (height - top - bottom);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const parts = [];
  for (let value = 1; value >= floor - 1e-9; value -= 0.2) {
    parts.push(element("line", { x1: left, x2: width - right, y1: y(value), y2: y(value), class: value > 0.99 ? "collapse" : "grid" }));
    parts.push(element("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, Math.abs(value) < 1e-9 ? "0" : value.toFixed(1)));
  }
  for (let layer = 0; layer <= last; layer++) {
    parts.push(element("text", { x: x(layer), y: height - bottom + 18, "text-anchor": "middle" }, String(layer)));
  }
  parts.push(element("text", { x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, "layer (0: before the first)"));
  const ends = lines.filter(line => !line.before).map(line => ({ line, at: y(line.values.at(-1)) })).sort((a, b) => a.at - b.at);
  ends.forEach((end, number) => (end.at = Math.max(end.at, number ? ends[number - 1].at + 16 : top + 4)));
  for (const { values, colour, before } of lines) {
    const points = Array.from(values, (value, layer) => `${x(layer)},${y(value)}`).join(" ");
    parts.push(element("polyline", { points, class: before ? "before" : "now", stroke: `var(${colour})` }));
  }
  for (const { line, at } of ends) {
    parts.push(element("text", { x: width - right + 8, y: at + 4, style: `--colour: var(${line.colour})`, class: "label" }, line.name));
  }
  svg.replaceChildren(...parts);
}
