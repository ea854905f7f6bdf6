// Conversations, kept in this browser; each answer tells where its context came from.
import { ask, byId, element, percent, styled, whole } from "./dom.js";
import { render } from "./markdown.js";

let conversations = [];
let current = null;
let stop = null; // aborts the answer that is coming

const SOURCES = {
  shared: ["k-shared", "shared with a running request"],
  device: ["k-device", "from the cache"],
  computed: ["k-computed", "computed"],
};

export function startChat() {
  try { conversations = JSON.parse(localStorage.getItem("conversations")) ?? []; } catch { conversations = []; }
  byId("new").addEventListener("click", () => { begin(); byId("question").focus(); });
  byId("ask").addEventListener("submit", (event) => { event.preventDefault(); if (stop) stop(); else send(); });
  byId("question").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); if (!stop) send(); }
  });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape" && stop) stop(); });
  if (conversations.length) open(conversations[0]); else begin();
}

function save() {
  localStorage.setItem("conversations", JSON.stringify(conversations.slice(0, 50)));
  byId("conversations").replaceChildren(...conversations.map((each) => element("li", {},
    element("button", { type: "button", class: "open", "aria-current": String(each === current), onclick: () => open(each) }, title(each)),
    element("button", { type: "button", "aria-label": `Delete ${title(each)}`, onclick: () => remove(each) }, "×"))));
}

const title = (each) => each.title ?? each.messages[0]?.content.slice(0, 40) ?? "Empty";

function begin() {
  current = { messages: [] };
  conversations.unshift(current);
  conversations = conversations.filter((each) => each === current || each.messages.length);
  open(current);
}

function open(each) {
  if (stop) stop();
  current = each;
  save();
  draw();
}

function remove(each) {
  conversations = conversations.filter((other) => other !== each);
  if (each === current) { if (conversations.length) open(conversations[0]); else begin(); } else save();
}

// A conversation of its own with the messages up to this one: its beginning is in the cache already.
function fork(index) {
  const copy = { title: `⑂ ${title(current)}`.slice(0, 44), messages: structuredClone(current.messages.slice(0, index + 1)) };
  conversations.unshift(copy);
  open(copy);
}

// Back to before a message of one's own, which can be written anew.
function rewind(index) {
  const [dropped] = current.messages.splice(index);
  byId("question").value = dropped.content;
  save();
  draw();
  byId("question").focus();
}

function draw() {
  const list = byId("messages");
  list.replaceChildren(...current.messages.map(shown));
  list.scrollTop = list.scrollHeight;
}

function shown(message, index) {
  const tools = message.role === "user"
    ? [element("button", { type: "button", onclick: () => rewind(index) }, "Rewind to here")]
    : [element("button", { type: "button", onclick: () => fork(index) }, "Fork here")];
  const item = element("li", { class: message.role },
    element("div", { class: "who" }, message.role === "user" ? "You" : message.model ?? "Model", ...tools),
    element("div", { class: "text" }));
  fill(item, message);
  return item;
}

function fill(item, message) {
  const text = item.querySelector(".text");
  if (message.role === "user") text.textContent = message.content;
  else text.replaceChildren(...render(message.content));
  if (message.wrong) text.append(element("p", { class: "wrong" }, message.wrong));
  item.querySelector(".origin")?.remove();
  if (message.origin) item.append(origin(message.origin));
}

// "Where did this context come from": every prompt token by its source.
function origin({ ranges, num_prompt_tokens, num_cached_tokens, reason, text_after, first_token_s }) {
  const bar = element("div", { class: "bar", role: "img", "aria-label": `${num_cached_tokens} of ${num_prompt_tokens} prompt tokens were reused` });
  const bySource = new Map();
  for (const range of ranges ?? []) {
    const [kind, words] = SOURCES[range.source] ?? ["k-tier", `brought up from ${range.source}`];
    const count = range.stop - range.start;
    const why = range.reason ? `: ${reasons(range.reason)}` : "";
    const about = bySource.get(kind + words) ?? { kind, words, count: 0 };
    about.count += count;
    bySource.set(kind + words, about);
    bar.append(styled(element("span", { class: kind, title: `${whole(count)} tokens ${words}${why}` }), { flexGrow: count }));
  }
  const after = (text_after ?? "").replace(/<\|[^|]*\|?>?/g, " ").replace(/\s+/g, " ").trim().slice(0, 30); // without the template's marks
  const told = [`${whole(num_cached_tokens)} of ${whole(num_prompt_tokens)} prompt tokens reused (${percent(num_cached_tokens / num_prompt_tokens)})`];
  if (reason && reason !== "full") told.push(`then: ${reasons(reason)}${after ? ` at “${after}”` : ""}`);
  if (first_token_s) told.push(`first token after ${Math.round(1000 * first_token_s)} ms`);
  const legend = [...bySource.values()].map(({ kind, words, count }) =>
    element("span", {}, element("i", { class: kind }), `${whole(count)} ${words}`));
  return element("div", { class: "origin" }, bar, told.join(" · "), element("div", { class: "legend" }, ...legend));
}

const reasons = (reason) => reason.replaceAll("_", " ");

async function send() {
  const question = byId("question");
  const content = question.value.trim();
  if (!content) return;
  question.value = "";
  const talk = current; // answers go where they were asked, whatever is opened meanwhile
  talk.messages.push({ role: "user", content });
  const answer = { role: "assistant", content: "", model: byId("model").value };
  const before = talk.messages.slice();
  talk.messages.push(answer);
  save();
  draw();
  const item = byId("messages").lastElementChild;
  const gone = new AbortController();
  stop = () => gone.abort();
  byId("send").textContent = "Stop";
  try {
    await stream(body(before), gone.signal, (event) => {
      answer.content += event.choices?.[0]?.delta?.content ?? "";
      const choice = event.spolia?.choices?.[0];
      if (choice) answer.origin = { ...choice, first_token_s: choice.timings?.first_token_s };
      fill(item, answer);
      const list = byId("messages");
      if (list.scrollHeight - list.scrollTop - list.clientHeight < 120) list.scrollTop = list.scrollHeight;
    });
    byId("said").textContent = answer.content; // once it is whole: not word by word
  } catch (error) {
    if (error.name !== "AbortError") answer.wrong = byId("said").textContent = error.message;
    fill(item, answer);
  } finally {
    stop = null;
    byId("send").textContent = "Send";
    save();
  }
}

function body(messages) {
  const system = byId("system").value.trim();
  const seed = byId("seed").value;
  const sent = messages.map(({ role, content }) => ({ role, content }));
  return {
    model: byId("model").value,
    messages: system ? [{ role: "system", content: system }, ...sent] : sent,
    temperature: Number(byId("temperature").value),
    max_tokens: Number(byId("max-tokens").value),
    ...(seed === "" ? {} : { seed: Number(seed) }),
    stream: true,
    explain: true,
  };
}

async function stream(asked, signal, take) {
  const response = await ask("/v1/chat/completions", {
    method: "POST", body: JSON.stringify(asked), headers: { "content-type": "application/json" }, signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const events = held.split("\n\n");
    held = events.pop();
    for (const event of events) {
      const data = event.split("\n").find((line) => line.startsWith("data: "))?.slice(6);
      if (!data || data === "[DONE]") continue;
      const told = JSON.parse(data);
      if (told.error) throw new Error(told.error.message);
      take(told);
    }
  }
}
