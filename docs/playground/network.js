/* Models in ONNX Runtime, with gains of one's choice; see tools/opened_model.py for what goes in and comes out. */
"use strict";

const MIXING = ["alpha", "beta", "gamma"];
const BRANCHES = {
  sequential: ["alpha_sa", "beta_sa", "alpha_ff", "beta_ff"],
  parallel: ["alpha_comb", "beta_sa", null, "beta_ff"],
};

/* What a script has laid down: base64 of gzip → bytes. */
async function unpack(name) {
  const packed = Uint8Array.from(atob(ASSETS[name]), letter => letter.charCodeAt(0));
  delete ASSETS[name];
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/* One thread, for several would need headers that a static server does not send. */
async function startRuntime() {
  const module = new Blob([await unpack("ort.mjs")], { type: "text/javascript" });
  ort.env.wasm.numThreads = 1;
  ort.env.wasm.wasmPaths = { mjs: URL.createObjectURL(module) };
  ort.env.wasm.wasmBinary = (await unpack("ort.wasm")).buffer;
  ort.env.logLevel = "error";
}

class Network {
  static async load(about, number) {
    const network = Object.assign(new Network(), { about });
    network.session = await ort.InferenceSession.create(await unpack(`${number}.onnx`), { executionProviders: ["wasm"] });
    network.reset();
    return network;
  }

  /* The gains as they were trained. */
  reset() {
    this.mixing = Float32Array.from(this.about.mixing.flat(2));
    this.branches = Float32Array.from(this.about.branches.flat());
  }

  get names() {
    return [...MIXING, ...BRANCHES[this.about.layout].filter(Boolean)];
  }

  /* Where a gain stands in its tensor, for some layers and heads. */
  #places(gain, layers, heads) {
    const row = MIXING.indexOf(gain);
    if (row >= 0) {
      return [this.mixing, layers.flatMap(layer => heads.map(head => (3 * layer + row) * this.about.heads + head))];
    }
    const column = BRANCHES[this.about.layout].indexOf(gain);
    return [this.branches, layers.map(layer => 4 * layer + column)];
  }

  /* The mean of a gain over some layers and heads. */
  gain(gain, layers, heads) {
    const [values, places] = this.#places(gain, layers, heads);
    return places.reduce((sum, place) => sum + values[place], 0) / places.length;
  }

  setGain(gain, layers, heads, value) {
    const [values, places] = this.#places(gain, layers, heads);
    for (const place of places) values[place] = value;
  }

  /* Logits behind the last token, or behind those at the given places; A of every layer and head; similarity by depth. */
  async run(ids, at = [ids.length - 1]) {
    const { layers, heads } = this.about;
    const whole = values => BigInt64Array.from(values, BigInt);
    const started = performance.now();
    const found = await this.session.run({
      ids: new ort.Tensor("int64", whole(ids), [1, ids.length]),
      mixing: new ort.Tensor("float32", this.mixing, [layers, 3, heads]),
      branches: new ort.Tensor("float32", this.branches, [layers, 4]),
      at: new ort.Tensor("int64", whole(at), [at.length]),
    });
    return {
      length: ids.length,
      logits: found.logits.data,
      attention: found.attention.data,
      similarity: found.similarity.data,
      milliseconds: performance.now() - started,
    };
  }

  /* αI + βA − γC of a layer and head, and its three parts: T·T numbers each, row by row. */
  matrices({ attention, length }, layer, head) {
    const [alpha, beta, gamma] = MIXING.map(name => this.gain(name, [layer], [head]));
    const start = (layer * this.about.heads + head) * length * length;
    const parts = { identity: [], attention: [], centring: [], whole: [] };
    for (let row = 0; row < length; row++) {
      for (let column = 0; column < length; column++) {
        const identity = row === column ? alpha : 0;
        const attended = beta * attention[start + row * length + column];
        const centring = column <= row ? -gamma / (row + 1) : 0;
        parts.identity.push(identity), parts.attention.push(attended), parts.centring.push(centring);
        parts.whole.push(identity + attended + centring);
      }
    }
    return parts;
  }
}

/* Probabilities, of which a temperature of 0 gives all to the likeliest. */
function softmax(logits, temperature = 1) {
  const most = logits.reduce((a, b) => Math.max(a, b), -Infinity);
  const weights = Array.from(logits, temperature > 0 ? x => Math.exp((x - most) / temperature) : x => +(x === most));
  const sum = weights.reduce((a, b) => a + b, 0);
  return weights.map(weight => weight / sum);
}

/* One id, drawn by its probability. */
function draw(probabilities, random = Math.random()) {
  let left = random;
  const found = probabilities.findIndex(probability => (left -= probability) < 0);
  return found >= 0 ? found : probabilities.indexOf(Math.max(...probabilities));
}

/* The likeliest ids, most likely first. */
function likeliest(probabilities, count) {
  return probabilities.map((_, id) => id).sort((a, b) => probabilities[b] - probabilities[a] || a - b).slice(0, count);
}
