// Conversations. The server keeps them as sessions, token for token. The browser has copies for what a session does not
// hold (where each answer's context came from), and for when the server has forgotten: it was restarted without a disk.
import { ask, byId } from "./dom.js";

const KEEP_S = 30 * 86400; // unused for so long, the server closes it
const MOST_COPIES = 50;
const STOP_LOOKS = 40, STOP_LOOK_MS = 250; // until a stopped answer has come to rest

// With a key the copies are this tab's, as the key is: who comes after with another one sees none of them.
const copies = () => (byId("key").value ? sessionStorage : localStorage);
const post = async (path, body, signal) => (await ask(path, {
  method: "POST", body: JSON.stringify(body), headers: { "content-type": "application/json" }, signal,
})).json();
const wasForgotten = (error) => error.code === "session_not_found";

// A conversation: {id (null: no session yet), model, title, messages, turns}. `turns` has the number of messages at the
// end of each turn; what comes after the last of them failed, and is not in the session.
export const empty = () => ({ id: null, model: null, title: "", messages: [], turns: [] });
export const start = (talk, turn) => (turn ? talk.turns[turn - 1] : 0);
export const turnOf = (talk, index) => { const turn = talk.turns.findIndex((end) => index < end); return turn < 0 ? talk.turns.length : turn; };
export const kept = (talk) => talk.messages.slice(0, start(talk, talk.turns.length));

export function remembered() {
  try { return JSON.parse(copies().getItem("sessions")) ?? []; } catch { return []; }
}

export function remember(talks) {
  const said = talks.filter((talk) => talk.messages.length).slice(0, MOST_COPIES);
  try { copies().setItem("sessions", JSON.stringify(said)); } catch { /* there is no more room: the server has them */ }
}

export const forgetCopies = () => sessionStorage.removeItem("sessions");

// The server's sessions of a model, and the copies of those that it has forgotten; what is known here keeps its order.
export async function list(model, known) {
  const asked = new Set(known.map(({ id }) => id)); // one that is opened meanwhile is not forgotten
  const cards = (await (await ask(`/v1/sessions?model=${encodeURIComponent(model)}`)).json()).data.filter((card) => card.num_messages);
  const titles = new Map(cards.map(({ id, title }) => [id, title]));
  const fresh = cards.filter((card) => !known.some((talk) => talk.id === card.id)).sort((one, other) => one.idle - other.idle);
  for (const talk of known) {
    if (talk.model === model && asked.has(talk.id) && !titles.has(talk.id)) talk.id = null;
    talk.title ||= titles.get(talk.id) ?? "";
  }
  return [...fresh.map(({ id, title }) => ({ ...empty(), id, model, title })), ...known];
}

// What the server has of it now: another tab, or a program, may have gone on with it.
export async function load(talk) {
  if (!talk.id) return;
  try {
    take(talk, await (await ask(`/v1/sessions/${talk.id}?model=${encodeURIComponent(talk.model)}`)).json());
  } catch (error) {
    if (!wasForgotten(error)) throw error;
    talk.id = null;
  }
}

function take(talk, told) {
  const unfinished = told.turns.length === talk.turns.length ? talk.messages.slice(start(talk, talk.turns.length)) : [];
  const messages = told.messages.map(({ role, content }, index) => {
    const mine = talk.messages[index], [thoughts, text] = role === "assistant" ? apart(content) : ["", content];
    return mine?.role === role && mine.content.trim() === text.trim() ? mine : { role, content: text, thoughts, model: talk.model };
  });
  talk.messages = [...messages, ...unfinished];
  talk.turns = told.turns;
  talk.title ||= told.title;
}

function apart(content) {
  const end = content.lastIndexOf("</think>");
  return end < 0 ? ["", content] : [content.slice(0, end).replace(/^\s*<think>/, ""), content.slice(end + "</think>".length)];
}

// A session of this model that has what the conversation has: with another model, or a server that has forgotten, a new one.
async function ensure(talk, model, signal) {
  if (talk.id && talk.model === model) return;
  const { id } = await post("/v1/sessions", { model, ttl: KEEP_S }, signal);
  for (let turn = 0; turn < talk.turns.length; turn++) {
    await append(id, model, talk.messages.slice(start(talk, turn), talk.turns[turn]), signal);
  }
  talk.id = id;
  talk.model = model;
}

const append = (id, model, messages, signal) =>
  post(`/v1/sessions/${id}/append`, { model, messages: messages.map(({ role, content }) => ({ role, content })) }, signal);

// `turn(session)` in its session, or if the server has forgotten that one, in a new one of the same content.
export async function inSession(talk, model, signal, turn) {
  await ensure(talk, model, signal);
  try {
    await turn(talk.id);
  } catch (error) {
    if (!wasForgotten(error)) throw error;
    talk.id = null;
    await ensure(talk, model, signal);
    await turn(talk.id);
  }
}

// The server takes completed answers only: one that was stopped is added as it stands, once the server has noticed.
export async function keepStopped(talk) {
  for (let look = 0; look < STOP_LOOKS; look++) {
    const told = await (await ask(`/v1/sessions/${talk.id}?model=${encodeURIComponent(talk.model)}`)).json();
    if (told.turns.length > talk.turns.length) return take(talk, told); // it was complete before it could be stopped
    if (!told.is_busy) {
      await append(talk.id, talk.model, talk.messages.slice(start(talk, talk.turns.length)));
      talk.turns.push(talk.messages.length);
      return;
    }
    await new Promise((resolve) => setTimeout(resolve, STOP_LOOK_MS));
  }
  throw new Error("the answer was stopped, and the server has not ended it yet");
}

// A conversation of its own with the turns up to this one.
export async function fork(talk, turn) {
  const copy = { ...structuredClone(talk), title: `↳ ${talk.title.replace(/^↳ /, "")}` };
  copy.messages.length = talk.turns[turn];
  copy.turns.length = turn + 1;
  if (talk.id) {
    copy.id = (await post(`/v1/sessions/${talk.id}/fork`, { model: talk.model })).id;
    if (copy.turns.length < talk.turns.length) await post(`/v1/sessions/${copy.id}/rewind`, { model: talk.model, turns: talk.turns.length - copy.turns.length });
  }
  return copy;
}

// Back to before this turn; returns what was said in it.
export async function rewind(talk, turn) {
  const from = start(talk, turn);
  if (talk.id && turn < talk.turns.length) {
    await post(`/v1/sessions/${talk.id}/rewind`, { model: talk.model, turns: talk.turns.length - turn });
  }
  talk.turns.length = turn;
  return talk.messages.splice(from);
}

export async function close(talk) {
  if (!talk.id) return;
  try {
    await ask(`/v1/sessions/${talk.id}?model=${encodeURIComponent(talk.model)}`, { method: "DELETE" });
  } catch (error) {
    if (!wasForgotten(error)) throw error;
  }
}
