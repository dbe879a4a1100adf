"use strict";
// One view for each trace, and one bar that steps through all of them. The data of a trace: base64 of a deflated block,
// which holds a JSON object behind its length, then the arrays that the object lists.
const $ = (id) => document.getElementById(id);
const TYPES = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, i4: Int32Array, f4: Float32Array, f8: Float64Array };
const LEVELS = 8, HUES = 8; // classes l1 to l8, c0 to c7
const MODES = {
  heads: "heads that keep it", thought: "thought type", sentence: "sentence", score: "score", needed: "needed later",
  ended: "held when thinking ends",
};
const STAGES = ["prompt", "thinking", "answer"];

async function load(script) {
  const coded = atob(script.textContent), bytes = new Uint8Array(coded.length);
  for (let i = 0; i < coded.length; i++) bytes[i] = coded.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const block = await new Response(stream).arrayBuffer();
  const length = new DataView(block).getUint32(0, true);
  const d = JSON.parse(new TextDecoder().decode(new Uint8Array(block, 4, length)));
  let at = 4 + length;
  for (const [name, type, count] of d.arrays) {
    const Type = TYPES[type.slice(1)], end = at + count * Type.BYTES_PER_ELEMENT;
    d[name] = new Type(block.slice(at, end)); // a copy, for views must be aligned
    at = end;
  }
  return d;
}

// Marks that turn the direction of all that follows would also turn what the page itself says: they are shown as U+FFFD.
const TURNS = /[\u202a-\u202e\u2066-\u2069]/g;
const upright = (text) => text.replace(TURNS, "\ufffd");
const number = (n) => n.toLocaleString("en");
const several = (n, noun = "head") => `${number(n)} ${noun}${n === 1 ? "" : "s"}`;
const mib = (n) => n >= 104857.6 ? (n / 1048576).toFixed(2) + " MiB" : (n / 1024).toFixed(1) + " KiB";

function element(name, text = "", className = "") {
  const e = document.createElement(name);
  e.textContent = upright(text);
  if (className) e.className = className;
  return e;
}

// One trace. `$` finds its elements, `page` is told what concerns all traces.
function view(d, $, page) {
  const n = d.texts.length, [Lt, Ht] = d.tables, units = Lt * Ht, lanes = d.layers * d.heads, share = lanes / units;
  const budgets = d.budget, spans = new Array(n);
  const alive = new Uint16Array(n), held = new Uint32Array(units); // at the step that is shown
  const shown = new Int16Array(n).fill(-1); // the class of every token
  const then = new Int32Array(n).fill(-1); // tables that hold a thinking token when thinking ends; -1: another token
  const apart = d.departs ? d.prompt + d.departs - 1 : -1; // the first token that the first trace does not have
  let t = d.steps, mode = "heads", chosen = -1;
  const born = (p) => Math.max(0, p - d.prompt + 1);
  const visible = () => Math.min(n, d.prompt + t); // tokens that came until now

  // --- bytes by kind: differences become sums
  const K = d.kinds.length, T = K ? d.bytes.length / K : 0;
  const bytes = d.kinds.map((_, k) => {
    const of = d.bytes.slice(k * T, (k + 1) * T);
    for (let i = 1; i < T; i++) of[i] += of[i - 1];
    return of;
  });

  // --- the classes of tokens: 0 is a token that is yet to come; then every colour, kept and gone
  const plain = 1, level = (i) => 2 + i, hue = (i) => 2 + LEVELS + i; // l1 is level(0)
  const GONE = 2 + LEVELS + HUES;
  const names = ["future", "", ...Array.from({ length: LEVELS }, (_, i) => "l" + (i + 1)),
    ...Array.from({ length: HUES }, (_, i) => "c" + i)];
  const nl = (p) => d.texts[p].includes("\n") && !d.texts[p].trim() ? " nl" : ""; // line breaks alone are shown

  function build() {
    const text = $("text"), all = document.createDocumentFragment();
    let line = null;
    for (let p = 0; p < n; p++) {
      if (line === null || d.texts[p - 1].includes("\n")) {
        all.append(line = document.createElement("div"));
        line.dir = "auto"; // a line of Hebrew runs from right to left, and the lines around it do not
      }
      const span = spans[p] = element("span", d.texts[p]);
      span.p = p;
      line.append(span);
    }
    text.append(all);
  }

  function holdings() { // of the thinking tokens, when thinking ends
    for (let p = 0; p < n; p++) {
      if (d.stage[p] !== 1) continue;
      then[p] = units;
      for (let i = d.start[p]; i < d.start[p + 1] && d.step[i] <= d.thinkEnd; i++) then[p]--;
    }
  }

  function count() {
    const until = visible();
    held.fill(until);
    for (let p = 0; p < until; p++) {
      let left = units;
      for (let i = d.start[p]; i < d.start[p + 1] && d.step[i] <= t; i++) { left--; held[d.unit[i]]--; }
      alive[p] = left;
    }
  }

  function snapshot() { // the last one until now, or −1
    let i = d.snapshotStep.length - 1;
    while (i >= 0 && d.snapshotStep[i] > t) i--;
    return i;
  }

  const ahead = (p) => { // needs of a token whose statements are yet to come
    let i = d.needStart[p];
    while (i < d.needStart[p + 1] && d.needAt[i] < visible()) i++;
    return d.needStart[p + 1] - i;
  };

  function colours() {
    const until = visible(), at = snapshot() * n;
    if (mode === "heads") return (p) => level(Math.ceil(alive[p] * LEVELS / units) - 1);
    if (mode === "needed") return (p) => !ahead(p) ? plain : alive[p] ? level(Math.min(ahead(p), LEVELS) - 1) : hue(6);
    if (mode === "ended") return (p) => then[p] < 0 ? plain : level(Math.ceil(then[p] * LEVELS / units) - 1);
    if (mode === "sentence") return (p) => hue(1 + d.sentence[p] % 6);
    if (mode === "score") return (p) => at >= 0 && d.rank[at + p] ? level((d.rank[at + p] - 1) * LEVELS >> 8) : plain;
    if (d.thoughts.length) return (p) => d.stage[p] ? hue(1 + d.thought[p] % 7) : hue(0);
    return (p) => hue(d.stage[p] === 2 ? 2 : d.stage[p]);
  }

  function paint() {
    const until = visible(), colour = colours(), left = mode === "ended" ? then : alive;
    const pale = ["heads", "score", "ended"].includes(mode); // a token that no head keeps has no colour
    for (let p = 0; p < n; p++) {
      let code = 0;
      if (p < until) code = left[p] ? colour(p) : GONE + (pale ? plain : colour(p));
      if (code === shown[p]) continue;
      shown[p] = code;
      spans[p].className = names[code % GONE] + (code >= GONE ? " gone" : "") + nl(p) + (code && p === apart ? " apart" : "") + (p === chosen ? " chosen" : "");
    }
  }

  // --- chart
  const W = 400, H = 118, LEFT = 4, TOP = 14, BOTTOM = 16;
  const full = (step) => (d.prompt + step) * d.fullBytes;
  const x = (step, left = LEFT) => left + (W - LEFT - left) * (T > 1 ? step / (T - 1) : 0);
  const cursors = []; // of each picture: the line at the step that is shown, where step 0 is
  function picture(svg, left, make, top, bottom) { // the cursor comes last, and a click goes to a step
    cursors.push([make("line", { class: "cursor", y1: top, y2: bottom }), left]);
    const seek = (event) => {
      const box = svg.getBoundingClientRect();
      page.go(Math.round(((event.clientX - box.left) / box.width * W - left) / (W - LEFT - left) * (T - 1)));
    };
    svg.addEventListener("pointerdown", seek);
    svg.addEventListener("pointermove", (event) => event.buttons && seek(event));
  }

  const maker = (svg) => (name, of, text) => {
    const e = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const key in of) e.setAttribute(key, of[key]);
    if (text !== undefined) e.textContent = text;
    svg.append(e);
    return e;
  };

  function chart() {
    const svg = $("chart"), make = maker(svg);
    if (!T) return;
    const points = Array.from({ length: Math.min(T, 400) }, (_, i, a) => Math.round(i * (T - 1) / Math.max(1, Math.min(T, 400) - 1)));
    const total = (step) => bytes.reduce((sum, of) => sum + of[step], 0);
    const most = Math.max(1, ...points.map(total)); // the scale is this trace's own
    const y = (value) => H - BOTTOM - (H - TOP - BOTTOM) * value / most;
    const base = new Float64Array(points.length);
    bytes.forEach((of, k) => {
      const below = points.map((step, i) => `${x(step).toFixed(1)},${y(base[i]).toFixed(1)}`).reverse();
      const above = points.map((step, i) => `${x(step).toFixed(1)},${y(base[i] += of[step]).toFixed(1)}`);
      make("polygon", { points: [...above, ...below].join(" "), class: "k" + k % 6 });
      const item = element("li", "");
      item.append(element("i", "", "k" + k % 6), d.kinds[k]);
      $("kinds").append(item);
    });
    make("line", { class: "axis", x1: LEFT, x2: W - LEFT, y1: H - BOTTOM, y2: H - BOTTOM });
    const leaves = Math.min(T - 1, most / d.fullBytes - d.prompt); // the step at which a full cache is above the picture
    if (leaves > 0) make("line", { class: "full", x1: x(0), y1: y(full(0)), x2: x(leaves), y2: y(full(leaves)) });
    make("text", { x: LEFT, y: TOP - 4 }, "at most " + mib(most));
    make("text", { x: W - LEFT, y: TOP - 4, "text-anchor": "end" }, "a full cache at the end (dashed): " + mib(full(T - 1)));
    make("text", { x: LEFT, y: H - 4 }, "0");
    make("text", { x: W - LEFT, y: H - 4, "text-anchor": "end" }, number(T - 1) + " generated tokens");
    picture(svg, LEFT, make, TOP, H - BOTTOM);
  }

  // --- budgets over time: a row for each table, in a stronger colour where its budget is larger
  const COLUMNS = 64, BESIDE = 46; // changes that are drawn, at most; room for the layers' names
  function shares() {
    if (!T || budgets.every((b, i) => b === budgets[i - i % units])) return; // always the same in all tables
    const svg = $("budgets"), make = maker(svg), gap = 2, real = budgets.filter((b) => b >= 0);
    const low = real.reduce((a, b) => Math.min(a, b)), high = real.reduce((a, b) => Math.max(a, b));
    const strength = (b) => (0.12 + 0.88 * (b - low) / Math.max(1, high - low)).toFixed(3);
    const thick = Math.max(1.5, Math.min(5, 200 / units)), top = (u) => thick * u + gap * Math.floor(u / Ht);
    const changes = d.budgetStep.length, drawn = Math.min(changes, COLUMNS);
    const at = Array.from({ length: drawn }, (_, i) => Math.round(i * (changes - 1) / Math.max(1, drawn - 1)));
    at.forEach((change, i) => {
      const from = x(d.budgetStep[change], BESIDE), to = x(i + 1 < drawn ? d.budgetStep[at[i + 1]] : T - 1, BESIDE);
      for (let u = 0; u < units; u++) {
        const budget = budgets[change * units + u];
        if (budget < 0) continue;
        make("rect", { class: "budget", x: from, y: top(u), width: to - from, height: thick, "fill-opacity": strength(budget) });
      }
    });
    const pitch = thick * Ht + gap, every = Math.ceil(10 / pitch); // names must not overlap
    for (let l = 0; l < Lt; l += every) make("text", { x: BESIDE - 4, y: l * pitch + thick * Ht / 2 + 3.5, "text-anchor": "end" }, "layer " + l);
    svg.setAttribute("viewBox", `0 0 ${W} ${Lt * pitch}`);
    picture(svg, BESIDE, make, 0, Lt * pitch);
    const rows = Ht === 1 ? "A row for each layer" : `${Ht} rows in a layer, one for each head`;
    $("moved").textContent = `${rows}; a stronger colour is a larger budget, ${number(low)} to ${number(high)} tokens`;
    $("moves").hidden = false;
  }

  function readout() {
    if (!T) return;
    for (const [cursor, left] of cursors) for (const key of ["x1", "x2"]) cursor.setAttribute(key, x(t, left));
    const sum = bytes.reduce((all, of) => all + of[t], 0);
    const parts = d.kinds.map((kind, k) => `${kind} ${mib(bytes[k][t])}`).join(", ");
    $("held").textContent = `${mib(sum)}, ${(100 * sum / full(t)).toFixed(0)} % of a full cache's ${mib(full(t))}: ${parts}`;
  }

  // --- layers × heads
  const cells = [];
  function table(into, content) { // content: (unit) → [text, class]
    into.textContent = "";
    const head = into.createTHead().insertRow(), made = [];
    head.append(element("th"));
    for (let h = 0; h < Ht; h++) head.append(element("th", Ht === 1 && d.heads > 1 ? `all ${d.heads} heads` : "head " + h));
    const body = into.createTBody();
    for (let l = 0; l < Lt; l++) {
      const row = body.insertRow(), title = element("th", Lt === 1 && d.layers > 1 ? `all ${d.layers} layers` : "layer " + l);
      title.scope = "row";
      row.append(title);
      for (let h = 0; h < Ht; h++) {
        const [text, className] = content(l * Ht + h);
        const cell = element("td", text, className);
        row.append(cell);
        made.push(cell);
      }
    }
    return made;
  }

  function map() {
    const until = visible();
    if (!cells.length) cells.push(...table($("map"), () => ["", ""]));
    let most = 1;
    for (let u = 0; u < units; u++) most = Math.max(most, held[u]);
    let i = d.budgetStep.length - 1;
    while (i > 0 && d.budgetStep[i] > t) i--;
    const now = budgets.subarray(i * units, (i + 1) * units);
    for (let u = 0; u < units; u++) {
      cells[u].textContent = number(held[u]);
      cells[u].className = held[u] ? "l" + Math.ceil(held[u] * LEVELS / most) : "";
      cells[u].title = now[u] >= 0 ? `budget ${number(now[u])}` : "no budget";
    }
    const low = Math.min(...now), high = Math.max(...now);
    $("budget").textContent = `of ${number(until)} tokens; ` + (high < 0 ? "no budget"
      : low === high ? `budget ${number(low)}` : `budgets ${low < 0 ? "none" : number(low)} to ${number(high)}`);
  }

  // --- one token
  const spell = (text) => text === "" ? "(inside a character)" : text.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/ /g, "␣");
  const short = (s) => Number.isNaN(s) ? "?" : Number.isFinite(s) ? Number(s.toPrecision(3)).toString().replace("-", "−") : s < 0 ? "−∞" : "∞";
  function formats(p) { // of a token: how it is stored, and in how many heads
    const now = new Map(), counts = new Map();
    for (let u = 0; u < units; u++) now.set(u, d.entered[p]);
    for (let i = d.moveStart[p]; i < d.moveStart[p + 1] && d.moveStep[i] <= t; i++) now.set(d.moveUnit[i], d.moveTo[i]);
    for (let i = d.start[p]; i < d.start[p + 1] && d.step[i] <= t; i++) now.delete(d.unit[i]);
    for (const format of now.values()) counts.set(format, (counts.get(format) ?? 0) + share);
    const name = (format) => format === d.waits ? "full precision, until its group is full" : d.formats[format];
    return [...counts].map(([format, heads]) => `${name(format)}: ${several(heads)}`).join("; ");
  }

  function describe() {
    const into = $("token"), p = chosen;
    if (p < 0) return;
    into.textContent = "";
    if (p >= n) {
      into.append(element("p", `position ${number(p)}: this sequence has ended before`, "quiet"));
      return;
    }
    const list = document.createElement("dl");
    const say = (what, value, name = "span") => {
      const dd = document.createElement("dd");
      dd.append(element(name, value));
      list.append(element("dt", what), dd);
    };
    say("text", spell(d.texts[p]), "code");
    say("position", `${number(p)}${born(p) ? `, generated token ${number(born(p))}` : ", in the prompt"}; id ${d.ids[p]}`);
    const thought = d.thoughts.length ? `, ${d.thoughts[d.thought[p]]}` : "";
    say("part", `${STAGES[d.stage[p]]}${thought}; sentence ${number(d.sentence[p])}`);
    const at = snapshot(), rank = at < 0 ? 0 : d.rank[at * n + p];
    if (p >= visible()) say("kept", "not there yet");
    else say("kept", `by ${number(alive[p] * share)} of ${several(lanes)}`);
    if (p < visible() && alive[p]) say("stored as", formats(p));
    if (then[p] >= 0) say(d.thinkEnd < d.steps ? "thinking ends" : "last step", `kept by ${number(then[p] * share)} of ${several(lanes)} (step ${number(d.thinkEnd)})`);
    if (rank && p < visible()) say("score", `above ${(100 * (rank - 1) / 254).toFixed(0)} % of the tokens (step ${number(d.snapshotStep[at])}, mean over heads)`);
    const needs = d.needStart[p + 1] - d.needStart[p], later = ahead(p), next = d.needStart[p + 1] - later;
    if (needs) say("needed", `by ${number(later)} of ${number(needs)} needs to come` + (later ? `; next by token ${number(d.needAt[next])}, ${d.needs[d.needWhat[next]]}` : ""));
    const gone = new Map(), by = new Map();
    for (let i = d.start[p]; i < d.start[p + 1]; i++) {
      if (d.step[i] > t) continue;
      gone.set(d.unit[i], i);
      by.set(d.by[i], [...(by.get(d.by[i]) ?? []), i]);
    }
    for (const [author, which] of by) {
      const range = (of) => { const a = Math.min(...of), b = Math.max(...of); return a === b || Number.isNaN(a) ? short(a) : `${short(a)} to ${short(b)}`; };
      const steps = which.map((i) => d.step[i]), a = Math.min(...steps), b = Math.max(...steps);
      const scores = which.map((i) => d.score[i]).filter((s) => !Number.isNaN(s));
      say("evicted", `by ${d.policies[author]} from ${several(which.length * share)}, step ${a === b ? number(a) : `${number(a)} to ${number(b)}`}`
        + (scores.length ? `; score ${range(scores)}` : ""));
    }
    into.append(list);
    if (gone.size && units > 1 && units <= 256) {
      const grid = document.createElement("table"), box = element("div", "", "wide");
      grid.append(element("caption", "evicted at step", "quiet"));
      for (const [u, cell] of table(grid, (u) => gone.has(u) ? [number(d.step[gone.get(u)]), ""] : ["kept", "l5"]).entries())
        if (gone.has(u)) cell.title = `${d.policies[d.by[gone.get(u)]]}, score ${short(d.score[gone.get(u)])}`;
      box.append(grid);
      into.append(box);
    }
  }

  function choose(p, scroll) {
    if (spans[chosen]) spans[chosen].classList.remove("chosen");
    chosen = p;
    if (spans[p]) spans[p].classList.add("chosen");
    if (scroll) reveal(p);
    describe();
  }

  function reveal(p) {
    if (spans[p]) scrolling(() => spans[p].scrollIntoView({ block: "nearest" }));
  }

  function scrolling(act) {
    const text = $("text"), before = text.scrollTop;
    act();
    if (text.scrollTop !== before) page.scrolled(text);
  }

  function track(p) { // scroll the text alone, so that the page stays where its reader is
    const text = $("text"), box = text.getBoundingClientRect(), token = spans[p].getBoundingClientRect();
    const below = token.bottom - box.bottom, above = box.top - token.top;
    if (below > 0) scrolling(() => { text.scrollTop += below + token.height; });
    else if (above > 0) scrolling(() => { text.scrollTop -= above; });
  }

  // --- what is shown
  function legend() {
    const items = [], add = (className, text) => items.push([className, text]);
    if (mode === "heads") { add("l8", `kept by all ${number(lanes)} heads`); add("l4", "by half"); add("l1", "by few"); }
    else if (mode === "score") { add("l8", "scored above most"); add("l4", "middle"); add("l1", "below most"); add("", "no score"); }
    else if (mode === "needed") { add("l8", `would do for ${LEVELS} needs to come, or more`); add("l1", "for one"); add("c6 gone", "for one or more, and kept by none"); }
    else if (mode === "ended" && d.thinkEnd < 0) add("", "there are no thinking tokens");
    else if (mode === "ended") {
      const when = d.thinkEnd < d.steps ? "when thinking ends" : "at the last step, for there is no answer";
      add("l8", `thinking tokens: held by all ${number(lanes)} heads ${when} (step ${number(d.thinkEnd)})`);
      add("l4", "by half");
      add("l1", "by few");
    } else if (mode === "sentence") add("c1", "neighbouring sentences differ in colour");
    else if (d.thoughts.length) { add("c0", "prompt"); d.thoughts.forEach((name, i) => add("c" + (1 + i % 7), name)); }
    else STAGES.forEach((name, i) => add("c" + i, name));
    $("legend").textContent = "";
    for (const [className, text] of items) {
      const item = document.createElement("li");
      item.append(element("i", "", className), text);
      $("legend").append(item);
    }
    const last = document.createElement("li");
    last.append(element("span", mode === "ended" ? "by none" : "kept by none", "gone"));
    $("legend").append(last);
  }

  function show(step, follow) {
    t = Math.min(d.steps, step);
    count();
    paint();
    readout();
    map();
    describe();
    if (follow && visible()) track(visible() - 1);
  }

  $("text").addEventListener("pointerover", (event) => { if (event.target.p !== undefined) page.point($("text"), event.target.p); });
  $("text").addEventListener("click", (event) => { if (event.target.p !== undefined) page.pin($("text"), event.target.p); });
  // --- several traces: what became of each
  function who(first) { // first: the trace that the others are compared with
    $("name").append(element("bdi", d.name));
    if (d.outcome) {
      const { word, found, answer, ended } = d.outcome;
      $("outcome").append(element("strong", word, word), ": ", found === null ? "no answer" : element("bdi", found));
      if (word === "wrong") $("outcome").append(", and ", element("bdi", answer), " is right");
      if (ended) $("outcome").append(` (${ended})`);
    }
    const other = element("bdi", first.name), into = $("departs");
    if (d === first) into.append("the others are compared with this text");
    else if (d.departs === null) into.append("another prompt than that of ", other);
    else if (d.departs === 0) into.append("the same text as that of ", other);
    else {
      const button = element("button", `token ${number(d.departs)}`);
      button.type = "button";
      button.addEventListener("click", () => page.visit(d.departs, apart));
      into.append("departs from the text of ", other, " at ", button);
    }
    $("ending").textContent = d.holds;
  }

  const about = Object.entries(d.about).map(([key, value]) => `${key} ${value}`);
  about.push(`${several(d.prompt, "prompt token")}, ${number(d.steps)} generated`, `${several(d.layers, "layer")} × ${several(d.heads, "KV head")}`);
  if (d.done) about.push(`recording took ${Number(d.done.seconds).toFixed(2)} s for ${several(Number(d.done.steps), "step")}`);
  else {
    $("notice").textContent = "The run was interrupted, or its file is cut off: the trace shows it as far as it was written.";
    $("notice").hidden = false;
  }
  for (const [i, text] of about.entries()) $("about").append(i ? " · " : "", element("bdi", text));
  build();
  holdings();
  chart();
  shares();
  return { text: $("text"), tokens: n, who, show, choose, colour: (name) => { mode = name; legend(); } };
}

// A column for each trace: copies of the page's first, whose ids end in -1, -2, …  → how each finds its elements.
function columns(traces) {
  const first = $("trace");
  if (traces.length > 1) {
    document.body.classList.add("several");
    $("who").hidden = false;
    $("who").append($("notice"));
    $("panels").append($("about"));
  }
  const finders = traces.map((_, k) => (id) => $(k ? `${id}-${k}` : id));
  for (let k = 1; k < traces.length; k++) {
    const copy = first.cloneNode(true), own = (id) => `${id}-${k}`;
    for (const e of [copy, ...copy.querySelectorAll("[id]")]) e.id = own(e.id);
    for (const e of copy.querySelectorAll("[aria-labelledby]"))
      e.setAttribute("aria-labelledby", e.getAttribute("aria-labelledby").split(" ").map(own).join(" "));
    $("traces").append(copy);
    $(own("keys")).remove(); // said once
  }
  return finders;
}

function start(traces) {
  const steps = Math.max(...traces.map((d) => d.steps)), offsets = new Map(); // text → where this script has scrolled it
  let t = 0, chosen = -1, pinned = false, playing = 0, pending = 0;
  const scrolled = (text) => offsets.set(text, text.scrollTop);
  function choose(p, pointed) { // pointed: the text in which the pointer is; it does not move
    if (p < 0 || p >= most || p === chosen) return;
    chosen = p;
    for (const of of views) of.choose(p, of.text !== pointed);
  }
  const page = {
    go, scrolled,
    visit: (step, p) => { play(false); go(step); pinned = true; choose(p); },
    point: (text, p) => { if (!pinned) choose(p, text); },
    pin: (text, p) => { pinned = !(pinned && p === chosen); choose(p, text); },
  };
  const finders = columns(traces), views = traces.map((d, k) => view(d, finders[k], page));
  const most = Math.max(...views.map((of) => of.tokens));
  if (traces.length > 1) for (const of of views) of.who(traces[0]);

  function show() {
    pending = 0;
    for (const of of views) of.show(t, $("follow").checked);
    const time = $("time"), said = `${number(t)} of ${number(steps)}`, noun = steps === 1 ? " token" : " tokens";
    time.value = t;
    time.setAttribute("aria-valuetext", said + " generated tokens");
    $("now").textContent = said + noun;
  }
  function go(step) {
    t = Math.max(0, Math.min(steps, step));
    if (!pending) pending = requestAnimationFrame(show); // many events, one picture
  }
  function play(on) {
    $("play").textContent = on ? "Pause" : "Play";
    $("play").setAttribute("aria-pressed", on);
    cancelAnimationFrame(playing);
    playing = 0;
    if (!on) return;
    const speed = Math.max(20, steps / 20) / 1000; // tokens a millisecond
    let at = t < steps ? t : 0, last = performance.now();
    const tick = (time) => {
      at += Math.min(100, Math.max(0, time - last)) * speed; // nobody has watched a tab that was hidden for longer
      last = time;
      go(Math.floor(at));
      if (t >= steps) play(false);
      else playing = requestAnimationFrame(tick);
    };
    playing = requestAnimationFrame(tick);
  }

  $("time").max = steps;
  $("time").addEventListener("input", (event) => { play(false); go(Number(event.target.value)); });
  $("play").addEventListener("click", () => play(!playing));
  const some = (has) => traces.some(has);
  for (const key in MODES) {
    if ((key === "score" && !some((d) => d.snapshotStep.length)) || (key === "needed" && !some((d) => d.needs.length))
      || (key === "ended" && !some((d) => d.thinkEnd >= 0))) continue;
    const name = key === "thought" && !some((d) => d.thoughts.length) ? "stage" : MODES[key], option = element("option", name);
    option.value = key;
    $("mode").append(option);
  }
  const colour = () => { for (const of of views) of.colour($("mode").value); };
  $("mode").addEventListener("change", () => { colour(); show(); });
  let leader = null; // the text that the user scrolls; the others follow
  for (const { text } of views) {
    for (const sign of ["pointerenter", "focus"]) text.addEventListener(sign, () => { leader = text; });
    text.addEventListener("scroll", () => {
      const ours = offsets.get(text) === text.scrollTop;
      offsets.delete(text);
      if (text !== leader || ours) return;
      for (const other of views) if (other.text !== text) other.text.scrollTop = text.scrollTop;
    });
  }
  const leap = Math.max(1, Math.round(steps / 20));
  const KEYS = {
    ArrowLeft: () => go(t - 1), ArrowRight: () => go(t + 1), PageUp: () => go(t - leap), PageDown: () => go(t + leap),
    Home: () => go(0), End: () => go(steps), " ": () => play(!playing),
    ".": () => { pinned = true; choose(chosen + 1); }, ",": () => { pinned = true; choose(chosen - 1); },
  };
  document.addEventListener("keydown", (event) => {
    const at = event.target, own = (at.tagName === "SELECT" && !",.".includes(event.key)) || ((at.tagName === "BUTTON" || at.type === "checkbox") && event.key === " ");
    if (own || event.ctrlKey || event.altKey || event.metaKey || !(event.key in KEYS)) return;
    event.preventDefault();
    if (event.key !== " ") play(false);
    KEYS[event.key]();
  });
  colour();
  show();
  if (!matchMedia("(prefers-reduced-motion: reduce)").matches) play(true);
  document.documentElement.dataset.ready = "yes";
}

Promise.all([...document.querySelectorAll("script.data")].map(load)).then(start).catch((error) => {
  $("notice").textContent = `This page cannot be shown (${error}); it needs a browser of 2023 or newer.`;
  $("notice").hidden = false;
  throw error;
});
