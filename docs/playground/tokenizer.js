/* Byte-level BPE, as `tokenizer.json` states it: text → pieces → bytes → merges → ids, and back. */
"use strict";

/* GPT-2's alphabet: a printable character for each of the 256 bytes. */
const BYTE_LETTERS = (() => {
  const printable = byte => (byte > 32 && byte < 127) || (byte > 160 && byte < 256 && byte !== 173);
  let next = 256;
  return Array.from({ length: 256 }, (_, byte) => String.fromCharCode(printable(byte) ? byte : next++));
})();

/* GPT-2's split into words, each with the space before it. JavaScript's own \s differs from Unicode's. */
const PIECES =
  /'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\p{White_Space}\p{L}\p{N}]+|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}+/gu;

class Tokenizer {
  constructor({ vocab, merges, special, end }) {
    this.vocab = new Map(Object.entries(vocab));
    this.tokens = new Map([...this.vocab].map(([token, id]) => [id, token]));
    this.ranks = new Map(merges.map((pair, rank) => [pair.join(" "), rank]));
    this.special = new Set(special);
    this.end = end;
    this.bytes = new Map(BYTE_LETTERS.map((letter, byte) => [letter, byte]));
    this.known = new Map();
  }

  encode(text) {
    const encoder = new TextEncoder();
    return (text.match(PIECES) ?? []).flatMap(piece => this.#word([...encoder.encode(piece)].map(byte => BYTE_LETTERS[byte])));
  }

  /* Of all pairs of neighbours that can be merged, the earliest learnt, and of those the leftmost, is merged; again and again. */
  #word(parts) {
    const word = parts.join("");
    if (!this.known.has(word)) {
      for (;;) {
        let best = Infinity, place = -1;
        for (let i = 0; i + 1 < parts.length; i++) {
          const rank = this.ranks.get(`${parts[i]} ${parts[i + 1]}`) ?? Infinity;
          if (rank < best) [best, place] = [rank, i];
        }
        if (place < 0) break;
        parts.splice(place, 2, parts[place] + parts[place + 1]);
      }
      this.known.set(word, parts.map(part => this.vocab.get(part)));
    }
    return this.known.get(word);
  }

  decode(ids) {
    const letters = ids.filter(id => !this.special.has(id)).flatMap(id => [...this.tokens.get(id)]);
    return new TextDecoder("utf-8", { ignoreBOM: true }).decode(Uint8Array.from(letters, letter => this.bytes.get(letter)));
  }

  /* A token for people: spaces and line ends are seen, and so are bytes that are no whole character. */
  show(id) {
    if (this.special.has(id)) return this.tokens.get(id);
    const text = this.decode([id]);
    if (text.includes("\ufffd")) {
      return [...this.tokens.get(id)].map(letter => `‹${this.bytes.get(letter).toString(16).padStart(2, "0")}›`).join("");
    }
    return text.replaceAll(" ", "·").replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll("\r", "␍");
  }
}
