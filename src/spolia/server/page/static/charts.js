// Three small pictures: dots and lines over an axis, and rows of bars. Each says in words what it shows.
import { element, percent, styled, svg } from "./dom.js";

const HEIGHT = 110, LEFT = 38, ABOVE = 8;

export const dots = (holder, points, axes) => draw(holder, points, axes, true, false);
export const lines = (holder, points, axes) => draw(holder, points, axes, axes.hasDots ?? false, true);

// Axes: from, to (of x), top (of y; it begins at 0), mark (a number of y as text), words, note (at the right end) or ticks [[x, text]].
function draw(holder, points, { from, to, top, mark, words, note, ticks }, hasDots, hasLine) {
  const width = Math.max(240, holder.clientWidth), right = width - 8;
  const across = (x) => LEFT + ((right - LEFT) * (x - from)) / (to - from || 1);
  const down = (y) => ABOVE + (HEIGHT - ABOVE) * (1 - Math.min(1, y / top));
  const picture = svg("svg", { width, height: HEIGHT + 18, role: "img", "aria-label": words });
  const text = (x, y, said, anchor) => {
    const made = svg("text", { x, y, class: "axis", "text-anchor": anchor });
    made.textContent = said;
    picture.append(made);
  };
  for (const share of [0, 0.5, 1]) {
    const y = down(share * top);
    picture.append(svg("line", { x1: LEFT, x2: right, y1: y, y2: y, stroke: "var(--line)" }));
    if (share !== 0.5 || top > 1 || mark === percent) text(LEFT - 6, y + 4, mark(share * top).replace(".0", ""), "end");
  }
  const seen = points.filter(([x]) => x >= from && x <= to);
  if (hasLine && seen.length > 1) {
    picture.append(svg("polyline", { points: seen.map(([x, y]) => `${across(x)},${down(y)}`).join(" "), fill: "none", stroke: "var(--cached)", "stroke-width": 2 }));
  }
  if (hasDots) for (const [x, y] of seen) picture.append(svg("circle", { cx: across(x), cy: down(y), r: 4, fill: "var(--cached)" }));
  if (note) text(right, HEIGHT + 15, note, "end");
  for (const [x, said] of ticks ?? []) text(across(x), HEIGHT + 15, said, x === to ? "end" : x === from ? "start" : "middle");
  holder.replaceChildren(picture);
}

// Entries: words, share (of the bar, 0 to 1), kind (its class), figures (texts).
export function rows(holder, caption, entries) {
  if (!entries.length) { holder.replaceChildren(element("p", { class: "hint" }, "No prompt yet.")); return; }
  holder.replaceChildren(element("table", {}, element("caption", { class: "hidden-visually" }, caption),
    element("tbody", {}, ...entries.map(({ words, share, kind, figures }) => element("tr", {},
      element("th", { scope: "row" }, words),
      element("td", { class: "grow" }, element("div", { class: "bar" }, styled(element("span", { class: kind }), { width: `${100 * share}%` }))),
      ...figures.map((figure) => element("td", { class: "figure" }, figure)))))));
}
