// The Markdown that models mostly write: fences, headings, lists, paragraphs, `code`, **bold** and *italics*.
import { element } from "./dom.js";

const ITEM = /^\s*(?:[-*+]|(\d+)[.)])\s+/;

export function render(text) {
  return text.split(/^```[^\n]*\n?/m).flatMap((part, index) =>
    index % 2 ? [element("pre", { tabindex: 0 }, element("code", {}, part.replace(/\n$/, "")))] : blocks(part));
}

// Lines of one kind that follow each other are one block.
function blocks(text) {
  const made = [];
  let kind = "", held = [];
  const end = () => {
    if (kind === "p") made.push(element("p", {}, ...inline(held.join("\n"))));
    else if (kind) made.push(element(kind, { start: kind === "ol" ? ITEM.exec(held[0])[1] : null }, ...held.map((line) => element("li", {}, ...inline(line.replace(ITEM, ""))))));
    kind = "";
    held = [];
  };
  for (const line of text.split("\n")) {
    const heading = /^#{1,6}\s+(.*)/.exec(line), item = ITEM.exec(line);
    if (heading) { end(); made.push(element("h3", {}, ...inline(heading[1]))); continue; }
    if (!line.trim()) { if (kind === "p") end(); continue; } // a list goes on after an empty line
    const next = item ? (item[1] ? "ol" : "ul") : "p";
    if (next !== kind) end();
    kind = next;
    held.push(line);
  }
  end();
  return made;
}

function inline(text) {
  return text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*|\*[^*\s][^*\n]*\*)/).map((part) => {
    if (part.length > 2 && part.startsWith("`")) return element("code", {}, part.slice(1, -1));
    if (part.length > 4 && part.startsWith("**")) return element("strong", {}, part.slice(2, -2));
    if (part.length > 2 && part.startsWith("*") && part.endsWith("*")) return element("em", {}, part.slice(1, -1));
    return part;
  });
}
