"use strict";
// Evaluates what fitting/export.py wrote, as fitting/analysis.py and fitting/stretch.py do, and draws it.
const [GRADIENTS, KEPT, EXPERTS, HEAD, PASSING] = [0, 1, 2, 3, 4];
const MOST_TOKENS = 1 << 24, MOST_SEQUENCES = 1 << 16, FEWEST_TOKENS = 2;

// ---- expressions
const OPERATIONS = {
  "+": (...all) => all.reduce((a, b) => a + b, 0),
  "*": (...all) => all.reduce((a, b) => a * b, 1),
  "^": (a, b) => Math.pow(a, b),
  "/": (a, b) => a / b,
  max: Math.max, min: Math.min, floor: Math.floor, ceiling: Math.ceil, trunc: Math.trunc,
  floordiv: (a, b) => Math.floor(a / b),
  mod: (a, b) => a - b * Math.floor(a / b),
  modular: (a, b, c) => Math.floor(a / b) % c,
  ">=": (a, b) => a >= b, ">": (a, b) => a > b, "<=": (a, b) => a <= b, "<": (a, b) => a < b,
  "==": (a, b) => a === b, "!=": (a, b) => a !== b,
  and: (...all) => all.every(Boolean), or: (...all) => all.some(Boolean), not: (a) => !a,
};
function compiled(expr) {
  if (typeof expr === "number" || typeof expr === "boolean") return () => expr;
  if (typeof expr === "string") return (sizes) => sizes[expr];
  const [name, ...operands] = expr;
  if (name === "piecewise") {
    const cases = operands.map(([value, condition]) => [compiled(value), compiled(condition)]);
    return (sizes) => cases.find(([, condition]) => condition(sizes))[0](sizes);
  }
  const operation = OPERATIONS[name], parts = operands.map(compiled);
  if (operation === undefined) throw new Error("unknown operation " + name);
  return (sizes) => operation(...parts.map((part) => part(sizes)));
}

// ---- memory of a step: `size` is {b, s}, `rows` a bound of a chunk's rows or null
let functions = [], tables = null, known = new Map();
function use(data) {
  tables = data.tables;
  functions = tables.expressions.map(compiled);
}
function valueOf(number, size) {
  const key = number + "/" + size.b + "/" + size.s;
  if (!known.has(key)) {
    if (known.size > 200000) known.clear();
    known.set(key, Math.trunc(functions[number](size)));
  }
  return known.get(key);
}
function workspace([kind, ...found], size, rows) {
  if (kind === "head") return Math.trunc(functions[found[rows === null ? 0 : 1]](size));
  const [tokens, free, staged, rule] = found;
  const numTokens = valueOf(tokens, size), routed = numTokens * rule.topK;
  const even = Math.max(rule.leastRows, Math.ceil(routed / rule.experts));
  const most = rule.followsExperts ? even + rule.deviations * Math.floor(Math.sqrt(even)) : Infinity;
  let wanted = Math.max(1, Math.min(rule.knee, most, routed));
  if (rows !== null) wanted = Math.min(rows, wanted);
  let chunk = wanted, isStaged = true;
  if (!rule.takesGroup) {
    const ofExpert = rule.isEven ? Math.ceil(routed / rule.experts) : numTokens;
    chunk = Math.min(wanted, ofExpert);
    isStaged = ofExpert > wanted;
  }
  chunk = Math.max(1, Math.min(chunk, routed));
  return Math.trunc(functions[isStaged ? staged : free]({...size, r: chunk}));
}
const sum = (values) => values.reduce((a, b) => a + b, 0);
function live(memory, size, rows) {
  const changes = Array.from({length: memory.positions + 1}, () => [0, 0, 0, 0, 0]);
  for (const [number, start, stop, part] of memory.allocations) {
    const bytes = valueOf(number, size);
    changes[start][part] += bytes;
    if (stop !== null) changes[stop][part] -= bytes;
  }
  for (let at = 1; at <= memory.positions; at++) for (let part = 0; part < 5; part++) changes[at][part] += changes[at - 1][part];
  changes.length = memory.positions;
  for (const [position, part, ...found] of memory.calls) changes[position][part] += workspace(found, size, rows);
  return changes;
}
function besides(run, where, parts, size) {
  const found = parts.slice();
  found[KEPT] += valueOf(run.saved, size);
  if (where === "backward") found[GRADIENTS] += run.later;
  return found;
}
function eachMemory(runs, visit) {
  for (const run of runs) for (const where of ["forward", "backward"]) {
    if (run[where] !== null) visit(run, where, tables.memories[run[where]]);
  }
}
function momentsOf(runs, size, rows) {
  const found = [];
  eachMemory(runs, (run, where, memory) => {
    const all = live(memory, size, rows), stretches = [];
    let begin = 0;
    for (const end of [...memory.places, memory.positions - 1]) {
      let best = [0, 0, 0, 0, 0], most = -Infinity;
      for (let at = begin; at <= end; at++) if (sum(all[at]) > most) { best = all[at]; most = sum(best); }
      stretches.push({where, parts: besides(run, where, best, size)});
      begin = end + 1;
    }
    found.push(stretches);
  });
  return found;
}
const extendedAs = (one, short, long, times) =>
  ({where: one.where, parts: one.parts.map((mine, part) => mine + times * (long.parts[part] - short.parts[part]))});
const extended = (short, long, times) => extendedAs(short, short, long, times);
function placesOf(short, [front, back]) {
  const rest = Math.max(back, short.length - front);
  return [...Array(front).keys(), ...[...Array(rest).keys()].map((place) => -1 - place)];
}
const at = (list, place) => list[place < 0 ? list.length + place : place];
const highest = (moments) => moments.reduce((best, one) => (sum(one.parts) > sum(best.parts) ? one : best));
function peakOf(analysis, plan, size, rows) {
  const found = analysis.plans[plan].map((runs) => momentsOf(runs, size, rows));
  if (found.length === 1) return highest(found[0].flat());
  const [shorts, longs] = found, candidates = [];
  shorts.forEach((short, number) => {
    const long = longs[number], unit = long.length - short.length;
    for (const place of placesOf(short, analysis.alike[plan][number])) {
      const one = at(short, place), longer = at(long, place), within = at(long, place < 0 ? place - unit : place + unit);
      candidates.push(extended(one, longer, analysis.more));
      if (within !== undefined) candidates.push(extendedAs(within, one, longer, analysis.more - 1));
    }
  });
  return highest(candidates);
}
const ceilDiv = (a, b) => Math.ceil(a / b);
function onRank(analysis, bytes, ofExperts) {
  if (analysis.fsdp > 1) return ceilDiv(bytes, analysis.fsdp);
  return bytes - ofExperts + ceilDiv(ofExperts, analysis.expertParallel);
}
const ofExperts = (analysis, bytes) =>
  Math.floor((bytes * analysis.static.trained_experts) / Math.max(1, analysis.static.trained));
function always(analysis, size) {
  const fixed = analysis.static, optimizer = analysis.optimizer;
  return [
    ["parameters", onRank(analysis, fixed.parameters, fixed.experts)],
    ["fp32 copies of parameters", onRank(analysis, optimizer.masters, ofExperts(analysis, optimizer.masters))],
    ["optimizer state", onRank(analysis, optimizer.state, ofExperts(analysis, optimizer.state))],
    ["inputs and buffers", analysis.constantInputs + 16 * size.b * size.s + analysis.scalars],
  ];
}
function within(analysis, plan, parts) {
  const peak = sum(parts), margin = analysis.estimated.includes(plan) ? Math.floor((peak * analysis.marginPercent) / 100) : 0;
  const terms = tables.parts.map((name, part) => [name, parts[part]]), gradients = parts[GRADIENTS];
  terms[GRADIENTS][1] = onRank(analysis, gradients, ofExperts(analysis, gradients));
  if (analysis.fsdp > 1) {
    terms.push(["parameters gathered by FSDP", analysis.static.root + 2 * analysis.static.layer]);
    terms.push(["gradients that FSDP has not reduced", Math.min(gradients, analysis.static.trained_layer)]);
  }
  terms.push(["gradients of earlier micro-batches", analysis.earlierGradients]);
  terms.push(["margin of the estimate", margin]);
  return terms;
}
function stepping(analysis) {
  const held = onRank(analysis, analysis.static.trained, analysis.static.trained_experts);
  return [["gradients", held], ["working set of the optimizer", ceilDiv(analysis.optimizer.working, analysis.fsdp)]];
}
function totalOf(where, terms) {
  const shown = terms.filter(([, bytes]) => bytes).sort((one, other) => other[1] - one[1]);
  return {where, terms: shown, bytes: sum(shown.map(([, bytes]) => bytes))};
}
function total(analysis, plan, size, rows = null) {
  if (plan === "least") {
    const found = analysis.leastPlans.map((one) => totalPlain(analysis, one, size, rows ?? analysis.leastRows));
    return found.reduce((best, one) => (one.bytes < best.bytes ? one : best));
  }
  if (plan === "most") {
    const found = analysis.mostPlans.map((one) => totalPlain(analysis, one, size, rows));
    return found.reduce((best, one) => (one.bytes > best.bytes ? one : best));
  }
  return totalPlain(analysis, plan, size, rows);
}
function totalPlain(analysis, plan, size, rows) {
  const peak = peakOf(analysis, plan, size, rows), fixed = always(analysis, size);
  const inside = totalOf(peak.where, [...fixed, ...within(analysis, plan, peak.parts)]);
  const after = totalOf("optimizer step", [...fixed, ...stepping(analysis)]);
  return {...(after.bytes > inside.bytes ? after : inside), plan, rows};
}
function largest(low, high, fits) {
  let begin = low + 1, end = high;
  while (begin < end) {
    const middle = Math.floor((begin + end) / 2);
    if (fits(middle)) begin = middle + 1; else end = middle;
  }
  return begin - 1;
}
function asked(analysis, budget, size) {
  const free = total(analysis, "asked", size);
  if (budget === null || free.bytes <= budget) return free;
  const low = analysis.leastRows, plan = total(analysis, "asked", size, low).bytes <= budget ? "asked" : "least";
  if (total(analysis, plan, size, low).bytes > budget) return total(analysis, plan, size, low);
  const rows = largest(low, size.b * size.s + 1, (one) => total(analysis, plan, size, one).bytes <= budget);
  return total(analysis, plan, size, rows);
}
// Under the smallest budget, or as it was asked for where that holds less.
function lightest(data, size) {
  const analysis = data.analysis, least = total(analysis, "least", size);
  if (data.budget !== null || !analysis.isAskedKnown) return least;
  const free = asked(analysis, null, size);
  return free.bytes < least.bytes ? free : least;
}
function longest(needed, available, low, most) {
  if (needed(low) > available) return 0;
  return largest(low, most + 1, (one) => needed(one) <= available);
}
function answer(data, size, memory) {
  const analysis = data.analysis, available = memory - data.beside;
  const needed = (b, s) => lightest(data, {b, s}).bytes, least = lightest(data, size);
  const found = {
    least: total(analysis, "least", size), most: total(analysis, "most", size),
    asked: analysis.isAskedKnown ? asked(analysis, data.budget, size) : null,
    longestSeq: analysis.hasSeq ? longest((one) => needed(size.b, one), available, FEWEST_TOKENS, MOST_TOKENS) : null,
    largestBatch: analysis.hasBatch ? longest((one) => needed(one, size.s), available, 1, MOST_SEQUENCES) : null,
  };
  found.fits = least.bytes <= available;
  found.shown = found.asked !== null && found.asked.bytes <= available ? found.asked : least;
  return found;
}

// ---- the step over time: every position where the model was recorded whole, else the most of each stretch
function timeline(analysis, shown, size) {
  const found = analysis.plans[shown.plan].map((runs) => [runs, momentsOf(runs, size, shown.rows)]);
  let moments = [];
  if (found.length === 1) {
    const parts = {forward: [], backward: []};
    eachMemory(found[0][0], (run, where, memory) => {
      const working = new Set(memory.calls.map(([position]) => position));
      const all = live(memory, size, shown.rows).map((one, at) => ({where, isCall: working.has(at), parts: besides(run, where, one, size)}));
      if (where === "forward") parts.forward.push(...all); else parts.backward.unshift(...all);
    });
    moments = [...parts.forward, ...parts.backward];
  } else {
    const [[, shorts], [, longs]] = found;
    moments = shorts.flatMap((short, number) => stitched(short, longs[number], analysis.more, analysis.alike[shown.plan][number][0]));
  }
  const fixed = always(analysis, size);
  const points = moments.map((one) => ({where: one.where, isCall: one.isCall, terms: [...fixed, ...within(analysis, shown.plan, one.parts)]}));
  return [...points, {where: "optimizer step", terms: [...fixed, ...stepping(analysis)]}];
}
// From the front and from the back as they are extended; units between them lie on a line.
function stitched(short, long, more, alike) {
  const unit = long.length - short.length, front = Math.max(1, Math.min(alike, short.length - unit)), back = short.length - front;
  const head = Array.from({length: front}, (_, place) => extended(short[place], long[place], more));
  const tail = Array.from({length: back}, (_, place) => extended(at(short, place - back), at(long, place - back), more));
  const between = [], missing = unit * more;
  for (let k = 0; k < missing; k++) {
    const from = head[front - unit + (k % unit)] ?? head[front - 1], to = tail[k % unit] ?? tail[0];
    const share = (Math.floor(k / unit) + 1) / (more + 1);
    between.push({where: from.where, parts: from.parts.map((mine, part) => mine + share * (to.parts[part] - mine))});
  }
  return [...head, ...between, ...tail];
}

// ---- the page
const UNITS = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];
function readable(bytes) {
  if (bytes < 1024) return Math.round(bytes) + " B";
  let power = 1;
  while (power < UNITS.length && bytes >= 999.5 * 1024 ** power) power++;
  const amount = bytes / 1024 ** power, decimals = Math.max(0, 2 - Math.floor(Math.log10(amount)));
  return amount.toFixed(decimals) + " " + UNITS[UNITS.length - power][0];
}
const grouped = (number) => number.toLocaleString("en-US");
const element = (id) => document.getElementById(id);
function put(id, value, text) {
  element(id).textContent = text;
  element(id).dataset.value = value;
}
function putBytes(id, total) {
  put(id, total.bytes, readable(total.bytes));
}
function node(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}
const colours = new Map();  // a term has one colour at all sizes, in the order of first use
const colourOf = (name) => {
  if (!colours.has(name)) colours.set(name, `var(--series${colours.size % 16})`);
  return colours.get(name);
};
function draw(points, memory, beside) {
  for (const one of points) for (const [name] of one.terms) colourOf(name);
  const chart = element("chart"), names = [...colours.keys()].filter((name) => points.some((one) => one.terms.some(([term, bytes]) => term === name && bytes)));
  const width = chart.clientWidth || 800, height = 320, left = 48, bottom = 44, top = 26;
  const heights = points.map((one) => sum(one.terms.map(([, bytes]) => bytes)));
  const peak = Math.max(...heights), limit = memory - beside, most = Math.max(peak, limit < 1.6 * peak ? limit : 0) * 1.06;
  const last = points.length - 1, calls = points.filter((one) => one.isCall).length;
  // positions are no times: experts get a third of the width where they would be hairlines, the optimizer a twelfth
  const ends = [0];
  points.forEach((one, place) => {
    const lasting = place === last ? Math.max(2, points.length / 12) : one.isCall ? Math.max(1, points.length / (2 * calls)) : 1;
    ends.push(ends[place] + lasting);
  });
  const x = (place) => left + ((width - left) * ends[place]) / ends[last + 1];
  const y = (bytes) => height - bottom - ((height - bottom - top) * bytes) / most;
  const line = (x1, y1, x2, y2, colour, dashes) => chart.append(node("line", {x1, y1, x2, y2, stroke: `var(--${colour})`, "stroke-dasharray": dashes ?? ""}));
  const text = (x, y, anchor, words, name) => chart.append(node("text", {x, y, "text-anchor": anchor, class: name ?? ""}, words));
  chart.replaceChildren();
  chart.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const [unit, scale] = UNITS.find(([, bytes]) => most >= bytes) ?? UNITS[3];
  const power = 10 ** Math.floor(Math.log10(most / scale / 5)), step = power * [1, 2, 5, 10].find((one) => power * one * 5 >= most / scale);
  text(2, 12, "start", `live memory, ${unit}`);
  for (let tick = 0; tick * step * scale <= most; tick++) {
    line(left, y(tick * step * scale), width, y(tick * step * scale), "line");
    text(left - 6, y(tick * step * scale) + 4, "end", grouped(Number((tick * step).toPrecision(6))));
  }
  const below = points.map(() => 0);
  for (const name of names) {
    const upper = points.map((one, place) => below[place] + sum(one.terms.filter(([term]) => term === name).map(([, bytes]) => bytes)));
    const edge = (values) => values.flatMap((bytes, place) => [[x(place), y(bytes)], [x(place + 1), y(bytes)]]);
    const path = [...edge(upper), ...edge(below).reverse()];
    const area = node("path", {d: "M" + path.map(([a, b]) => a.toFixed(1) + " " + b.toFixed(1)).join("L") + "Z", fill: colourOf(name)});
    area.append(node("title", {}, name));
    chart.append(area);
    upper.forEach((bytes, place) => { below[place] = bytes; });
  }
  let begin = 0;
  points.forEach((one, place) => {
    if (place === last || points[place + 1].where !== one.where) {
      const end = place + 1, isLast = place === last;
      if (!isLast) line(x(end), top, x(end), height - bottom, "paper");
      text(isLast ? width : (x(begin) + x(end)) / 2, height - 28, isLast ? "end" : "middle", one.where === "optimizer step" ? "optimizer" : one.where);
      begin = end;
    }
  });
  text((left + width) / 2, height - 8, "middle", "operations of the step, in order; widths are not time");
  if (limit > 0 && limit <= most) {
    line(left, y(limit), width, y(limit), "bad", "5 4");
    text(left + 6, y(limit) - 4, "start", "memory for the step, " + readable(limit), "limit");
  }
  element("legend").replaceChildren(...names.map((name) => {
    const item = document.createElement("span"), colour = document.createElement("i");
    colour.style.background = colourOf(name);
    item.append(colour, name);
    return item;
  }));
}
function row(cells) {
  const made = document.createElement("tr");
  cells.forEach((text, place) => {
    const cell = document.createElement("td");
    cell.textContent = text;
    if (place) cell.className = "number";
    made.append(cell);
  });
  return made;
}
function alternatives(data, size, memory, found) {
  const rows = [["memfine_fx, smallest budget", found.least], ["memfine_fx, nothing recomputed", found.most]];
  for (const one of data.alternatives) rows.push([one.what, one.analysis === null ? null : total(one.analysis, one.plan, size), one]);
  element("alternatives").replaceChildren(...rows.map(([what, one, source]) => {
    if (one === null) return row([what, source.remark, "", ""]);
    const remark = source !== undefined && source.remark ? " (" + source.remark + ")" : "";
    return row([what + remark, readable(one.bytes + data.beside), one.where, one.bytes + data.beside <= memory ? "fits" : "does not fit"]);
  }));
}
function show(data) {
  const size = {b: state.batch, s: state.seq}, memory = state.memory;
  const found = answer(data, size, memory);
  const plan = element("plan").value, drawn = plan === "shown" ? found.shown : found[plan];
  const needs = drawn.bytes + data.beside;
  put("verdict", found.fits, (found.fits ? "fits" : "does not fit") + " in " + readable(memory));
  element("verdict").className = found.fits ? "good" : "bad";
  put("drawn", drawn.bytes, `its peak is ${readable(needs)}, in the ${drawn.where}` + (drawn.bytes === found.least.bytes && drawn.plan !== "asked" ? ", under the smallest budget" : ""));
  putBytes("least", found.least);
  putBytes("most", found.most);
  if (found.asked !== null) putBytes("asked", found.asked);
  put("longest", found.longestSeq ?? "", found.longestSeq === null ? "fixed" : grouped(found.longestSeq) + " tokens");
  put("largest", found.largestBatch ?? "", found.largestBatch === null ? "fixed" : grouped(found.largestBatch) + " sequences");
  element("terms").replaceChildren(...[...drawn.terms, ...data.terms].map(([name, bytes]) => row([name, readable(bytes), ((100 * bytes) / needs).toFixed(1) + " %"])));
  draw(timeline(data.analysis, drawn, size), memory, data.beside);
  alternatives(data, size, memory, found);
}
const state = {};
const RANGES = {batch: [1, 256], seq: [2, 1 << 20], memory: null};
let memoryUnit = UNITS[1];
function fromHash() {
  const given = new URLSearchParams(location.hash.slice(1));
  for (const name of Object.keys(RANGES)) if (given.has(name)) set(name, Number(given.get(name)));
}
function set(name, value) {
  const [low, high] = RANGES[name];
  if (!Number.isFinite(value) || value < (name === "memory" ? 1 : low)) return;
  state[name] = Math.round(value);
  element(name + "-range").value = (1000 * Math.log(state[name] / low)) / Math.log(high / low);
  element(name).value = name === "memory" ? Number((state[name] / memoryUnit[1]).toFixed(2)) : state[name];
}
function start(data) {
  use(data);
  RANGES.memory = [data.start.memory / 32, data.start.memory * 32];
  memoryUnit = UNITS.find(([, bytes]) => data.start.memory >= 4 * bytes) ?? UNITS[3];
  element("unit").textContent = memoryUnit[0];
  for (const name of Object.keys(RANGES)) {
    const [low, high] = RANGES[name], range = element(name + "-range"), field = element(name);
    range.addEventListener("input", () => {
      const value = low * Math.pow(high / low, range.value / 1000);
      set(name, name === "seq" && value > 128 ? Math.round(value / 64) * 64 : value);
      show(data);
    });
    field.addEventListener("change", () => { set(name, Number(field.value) * (name === "memory" ? memoryUnit[1] : 1)); show(data); });
    set(name, data.start[name]);
  }
  for (const [name, has] of [["batch", data.analysis.hasBatch], ["seq", data.analysis.hasSeq]]) {
    element(name + "-range").disabled = element(name).disabled = !has;
  }
  if (!data.analysis.isAskedKnown) {
    element("plan").querySelector("[value=asked]").remove();
    element("asked").parentElement.remove();
  }
  element("plan").addEventListener("change", () => show(data));
  addEventListener("hashchange", () => { fromHash(); show(data); });
  addEventListener("resize", () => show(data));
  fromHash();
  show(data);
}
start(JSON.parse(element("data").textContent));
