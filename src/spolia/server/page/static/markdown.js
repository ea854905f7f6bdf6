// The Markdown that models mostly write: fences, paragraphs, headings and lists as lines, `code` and **bold**.
import { element } from "./dom.js";

export function render(text) {
  const made = [];
  text.split(/^```[^\n]*\n?/m).forEach((part, index) => {
    if (index % 2) made.push(element("pre", {}, element("code", {}, part.replace(/\n$/, ""))));
    else for (const paragraph of part.split(/\n{2,}/)) if (paragraph.trim()) made.push(element("p", {}, ...inline(paragraph.trim())));
  });
  return made;
}

function inline(text) {
  return text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/).map((part) => {
    if (part.length > 2 && part.startsWith("`")) return element("code", {}, part.slice(1, -1));
    if (part.length > 4 && part.startsWith("**")) return element("strong", {}, part.slice(2, -2));
    return part;
  });
}
