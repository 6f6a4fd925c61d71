"use strict";
// Plots that answer, tables that sort, and the switch between light and dark. Text goes into the page as text only.

(() => {
  const SVG = "http://www.w3.org/2000/svg";

  function svg(tag, attributes = {}, ...children) {
    const node = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  }

  function html(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  }

  // ------------------------------------------------------------------------------- numbers

  function format(value, digits = 4) {
    if (value === null || !Number.isFinite(value)) return "–";
    const size = Math.abs(value);
    const short = (scaled, letter) => Number(scaled.toPrecision(digits)).toLocaleString("en-GB", { maximumSignificantDigits: digits }) + letter;
    if (size >= 1e9) return short(value / 1e9, "G");
    if (size >= 1e6) return short(value / 1e6, "M");
    if (size >= 1e4) return short(value / 1e3, "k");
    if (size && size < 1e-3) return value.toExponential(Math.min(digits - 1, 2)).replace(/\.?0+e/, "e");
    return short(value, "");
  }

  function linearTicks([low, high], count) {
    const rough = (high - low) / Math.max(1, count);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
    const ticks = [];
    for (let n = Math.ceil(low / step - 1e-9); n * step <= high + 1e-9 * step; n++) ticks.push(Number((n * step).toPrecision(12)));
    return ticks;
  }

  function logTicks([low, high], count) {
    const decades = Math.log10(high / low);
    if (decades < 0.6) return linearTicks([low, high], count);
    const every = Math.max(1, Math.ceil(decades / count));
    const factors = decades < 2.5 ? [1, 2, 5] : [1];
    const ticks = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
      if (power % every === 0) ticks.push(...factors.map((factor) => Number((factor * 10 ** power).toPrecision(12))));
    }
    return ticks.filter((tick) => tick >= low && tick <= high);
  }

  /** One unit and one number of decimals for all ticks of an axis. */
  function tickLabels(ticks, log) {
    const largest = ticks.reduce((most, tick) => Math.max(most, Math.abs(tick)), 0);
    if (log || ticks.length < 2 || largest < 1e-3) return ticks.map((tick) => format(tick));
    const [unit, letter] = [[1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]].find(([size]) => largest >= (size === 1e3 ? 1e4 : size) || size === 1);
    const decimals = Math.min(6, Math.max(0, -Math.floor(Math.log10((ticks[1] - ticks[0]) / unit) + 1e-9)));
    const digits = { minimumFractionDigits: decimals, maximumFractionDigits: decimals };
    return ticks.map((tick) => (tick === 0 ? "0" : (tick / unit).toLocaleString("en-GB", digits) + letter));
  }

  /** From values to pixels and back. */
  function scale(domain, range, log) {
    const turn = log ? Math.log : (value) => value;
    const [low, high] = domain.map(turn);
    const slope = (range[1] - range[0]) / (high - low || 1);
    return {
      domain,
      log,
      at: (value) => range[0] + (turn(value) - low) * slope,
      back: (pixel) => (log ? Math.exp : (value) => value)(low + (pixel - range[0]) / slope),
      ticks: (count) => {
        const ticks = (log ? logTicks : linearTicks)(domain, count);
        const labels = tickLabels(ticks, log);
        return ticks.map((value, n) => ({ value, label: labels[n] }));
      },
    };
  }

  // --------------------------------------------------------------------------------- marks

  const polygon = (...points) => (x, y, r) => "M" + points.map(([a, b]) => `${x + a * r},${y + b * r}`).join("L") + "Z";
  const [T, W] = [0.36, 1.05]; // half the thickness of a plus, and its reach
  const PLUS = [[-T, -W], [T, -W], [T, -T], [W, -T], [W, T], [T, T], [T, W], [-T, W], [-T, T], [-W, T], [-W, -T], [-T, -T]];
  const MARKS = {
    o: (x, y, r) => `M${x - r},${y}a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0Z`,
    s: polygon([-0.9, -0.9], [0.9, -0.9], [0.9, 0.9], [-0.9, 0.9]),
    "^": polygon([0, -1.2], [1.1, 0.8], [-1.1, 0.8]),
    v: polygon([0, 1.2], [1.1, -0.8], [-1.1, -0.8]),
    "<": polygon([-1.2, 0], [0.8, -1.1], [0.8, 1.1]),
    D: polygon([0, -1.25], [1.25, 0], [0, 1.25], [-1.25, 0]),
    P: polygon(...PLUS),
    X: polygon(...PLUS.map(([a, b]) => [(a - b) * 0.78, (a + b) * 0.78])),
  };

  const drawMark = (mark, x, y, r) => svg("path", { class: "mark", d: (MARKS[mark] ?? MARKS.o)(x, y, r) });

  // --------------------------------------------------------------------------------- plots

  const NAME_LENGTH = 20; // of a name below a bar; the rest is in what pointing at it shows
  const BAR_WIDTH = 76;

  const shorten = (text, length) =>
    text.length <= length ? text : `${text.slice(0, length - 1 - (length >> 1))}…${text.slice(-(length >> 1))}`;

  const round = (value) => Math.round(value * 10) / 10;

  class Plot {
    constructor(figure, data) {
      Object.assign(this, { figure, data, axis: 0, whole: false, zoom: null, cursor: null });
      this.shown = data.series.map(() => true);
      this.canvas = figure.querySelector(".canvas");
      this.tip = html("div", { class: "tip", role: "status" });
      this.buttons = html("div", { class: "zoom" });
      this.addAxisChoice();
      this.addLegend();
      // in the next frame, for a drawing changes the size that is observed
      new ResizeObserver(() => requestAnimationFrame(() => this.canvas.clientWidth !== this.width && this.draw())).observe(this.canvas);
    }

    addAxisChoice() {
      if (this.data.axes.length < 2) return;
      const choice = html("fieldset", { class: "choice", "aria-label": "Horizontal axis" });
      this.data.axes.forEach((axis, number) => {
        const input = html("input", { type: "radio", name: `axis-${this.data.id}`, value: axis.name });
        input.checked = number === 0;
        input.addEventListener("change", () => {
          this.axis = number;
          this.zoom = null;
          this.draw();
        });
        choice.append(html("label", { title: `over ${axis.label}` }, input, axis.name));
      });
      this.figure.querySelector("figcaption").append(choice);
    }

    addLegend() {
      if (!this.data.legend) return;
      const legend = html("div", { class: "legend", role: "group", "aria-label": "Series shown" });
      this.entries = this.data.series.map((series, number) => {
        const button = html("button", { type: "button", "aria-pressed": "true", title: "Click: show or hide. Double-click: this one alone." });
        button.append(this.swatch(series), html("span", {}, series.name));
        button.addEventListener("click", () => this.show(this.shown.map((on, n) => (n === number ? !on : on))));
        button.addEventListener("dblclick", () => {
          const alone = this.shown.every((on, n) => on === (n === number));
          this.show(this.shown.map((_, n) => alone || n === number));
        });
        legend.append(button);
        return button;
      });
      this.canvas.after(legend);
    }

    show(shown) {
      this.shown = shown;
      this.entries.forEach((button, number) => button.setAttribute("aria-pressed", shown[number]));
      this.draw();
    }

    swatch(series) {
      const node = svg("svg", { width: 26, height: 12, viewBox: "0 0 26 12", class: "series", "aria-hidden": "true" });
      this.colour(node, series);
      if (this.data.kind === "bars") node.append(svg("rect", { class: "bar", x: 6, y: 1, width: 14, height: 10, rx: 1 }));
      else node.append(svg("path", { class: "curve", d: "M1,6H25", "stroke-dasharray": series.dash.join(" ") }));
      if (this.data.kind !== "bars" && series.mark) node.append(drawMark(series.mark, 13, 6, 3.6));
      return node;
    }

    colour(node, series) {
      node.style.setProperty("--colour", `light-dark(${series.light}, ${series.dark})`);
    }

    // ------------------------------------------------------------------------------ layout

    draw() {
      const width = this.canvas.clientWidth;
      if (!width) return; // folded away: it is drawn when it is opened
      this.width = width;
      this.height = Math.round(Math.min(340, Math.max(240, width * 0.6)));
      this.layOut();
      this.place();
      const focused = this.root && this.root === document.activeElement;
      const about = `${this.data.title}: ${this.data.yLabel}${this.axisData.label ? ` over ${this.axisData.label}` : ""}`;
      this.root = svg("svg", { viewBox: `0 0 ${width} ${this.height}`, height: this.height, role: "img", tabindex: 0, "aria-label": about });
      this.drawAxes();
      this.drawSeries();
      this.overlay = svg("g", { class: "overlay" });
      this.root.append(this.overlay);
      this.listen();
      this.updateButtons();
      this.canvas.replaceChildren(this.root, this.buttons, this.tip);
      if (focused) this.root.focus();
      this.point(null);
    }

    get axisData() {
      return this.data.axes[this.axis];
    }

    get names() {
      return this.axisData.categories;
    }

    layOut() {
      const { data } = this;
      const yDomain = this.zoom?.y ?? (this.whole ? data.whole : data.y);
      const top = 22;
      const labels = scale(yDomain, [0, 1], data.logY).ticks(5).map((tick) => tick.label);
      const longestOf = (texts) => texts.reduce((most, text) => Math.max(most, text.length), 2);
      let left = 14 + 6.6 * longestOf(labels);
      const room = (this.width - left) / (this.names?.length || 1);
      const longest = Math.min(NAME_LENGTH, longestOf(this.names ?? []));
      this.tilted = Boolean(this.names) && room < 6.8 * longest;
      if (this.tilted) left = Math.max(left, 5.4 * Math.min(this.names[0].length, NAME_LENGTH) - room / 2);
      const bottom = (this.tilted ? 12 + longest * 3.6 : 22) + (this.axisData.label ? 18 : 2);
      this.box = { left, right: this.width - 10, top, bottom: this.height - bottom };
      const xDomain = this.names ? [-0.5, this.names.length - 0.5] : (this.zoom?.x ?? this.axisData.limits);
      this.x = scale(xDomain, [this.box.left, this.box.right], data.logX && !this.names);
      this.y = scale(yDomain, [this.box.bottom, this.box.top], data.logY);
    }

    /** Where every point lies, in pixels; null where there is no number. */
    place() {
      const { data, x, y } = this;
      this.points = data.series.map((series) => {
        const places = data.xs[series.x[this.axis]];
        const widths = series.widths?.[this.axis];
        return series.y.map((value, n) => {
          const place = places[n];
          if (value === null || place === null || (data.logY && value <= 0) || (x.log && place <= 0)) return null;
          const sd = series.sd?.[n] ?? 0;
          const low = data.logY && value - sd <= 0 ? y.domain[0] : value - sd;
          const half = widths ? Math.min(BAR_WIDTH, x.at(widths) - x.at(0)) / 2 : 0;
          return { n, place, value, sd, half, x: round(x.at(place)), y: round(y.at(value)), low: round(y.at(low)), high: round(y.at(value + sd)) };
        });
      });
    }

    drawAxes() {
      const { box, root, data } = this;
      const text = (content, attributes) => root.append(svg("text", { class: "axis", ...attributes }, content));
      for (const tick of this.y.ticks(5)) {
        const y = round(this.y.at(tick.value));
        root.append(svg("line", { class: "gridline", x1: box.left, x2: box.right, y1: y, y2: y }));
        text(tick.label, { class: "axis y-tick", x: box.left - 8, y: y + 4, "text-anchor": "end" });
      }
      if (this.names) this.drawNames(text);
      else {
        for (const tick of this.x.ticks(Math.max(2, Math.floor((box.right - box.left) / 90)))) {
          const x = round(this.x.at(tick.value));
          root.append(svg("line", { class: "gridline", x1: x, x2: x, y1: box.top, y2: box.bottom }));
          text(tick.label, { class: "axis x-tick", x, y: box.bottom + 18, "text-anchor": "middle" });
        }
      }
      root.append(svg("line", { class: "base", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }));
      text(data.yLabel, { x: 0, y: 11 });
      text(this.axisData.label, { class: "axis x-label", x: box.right, y: this.height - 3, "text-anchor": "end" });
      if (!data.series.some((series) => series.y.some((value) => value !== null))) {
        text("nothing measured yet", { x: (box.left + box.right) / 2, y: (box.top + box.bottom) / 2, "text-anchor": "middle" });
      }
    }

    drawNames(text) {
      const { box } = this;
      this.names.forEach((name, n) => {
        const [x, y] = [round(this.x.at(n)), box.bottom + 17];
        const turned = this.tilted ? { "text-anchor": "end", transform: `rotate(-32 ${x} ${y - 5})`, x: x + 2, y: y - 3 } : { "text-anchor": "middle", x, y };
        text(shorten(name, NAME_LENGTH), { class: "axis x-tick", ...turned });
      });
    }

    drawSeries() {
      const { box, data } = this;
      const clip = `clip-${data.id}`;
      const area = svg("rect", { x: box.left - 5, y: box.top - 5, width: box.right - box.left + 10, height: box.bottom - box.top + (data.kind === "bars" ? 5 : 10) });
      const layer = svg("g", { "clip-path": `url(#${clip})`, class: data.series.length > 8 ? "many" : "few" });
      this.root.append(svg("defs", {}, svg("clipPath", { id: clip }, area)), layer);
      data.series.forEach((series, number) => {
        if (!this.shown[number]) return;
        const group = svg("g", { class: "series", "data-series": number });
        this.colour(group, series);
        const points = this.points[number];
        if (data.kind === "bars") this.drawBars(group, points);
        else this.drawLine(group, series, points);
        layer.append(group);
      });
    }

    drawLine(group, series, points) {
      const thin = this.data.kind === "marks";
      const runs = pieces(points);
      if (series.sd && !thin) {
        for (const run of runs) {
          const edge = [...run.map((p) => `${p.x},${p.high}`), ...run.map((p) => `${p.x},${p.low}`).reverse()];
          group.append(svg("path", { class: "band", d: `M${edge.join("L")}Z` }));
        }
      }
      const d = runs.map((run) => "M" + run.map((p) => `${p.x},${p.y}`).join("L")).join("");
      if (d) group.append(svg("path", { class: thin ? "curve thin" : "curve", d, "stroke-dasharray": series.dash.join(" ") }));
      if (series.sd && thin) points.forEach((p) => p?.sd && group.append(whisker(p)));
      const alone = new Set(runs.filter((run) => run.length === 1).map(([p]) => p.n));
      const [first, every] = thin ? [0, 1] : series.marks;
      for (const p of points) {
        if (p && (alone.has(p.n) || (series.mark && p.n >= first && (p.n - first) % every === 0))) {
          group.append(drawMark(series.mark, p.x, p.y, thin ? 4 : 3.4));
        }
      }
    }

    drawBars(group, points) {
      const base = Math.min(this.box.bottom, this.y.at(Math.max(0, this.y.domain[0])));
      for (const p of points) {
        if (!p) continue;
        const [top, height] = [Math.min(p.y, base), Math.max(1, Math.abs(base - p.y))];
        group.append(svg("rect", { class: "bar", x: round(p.x - p.half), y: round(top), width: round(2 * p.half), height: round(height), rx: 1.5 }));
        if (p.sd) group.append(whisker(p));
      }
    }

    // --------------------------------------------------------------- pointing and zooming

    listen() {
      const { root } = this;
      const at = (event) => {
        const frame = root.getBoundingClientRect();
        return [event.clientX - frame.left, event.clientY - frame.top];
      };
      let start = null;
      root.addEventListener("pointermove", (event) => {
        if (start) this.drawDrag(start, at(event));
        else this.point(at(event)[0], at(event)[1]);
      });
      root.addEventListener("pointerleave", () => start || this.point(null));
      root.addEventListener("pointerdown", (event) => {
        if (event.pointerType !== "mouse" || event.button !== 0 || this.names) return;
        start = at(event);
        root.setPointerCapture(event.pointerId);
      });
      root.addEventListener("pointerup", (event) => {
        if (start) this.endDrag(start, at(event));
        start = null;
      });
      root.addEventListener("pointercancel", () => {
        start = null;
        this.point(null);
      });
      root.addEventListener("dblclick", () => this.setZoom(null));
      root.addEventListener("keydown", (event) => this.key(event));
      root.addEventListener("blur", () => this.point(null));
    }

    key(event) {
      const xs = [...new Set(this.visiblePoints().map((p) => p.x))].sort((a, b) => a - b);
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") {
        this.setZoom(null);
      } else if (step && xs.length) {
        const here = this.cursor === null ? -1 : xs.indexOf(this.cursor);
        const next = here < 0 ? (step > 0 ? 0 : xs.length - 1) : Math.min(xs.length - 1, Math.max(0, here + step));
        this.point(xs[next]);
        event.preventDefault();
      }
    }

    visiblePoints() {
      const { left, right } = this.box;
      return this.points.flatMap((points, n) => (this.shown[n] ? points.filter((p) => p && p.x >= left - 1 && p.x <= right + 1) : []));
    }

    /** Show the values nearest to a place: a guide, a ring on each line, and a list. */
    point(pixel, height = this.box.top) {
      this.overlay.replaceChildren();
      this.tip.replaceChildren();
      const near = pixel === null ? null : nearest(this.visiblePoints(), pixel);
      this.cursor = near?.x ?? null;
      if (!near) return;
      const reach = this.names ? (this.x.at(1) - this.x.at(0)) / 2 : Math.max(8, this.spacing());
      const rows = this.points
        .map((points, n) => ({ n, p: this.shown[n] ? nearest(points.filter(Boolean), near.x) : null }))
        .filter(({ p }) => p && Math.abs(p.x - near.x) <= reach)
        .sort((a, b) => b.p.value - a.p.value);
      this.drawGuide(near, rows);
      this.fillTip(near, rows);
      const wide = this.tip.offsetWidth;
      const left = near.x + 14 + wide > this.width ? Math.max(0, near.x - 14 - wide) : near.x + 14;
      this.tip.style.setProperty("transform", `translate(${left}px, ${Math.max(0, Math.min(height, this.height - this.tip.offsetHeight))}px)`);
    }

    /** The widest gap between neighbours on any line: what is nearer than that counts as being at the same place. */
    spacing() {
      const gaps = this.points.flatMap((points) => points.slice(1).map((p, n) => (p && points[n] ? p.x - points[n].x : 0)));
      return Math.min(this.width / 4, gaps.reduce((a, b) => Math.max(a, b), 0) / 2);
    }

    drawGuide(near, rows) {
      const { top, bottom } = this.box;
      if (this.data.kind !== "bars") this.overlay.append(svg("line", { class: "guide", x1: near.x, x2: near.x, y1: top, y2: bottom }));
      for (const { n, p } of rows) {
        if (this.data.kind === "bars" || p.y < top - 1 || p.y > bottom + 1) continue;
        const ring = svg("circle", { class: "series picked", cx: p.x, cy: p.y, r: 4 });
        this.colour(ring, this.data.series[n]);
        this.overlay.append(ring);
      }
    }

    fillTip(near, rows) {
      const { data } = this;
      const name = this.names ? this.names[Math.round(near.place)] : `${format(near.place, 5)} ${this.axisData.label}`;
      this.tip.append(html("strong", {}, name));
      for (const { n, p } of rows.slice(0, 16)) {
        const value = format(p.value, 5) + (p.sd ? ` ± ${format(p.sd, 2)}` : "");
        this.tip.append(html("div", {}, this.swatch(data.series[n]), html("span", {}, data.series[n].name), html("b", {}, value)));
      }
      if (rows.length > 16) this.tip.append(html("div", {}, `and ${rows.length - 16} more`));
    }

    drawDrag([x0, y0], [x1, y1]) {
      this.tip.replaceChildren();
      const area = { x: Math.min(x0, x1), y: Math.min(y0, y1), width: Math.abs(x1 - x0), height: Math.abs(y1 - y0) };
      this.overlay.replaceChildren(svg("rect", { class: "drag", ...area }));
    }

    endDrag([x0, y0], [x1, y1]) {
      if (Math.abs(x1 - x0) < 8 || Math.abs(y1 - y0) < 8) return this.point(x1, y1);
      const { left, right, top, bottom } = this.box;
      const within = (value, low, high) => Math.min(high, Math.max(low, value));
      const ends = (a, b, low, high, to) => [to.back(within(a, low, high)), to.back(within(b, low, high))];
      const x = ends(Math.min(x0, x1), Math.max(x0, x1), left, right, this.x);
      const y = ends(Math.max(y0, y1), Math.min(y0, y1), top, bottom, this.y);
      if (x[0] < x[1] && y[0] < y[1]) this.setZoom({ x, y });
    }

    setZoom(zoom) {
      this.zoom = zoom;
      this.draw();
    }

    updateButtons() {
      const button = (text, action) => {
        const node = html("button", { type: "button", class: "quiet" }, text);
        node.addEventListener("click", action);
        return node;
      };
      const cut = this.data.whole[1] > this.data.y[1] * (1 + 1e-9) + 1e-12;
      const toggle = () => {
        this.whole = !this.whole;
        this.setZoom(null);
      };
      this.buttons.replaceChildren();
      if (this.zoom) this.buttons.append(button("reset zoom", () => this.setZoom(null)));
      else if (cut) this.buttons.append(button(this.whole ? "cut the start" : "whole range", toggle));
    }
  }

  /** Stretches of points without a gap. */
  function pieces(points) {
    const runs = [[]];
    for (const p of points) {
      if (p) runs.at(-1).push(p);
      else if (runs.at(-1).length) runs.push([]);
    }
    return runs.filter((run) => run.length);
  }

  function nearest(points, x) {
    return points.reduce((best, p) => (best === null || Math.abs(p.x - x) < Math.abs(best.x - x) ? p : best), null);
  }

  const whisker = (p) => svg("path", { class: "whisker", d: `M${p.x},${p.low}V${p.high}M${p.x - 3.5},${p.low}h7M${p.x - 3.5},${p.high}h7` });

  // -------------------------------------------------------------------------------- tables

  function addSorting(table) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = html("button", { type: "button" }, ...head.childNodes);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        sortRows(table.tBodies[0], column, down ? -1 : 1);
      });
      head.replaceChildren(button);
    });
  }

  /** By number where all cells that hold something hold one, else by text; what holds nothing goes last either way. */
  function sortRows(body, column, sign) {
    const key = (row) => row.cells[column].dataset.sort ?? row.cells[column].textContent.trim();
    const rows = [...body.rows].map((row) => ({ row, key: key(row) }));
    const numeric = rows.every(({ key }) => key === "" || Number.isFinite(Number(key)));
    const compare = numeric ? (a, b) => Number(a) - Number(b) : new Intl.Collator("en", { numeric: true }).compare;
    rows.sort((a, b) => (a.key === "") - (b.key === "") || (a.key === "" ? 0 : sign * compare(a.key, b.key)));
    body.append(...rows.map(({ row }) => row));
  }

  // --------------------------------------------------------------------------------- start

  function addThemeSwitch() {
    const button = document.getElementById("theme");
    const system = matchMedia("(prefers-color-scheme: dark)");
    const isDark = () => (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
    const label = () => (button.textContent = isDark() ? "Light" : "Dark");
    button.addEventListener("click", () => {
      document.documentElement.dataset.theme = isDark() ? "light" : "dark";
      label();
    });
    system.addEventListener("change", label);
    button.hidden = false;
    label();
  }

  /** What is folded away is opened for the printer, plots are drawn in it, and it is folded again. */
  function openForPrinting(plots) {
    let opened = [];
    addEventListener("beforeprint", () => {
      opened = [...document.querySelectorAll("details:not([open])")];
      opened.forEach((one) => (one.open = true));
      plots.forEach((plot) => plot.draw());
    });
    addEventListener("afterprint", () => opened.forEach((one) => (one.open = false)));
  }

  const data = JSON.parse(document.getElementById("plots").textContent);
  const plots = [...document.querySelectorAll("figure.plot")].map((figure) => new Plot(figure, data[figure.dataset.plot]));
  document.querySelectorAll("table.sortable").forEach(addSorting);
  addThemeSwitch();
  openForPrinting(plots);
})();
