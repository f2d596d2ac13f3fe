// The replay of a shard map: from the changes of each event to what is held at any event, and what that says in words.
// Plain data in (see shard_map_data.py).

// Steps to any event, forwards or backwards: the change of an event also leads back.
function replayOf(data) {
  const rows = Array.from({ length: 2 * data.ranks * data.kinds.length }, () => new Set());
  const bytes = []; // of each event: [parameters, gradients, optimizer] of each rank in turn
  for (const [, , own] of data.frames) bytes.push(own.length ? own : bytes[bytes.length - 1]);
  let at = -1;

  function toggle(number) {
    const changes = data.frames[number][1];
    for (let i = 0; i < changes.length; i += 2 + changes[i + 1]) {
      const row = rows[changes[i]];
      for (const end of changes.slice(i + 2, i + 2 + changes[i + 1])) row.delete(end) || row.add(end);
    }
  }

  return {
    goTo(number) {
      while (at < number) toggle(++at);
      while (at > number) toggle(at--);
    },
    // What rank holds of a kind, or has in flight: [[from, to], ...]
    held: (rank, kind) => pairsOf(rows[rank * data.kinds.length + kind]),
    flying: (rank, kind) => pairsOf(rows[(data.ranks + rank) * data.kinds.length + kind]),
    bytes: (rank) => bytes[at].slice(3 * rank, 3 * rank + 3),
    // What became held or free at this event.
    changed(rank, kind) {
      const wanted = rank * data.kinds.length + kind, changes = data.frames[at][1];
      for (let i = 0; i < changes.length && at > 0; i += 2 + changes[i + 1]) {
        if (changes[i] === wanted) return pairsOf(changes.slice(i + 2, i + 2 + changes[i + 1]));
      }
      return [];
    },
  };
}

function pairsOf(ends) {
  const sorted = [...ends].sort((a, b) => a - b), pairs = [];
  for (let i = 0; i + 1 < sorted.length; i += 2) pairs.push([sorted[i], sorted[i + 1]]);
  return pairs;
}

const sizeOf = (pairs) => pairs.reduce((sum, [from, to]) => sum + to - from, 0);

// The ranges, cut where the owner changes: [from, to, owner], owner -1 for nobody's.
function ownedOf(data, pairs) {
  const pieces = [];
  for (const [from, to] of pairs) {
    let start = 0;
    for (let i = 0; i < data.owners.length; i += 2) {
      const stop = data.owners[i], first = Math.max(from, start), last = Math.min(to, stop);
      if (first < last) pieces.push([first, last, data.owners[i + 1]]);
      start = stop;
    }
  }
  return pieces;
}

function percent(part, whole) {
  const share = whole ? part / whole : 0;
  return share === 0 || share === 1 ? 100 * share : Math.min(99, Math.max(1, Math.round(100 * share)));
}

function bytesText(bytes) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (Math.round(bytes) < 1000 || unit === "GB") {
      return `${unit === "B" || bytes >= 99.95 ? Math.round(bytes) : bytes.toFixed(bytes < 9.995 ? 2 : 1)} ${unit}`;
    }
    bytes /= 1000;
  }
}

const psiOf = (data) => data.columns[data.columns.length - 1] || 1;
const stateBytes = (replay, rank) => replay.bytes(rank).reduce((sum, size) => sum + size, 0);

// Ranks that say the same are named together.
function byRanks(data, sentence) {
  const said = new Map();
  for (let rank = 0; rank < data.ranks; rank++) {
    const text = sentence(rank);
    if (text) said.set(text, [...(said.get(text) || []), rank]);
  }
  return [...said].map(([text, ranks]) => [text, ranks.length === data.ranks && data.ranks > 1 ? "every rank" : `rank ${ranks.join(", ")}`]);
}

// What this event changed, in words: "gradients 25 % → 28 % on every rank; in flight: gradients on every rank".
function changesInWords(data, replay) {
  const psi = psiOf(data), parts = [];
  data.kinds.forEach(({ name }, kind) => {
    const change = (rank) => {
      const changed = replay.changed(rank, kind);
      if (!changed.length) return "";
      const now = sizeOf(replay.held(rank, kind));
      const gained = sizeOf(cut(replay.held(rank, kind), changed)), freed = sizeOf(changed) - gained;
      const before = now - gained + freed, from = percent(before, psi), to = percent(now, psi);
      return from === to ? `${name} ${before.toLocaleString("en")} → ${now.toLocaleString("en")} elements` : `${name} ${from} % → ${to} %`;
    };
    for (const [text, where] of byRanks(data, change)) parts.push(`${text} on ${where}`);
  });
  const flying = (rank) => data.kinds.filter((_, kind) => replay.flying(rank, kind).length).map(({ name }) => name).join(", ");
  for (const [text, where] of byRanks(data, flying)) parts.push(`in flight: ${text} on ${where}`);
  return parts.join("; ");
}

// The parts of `pairs` that lie in `others` too.
function cut(pairs, others) {
  return pairs.flatMap(([a, b]) => others.map(([c, d]) => [Math.max(a, c), Math.min(b, d)]).filter(([from, to]) => from < to));
}

// Everything that the picture shows, in words.
function pictureInWords(data, replay) {
  const psi = psiOf(data);
  const rank = (number) => {
    const held = data.kinds.map(({ name }, kind) => `${name} ${percent(sizeOf(replay.held(number, kind)), psi)} %`);
    return `holds ${bytesText(stateBytes(replay, number))}: ${held.join(", ")}`;
  };
  return `${byRanks(data, rank).map(([text, where]) => `${where} ${text}`).join(". ")}. The formula says ${data.formula_text}.`;
}

// What is at one element of a row.
function elementInWords(data, replay, rank, kind, element) {
  let name = "", start = 0, within = 0;
  for (let i = 0; i < data.columns.length; i += 2) {
    if (element < data.columns[i + 1]) { name = data.columns[i]; within = element - start; break; }
    start = data.columns[i + 1];
  }
  const [piece] = ownedOf(data, [[element, element + 1]]), owner = piece && piece[2] >= 0 ? `rank ${piece[2]} owns it` : "nobody owns it alone";
  const lies = (pairs) => pairs.some(([from, to]) => from <= element && element < to);
  const holders = [...Array(data.ranks).keys()].filter((other) => lies(replay.held(other, kind)));
  const held = holders.length ? `held by rank${holders.length > 1 ? "s" : ""} ${holders.join(", ")}` : "held by nobody";
  const flying = lies(replay.flying(rank, kind)) ? `, in flight on rank ${rank}` : "";
  return `${data.kinds[kind].name} of ${name}, element ${within.toLocaleString("en")}: ${held}${flying}; ${owner}.`;
}
