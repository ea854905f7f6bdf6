// The cache while it works: figures, blocks, tree, rates, requests. Redrawn each second from /v1/cache/live.
import { ask, byId, colour, element, percent, styled, svg, whole } from "./dom.js";
import { dots, lines, rows } from "./charts.js";

const CURVE_INTERVAL_S = 5; // it is the work of ghosts beside the cache, and moves slowly
let timer = null;
let curveAt = -CURVE_INTERVAL_S;
let history = []; // [{at, model, generated, evicted}] of the last two minutes

export function startCache() {
  if (timer === null) { timer = setInterval(refresh, 1000); refresh(); }
}

export function stopCache() {
  clearInterval(timer);
  timer = null;
}

async function refresh() {
  if (document.hidden) return;
  const trouble = byId("cache-trouble");
  try {
    const model = byId("model").value;
    const live = await (await ask(`/v1/cache/live${model ? `?model=${encodeURIComponent(model)}` : ""}`)).json();
    trouble.hidden = true;
    note(live);
    drawFigures(live);
    drawBlocks(live);
    drawTree(live.tree);
    drawRate(live.recent);
    drawSources(live.tokens);
    drawMisses(live.tokens);
    drawEvictions();
    drawTiers(live.tiers);
    drawTimeline(live);
    await refreshCurve(live.model);
  } catch (error) {
    trouble.hidden = false;
    trouble.textContent = error.message;
  }
}

function note(live) {
  const at = Date.now() / 1000;
  if (history.length && history[0].model !== live.model) history = [];
  history.push({ at, model: live.model, generated: live.tokens.generated, evicted: live.evicted_blocks });
  history = history.filter((sample) => at - sample.at < 120);
}

function drawFigures(live) {
  const [first, last] = [history[0], history.at(-1)];
  const seconds = last.at - first.at;
  const figures = {
    "Tokens reused": percent(live.tokens.reused / live.tokens.asked),
    "Prompt tokens": whole(live.tokens.asked),
    "Generated a second": seconds > 0 ? whole((last.generated - first.generated) / seconds) : "–",
    Running: live.running,
    Waiting: live.waiting,
    "Blocks evicted": whole(live.evicted_blocks),
  };
  byId("figures").replaceChildren(...Object.entries(figures).map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, String(value)))));
}

function legend(id, entries) {
  byId(id).replaceChildren(...entries.map(([name, words]) =>
    element("span", {}, styled(element("i"), { background: `var(${name})` }), words)));
}

// One map a pool, from its block ids, and one a tier, by how full it is: its blocks have no places.
function drawBlocks({ groups, tiers }) {
  const sum = (state) => groups.reduce((total, group) => total + group[state], 0);
  legend("block-legend", [["--leased", `in use: ${whole(sum("leased"))}`], ["--cached", `cached: ${whole(sum("cached"))}`], ["--free", `free: ${whole(sum("free"))}`], ...(tiers.length ? [["--lifted", "in a tier"]] : [])]);
  const holder = byId("blocks");
  const maps = groups.map((group, index) => ({
    title: `Pool ${index}: ${whole(group.total)} blocks`, cells: group.cells, kind: "--cached",
    words: `Pool ${index}: ${group.leased} blocks in use, ${group.cached} cached, ${group.free} free, of ${group.total}`,
  }));
  for (const tier of tiers) {
    const size = tier.capacity_bytes, held = tier.num_bytes ?? 0;
    const words = `${tier.name}: ${bytes(tier.num_bytes)}${size ? ` of ${bytes(size)}` : ""}${tier.state === "up" ? "" : `, ${tier.state}`}`;
    maps.push({ title: words, words, cells: size ? filled(held / size, Math.max(8, Math.floor(holder.clientWidth / 15))) : [], kind: "--lifted" });
  }
  while (holder.children.length > maps.length) holder.lastChild.remove();
  maps.forEach(({ title, words, cells, kind }, index) => {
    const map = holder.children[index] ?? holder.appendChild(element("div", {}, element("span", { class: "map" }), element("canvas", { role: "img" })));
    map.firstChild.textContent = title;
    map.lastChild.setAttribute("aria-label", words);
    map.lastChild.hidden = !cells.length; // no limit, nothing to be full of
    if (cells.length) drawCells(map.lastChild, cells, kind);
  });
}

// Cells as the server makes them of a pool: [cached, in use, total].
const filled = (share, length) => Array.from({ length }, (_, index) => [Math.min(1, Math.max(0, share * length - index)), 0, 1]);

function drawCells(canvas, cells, kind) {
  const ratio = devicePixelRatio, width = canvas.clientWidth, size = cells.length > 400 ? 9 : 13;
  const columns = Math.max(1, Math.floor(width / (size + 2)));
  const height = Math.ceil(cells.length / columns) * (size + 2) + 6;
  styled(canvas, { height: `${height}px` });
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  const [free, cached, leased] = ["--free", kind, "--leased"].map(colour);
  cells.forEach(([numCached, numLeased, total], index) => {
    const x = (index % columns) * (size + 2), y = Math.floor(index / columns) * (size + 2);
    let from = y + size;
    for (const [count, fill] of [[numLeased, leased], [numCached, cached], [total - numLeased - numCached, free]]) {
      const tall = (size * count) / total;
      pen.fillStyle = fill;
      pen.fillRect(x, from - tall, size, tall);
      from -= tall;
    }
  });
}

// An icicle on its side: x is the token position, a node is as tall as its leaves.
function drawTree({ nodes, num_nodes: numNodes }) {
  byId("tree-note").textContent = numNodes > nodes.length ? `the longest ${nodes.length} of ${whole(numNodes)} runs` : `${whole(numNodes)} runs`;
  const holder = byId("tree");
  const children = nodes.map(() => []), roots = [];
  nodes.forEach((node, index) => (node.parent < 0 ? roots : children[node.parent]).push(index));
  const end = Math.max(1, ...nodes.map((node) => node.start + node.num_tokens));
  const width = Math.max(240, holder.clientWidth), row = 17, scale = width / end;
  const bars = [];
  let rows = 0, namespace = null;
  const place = (index) => {
    const top = rows;
    children[index].forEach(place);
    if (rows === top) rows += 1;
    bars.push([index, top, rows - top]);
  };
  roots.sort((one, other) => nodes[one].namespace - nodes[other].namespace);
  for (const root of roots) {
    if (namespace !== null && nodes[root].namespace !== namespace) rows += 0.6; // a gap between those who share nothing
    namespace = nodes[root].namespace;
    place(root);
  }
  const most = Math.max(1, ...nodes.map((node) => node.num_hits));
  const picture = svg("svg", { width, height: rows * row + 18, role: "list" });
  for (const [index, top, tall] of bars) {
    const node = nodes[index], x = node.start * scale, wide = Math.max(1.5, node.num_tokens * scale - 1);
    const words = `tokens ${node.start} to ${node.start + node.num_tokens}, found ${node.num_hits} times${node.num_leases ? ", in use" : ""}${node.pinned ? ", pinned" : ""}: ${node.text}`;
    const strength = 0.3 + 0.7 * Math.log1p(node.num_hits) / Math.log1p(most);
    const bar = svg("rect", { x, y: top * row, width: wide, height: tall * row - 2, rx: 2, fill: "var(--cached)", "fill-opacity": strength });
    const group = svg("g", { role: "listitem", class: strength > 0.58 ? "strong" : "", "aria-label": words }, svg("title"), bar);
    group.querySelector("title").textContent = words;
    if (node.num_leases) group.append(svg("rect", { x, y: (top + tall) * row - 5, width: wide, height: 3, fill: "var(--leased)" }));
    if (wide > 34) {
      const label = svg("text", { x: x + 4, y: top * row + 11 });
      const hits = wide > 90 && node.num_hits ? ` · ${node.num_hits}×` : "";
      label.textContent = node.text.replace(/\s+/g, " ").slice(0, Math.floor((wide - 6) / 6.2) - hits.length) + hits;
      group.append(label);
    }
    picture.append(group);
  }
  for (const position of [0, Math.round(end / 2), end]) {
    const mark = svg("text", { x: Math.min(position * scale, width), y: rows * row + 13, class: "axis", "text-anchor": position === 0 ? "start" : position === end ? "end" : "middle" });
    mark.textContent = `${whole(position)}${position === end ? " tokens" : ""}`;
    picture.append(mark);
  }
  holder.replaceChildren(nodes.length ? picture : element("p", { class: "hint" }, "Nothing is cached yet: ask something."));
}

const ago = (sample) => sample.at - history.at(-1).at; // seconds, below 0

function drawRate(recent) {
  const points = recent.map((each) => [each.ended - Date.now() / 1000, each.num_cached_tokens / each.num_prompt_tokens]).filter(([at]) => at > -120);
  const words = points.length ? `Hit rate of the last prompt ${percent(points.at(-1)[1])}` : "No prompts in the last two minutes";
  dots(byId("rate"), points, { from: -120, to: 0, top: 1, mark: percent, words, note: points.length ? "now" : "no prompts lately" });
}

function drawEvictions() {
  const points = [];
  for (let index = 1; index < history.length; index += 1) {
    const seconds = history[index].at - history[index - 1].at;
    points.push([ago(history[index]), (history[index].evicted - history[index - 1].evicted) / seconds]);
  }
  const now = points.length ? points.at(-1)[1] : 0, top = Math.max(1, ...points.map(([, count]) => count));
  lines(byId("evictions"), points, { from: -120, to: 0, top, mark: whole, words: `${whole(now)} blocks are evicted a second now`, note: "now" });
}

const FRACTIONS = { 0.25: "¼", 0.5: "½" };
const SOURCES = { shared: ["k-shared", "in use by another"], device: ["k-device", "cached"], computed: ["k-computed", "computed"] };

function drawSources({ by_source: bySource }) {
  const total = Object.values(bySource).reduce((sum, count) => sum + count, 0);
  const entries = Object.entries(bySource).sort((one, other) => other[1] - one[1]);
  rows(byId("sources"), "Prompt tokens by where their KV came from", entries.map(([source, count]) => {
    const [kind, words] = SOURCES[source] ?? ["k-tier", `from ${source}`];
    return { words, share: count / total, kind, figures: [whole(count), count && count < total / 1000 ? "<0.1%" : percent(count / total)] };
  }));
}

function drawMisses({ missed }) {
  const entries = Object.entries(missed).sort((one, other) => other[1] - one[1]);
  const most = Math.max(1, ...entries.map(([, count]) => count));
  rows(byId("misses"), "Prompt tokens that were computed, by reason", entries.map(([reason, count]) => (
    { words: reason === "full" ? "last token, always" : reason.replaceAll("_", " "), share: count / most, kind: "k-computed", figures: [whole(count)] })));
}

function drawTiers(tiers) {
  if (!tiers.length) { byId("tiers").replaceChildren(element("p", { class: "hint" }, "None: KV is in memory only. --kv-disk, --kv-host and --kv-remote add some.")); return; }
  rows(byId("tiers"), "Tiers: how full they are, and how many blocks were found there", tiers.map((tier) => ({
    words: [tier.name, ...(tier.state === "up" ? [] : [tier.state]), ...(tier.reason ? [tier.reason] : [])].join(", "),
    share: tier.capacity_bytes ? (tier.num_bytes ?? 0) / tier.capacity_bytes : 0,
    kind: "k-tier",
    figures: [bytes(tier.num_bytes), `${whole(tier.num_hits)} of ${whole(tier.num_hits + tier.num_misses)} found`],
  })));
}

async function refreshCurve(model) {
  const now = Date.now() / 1000;
  if (now - curveAt < CURVE_INTERVAL_S) return;
  curveAt = now;
  const { points, advice } = await (await ask(`/v1/cache/curve?model=${encodeURIComponent(model)}`)).json();
  const places = points.map((point) => [Math.log2(point.factor), point.hit_rate]);
  lines(byId("curve"), places, {
    from: Math.min(-2, ...places.map(([at]) => at)), to: Math.max(3, ...places.map(([at]) => at)), top: 1, mark: percent, hasDots: true,
    words: points.length ? points.map((point) => `${percent(point.hit_rate)} at ${point.factor} times the size`).join(", ") : "No requests yet",
    ticks: points.map((point) => [Math.log2(point.factor), point.factor === 1 ? "now" : `${FRACTIONS[point.factor] ?? point.factor}×`]),
  });
  byId("curve-advice").textContent = advice[0].toUpperCase() + advice.slice(1) + ".";
}

function bytes(count) {
  if (count === null) return "–";
  const power = count < 1024 ? 0 : Math.min(4, Math.floor(Math.log2(count) / 10));
  return `${(count / 1024 ** power).toFixed(power ? 1 : 0)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

function drawTimeline({ recent, lanes }) {
  legend("timeline-legend", [["--lifted", "restored from a tier"], ["--queued", "queued"], ["--cached", "prompt"], ["--leased", "answer"]]);
  const now = Date.now() / 1000, holder = byId("timeline"), width = Math.max(240, holder.clientWidth);
  const shown = recent.filter((each) => now - each.ended < 60).slice(-16).reverse();
  // As long as what is shown, so that its parts can be told apart.
  const span = Math.min(60, Math.max(2, ...shown.map((each) => now - each.ended + each.total_s)));
  byId("timeline-note").textContent = shown.length + lanes.length ? `the last ${span < 10 ? span.toFixed(1) : whole(span)} seconds` : "";
  const left = width < 500 ? 96 : 190, row = 18, at = (time) => left + (width - left) * Math.max(0, 1 - (now - time) / span);
  const picture = svg("svg", { width, height: Math.max(1, shown.length + lanes.length) * row + 16, role: "list" });
  let y = 0;
  const label = (text) => { const made = svg("text", { x: 0, y: y + 12 }); made.textContent = text; return made; };
  for (const lane of lanes) {
    const words = `lane ${lane.lane}: ${lane.num_prompt_tokens} in, ${lane.num_generated_tokens} out so far`;
    picture.append(svg("g", { role: "listitem", "aria-label": words }, label(width < 500 ? `lane ${lane.lane}` : words),
      svg("rect", { x: width - 14, y: y + 2, width: 14, height: row - 5, rx: 2, fill: "var(--leased)" })));
    y += row;
  }
  for (const each of shown) {
    const began = each.ended - each.total_s, restored = began + (each.restore_s ?? 0);
    const started = began + (each.queue_s ?? each.total_s), spoke = began + (each.first_token_s ?? each.total_s);
    const words = `${each.num_prompt_tokens} in, ${each.num_cached_tokens} reused, ${each.num_output_tokens} out, ${each.finish}, ${Math.round(1000 * each.total_s)} ms`;
    const group = svg("g", { role: "listitem", "aria-label": words }, svg("title"), label(width < 500 ? `${each.num_prompt_tokens} → ${each.num_output_tokens}` : `${each.num_prompt_tokens} in, ${each.num_cached_tokens} reused, ${each.num_output_tokens} out`));
    group.querySelector("title").textContent = words;
    for (const [from, to, fill] of [[began, restored, "--lifted"], [restored, started, "--queued"], [started, spoke, "--cached"], [spoke, each.ended, "--leased"]]) {
      if (to > from) group.append(svg("rect", { x: at(from), y: y + 2, width: Math.max(0.8, at(to) - at(from)), height: row - 5, fill: `var(${fill})` }));
    }
    picture.append(group);
    y += row;
  }
  const axis = svg("text", { x: width, y: y + 13, class: "axis", "text-anchor": "end" });
  axis.textContent = shown.length + lanes.length ? "now" : "no requests in the last minute";
  picture.append(axis);
  holder.replaceChildren(picture);
}
