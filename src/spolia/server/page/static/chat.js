// The chat: conversations, which are sessions of the server, and where each answer's context came from.
import { ask, byId, element, percent, styled, whole } from "./dom.js";
import { render } from "./markdown.js";
import * as sessions from "./sessions.js";

let talks = []; // the last first
let current = sessions.empty();
let stop = null; // aborts the answer that is coming
let wanted = /^#\/chat\/(.+)/.exec(location.hash)?.[1] ?? ""; // until it was looked for

const SOURCES = {
  shared: ["k-shared", "shared with a running request"],
  device: ["k-device", "from the cache"],
  computed: ["k-computed", "computed"],
};

export function startChat() {
  byId("new").addEventListener("click", begin);
  byId("ask").addEventListener("submit", (event) => { event.preventDefault(); if (stop) stop(); else send(); });
  byId("question").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); if (!stop) send(); }
  });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape" && stop) stop(); });
  byId("key").addEventListener("change", () => { sessions.forgetCopies(); talks = []; begin(); });
  document.addEventListener("visibilitychange", () => { if (!document.hidden && !stop) tried(async () => { await refresh(); await show(current); }); });
  talks = sessions.remembered();
  draw();
}

const model = () => byId("model").value;
const listed = () => talks.filter((talk) => talk.model === model());

// A model was chosen, or is there now: which conversations it has. The first time, the last one is opened.
export function modelIsReady() {
  return tried(async () => {
    await refresh();
    const id = wanted;
    wanted = null;
    if (id !== null && !current.messages.length) await show(talks.find((talk) => id && talk.id === id) ?? listed()[0] ?? current);
  });
}

async function refresh() {
  if (model()) talks = await sessions.list(model(), talks);
  save();
}

// Errors of what was clicked are told in one place.
async function tried(act) {
  const trouble = byId("chat-trouble");
  try {
    trouble.hidden = true;
    await act();
  } catch (error) {
    trouble.hidden = false;
    trouble.textContent = error.message;
  }
}

// The list of conversations, here and in the browser's copies.
export function save() {
  sessions.remember(talks);
  byId("conversations").replaceChildren(...listed().map((talk) => element("li", {},
    element("button", { type: "button", class: "open", title: title(talk), "aria-current": talk === current && "true", onclick: () => open(talk) }, title(talk)),
    element("button", { type: "button", "aria-label": `Delete ${title(talk)}`, onclick: () => remove(talk) }, "×"))));
}

const title = (talk) => talk.title || "Untitled";

function begin() {
  stop?.();
  current = sessions.empty();
  draw();
  byId("question").focus();
}

function open(talk) {
  stop?.();
  return tried(() => show(talk));
}

async function show(talk) {
  if (current !== talk) { current = talk; draw(); }
  const before = JSON.stringify(talk);
  await sessions.load(talk);
  if (current === talk && JSON.stringify(talk) !== before) draw();
}

function remove(talk) {
  if (!confirm(`Delete “${title(talk)}”? The server forgets it, too.`)) return;
  if (talk === current) stop?.();
  tried(async () => {
    await sessions.close(talk);
    talks = talks.filter((other) => other !== talk);
    if (talk === current) current = sessions.empty();
    draw();
    byId("new").focus();
  });
}

function fork(turn) {
  stop?.();
  tried(async () => {
    current = await sessions.fork(current, turn);
    talks.unshift(current);
    draw();
    byId("question").focus();
  });
}

// Back to before a message of one's own, which can be written anew.
function rewind(turn) {
  stop?.();
  tried(async () => {
    const dropped = await sessions.rewind(current, turn);
    byId("question").value = dropped.find(({ role }) => role === "user")?.content ?? "";
    if (!current.messages.length) byId("system").value = dropped.find(({ role }) => role === "system")?.content ?? "";
    draw();
    byId("question").focus();
  });
}

function again() {
  const dropped = current.messages.splice(sessions.kept(current).length);
  send(dropped.find(({ role }) => role === "user").content);
}

function draw() {
  const list = byId("messages");
  list.replaceChildren(...current.messages.map(shown));
  list.scrollTop = list.scrollHeight;
  if (!byId("chat").hidden) history.replaceState(null, "", current.id ? `#/chat/${current.id}` : "#/chat");
  save();
}

const NAMES = { user: "You", system: "System message", tool: "Tool" };

function shown(message, index) {
  const turn = sessions.turnOf(current, index), isKept = turn < current.turns.length;
  const first = current.messages.findIndex(({ role }, at) => at >= sessions.start(current, turn) && role === "user");
  const isLast = index + 1 === (isKept ? current.turns[turn] : current.messages.length);
  const tools = [];
  if (index === first) tools.push(element("button", { type: "button", onclick: () => rewind(turn) }, "Rewind to here"));
  if (message.role === "assistant" && isLast && isKept) tools.push(element("button", { type: "button", onclick: () => fork(turn) }, "Fork here"));
  if (message.role === "assistant" && isLast && !isKept && !stop) tools.push(element("button", { type: "button", onclick: again }, "Try again"));
  const item = element("li", { class: message.role },
    element("div", { class: "who" }, NAMES[message.role] ?? message.model ?? "Model", ...tools),
    element("div", { class: "text" }));
  fill(item, message);
  return item;
}

function fill(item, message) {
  const text = item.querySelector(".text");
  if (message.role !== "assistant") text.textContent = message.content;
  else text.replaceChildren(...thoughts(text, message), ...render(message.content));
  if (message.wrong) text.append(element("p", { class: "wrong" }, message.wrong));
  item.querySelector(".origin")?.remove();
  if (message.origin) item.append(origin(message.origin));
}

function thoughts(text, message) {
  if (!message.thoughts?.trim()) return [];
  const isOpen = text.querySelector("details")?.open ?? false;
  return [element("details", { open: isOpen }, element("summary", {}, message.content ? "Thoughts" : "Thinking…"), element("p", {}, message.thoughts.trim()))];
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

async function send(content = byId("question").value.trim()) {
  if (!content || stop) return;
  const talk = current; // answers go where they were asked, whatever is opened meanwhile
  const chosen = model(), system = byId("system").value.trim();
  talk.messages = sessions.kept(talk); // without what failed
  const start = talk.messages.length;
  if (!start && system) talk.messages.push({ role: "system", content: system });
  talk.messages.push({ role: "user", content });
  const fresh = talk.messages.slice(start).map(({ role, content }) => ({ role, content }));
  const answer = { role: "assistant", content: "", thoughts: "", model: chosen };
  talk.messages.push(answer);
  talk.title ||= content.replace(/\s+/g, " ").slice(0, 60);
  talk.model ??= chosen;
  talks = [talk, ...talks.filter((other) => other !== talk)];
  const gone = new AbortController();
  stop = () => gone.abort();
  byId("question").value = "";
  byId("send").textContent = "Stop";
  byId("chat-trouble").hidden = true;
  draw();
  const item = byId("messages").lastElementChild;
  try {
    await sessions.inSession(talk, chosen, gone.signal, (session) => stream({ ...parameters(chosen), session, messages: fresh }, gone.signal, (event) => {
      answer.content += event.choices?.[0]?.delta?.content ?? "";
      answer.thoughts += event.choices?.[0]?.delta?.reasoning_content ?? "";
      const choice = event.spolia?.choices?.[0];
      if (choice) answer.origin = { ...choice, first_token_s: choice.timings?.first_token_s };
      fill(item, answer);
      const list = byId("messages");
      if (list.scrollHeight - list.scrollTop - list.clientHeight < 120) list.scrollTop = list.scrollHeight;
    }));
    talk.turns.push(talk.messages.length);
    byId("said").textContent = answer.content; // once it is whole: not word by word
  } catch (error) {
    await unfinished(talk, answer, error, content);
  } finally {
    stop = null;
    byId("send").textContent = "Send";
    if (talk === current) draw(); else save();
  }
}

// A stopped answer stays, and is part of the conversation; one that had not begun was never asked for.
async function unfinished(talk, answer, error, question) {
  try {
    if (error.name !== "AbortError") throw error;
    if (answer.content) return await sessions.keepStopped(talk);
    talk.messages = sessions.kept(talk);
    if (!talk.messages.length) talks = talks.filter((other) => other !== talk);
    if (talk === current && !byId("question").value) byId("question").value = question;
  } catch (trouble) {
    const words = trouble instanceof TypeError ? "the connection broke off; is the server running?" : trouble.message;
    answer.wrong = byId("said").textContent = words;
  }
}

function parameters(chosen) {
  const seed = byId("seed").value;
  return {
    model: chosen,
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
