import { ask, byId, element } from "./dom.js";
import { modelIsReady, save, startChat } from "./chat.js";
import { startCache, stopCache } from "./cache.js";

const LOADING_MS = 1000, CALM_MS = 15000; // between two looks at the models
let looking = null;

function show(view) {
  for (const name of ["chat", "cache"]) {
    byId(name).hidden = name !== view;
    byId(`show-${name}`).setAttribute("aria-pressed", String(name === view));
  }
  if (!location.hash.startsWith(`#/${view}`)) history.replaceState(null, "", `#/${view}`); // no id of an element: the browser would move the keyboard there
  if (view === "cache") startCache(); else stopCache();
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  localStorage.setItem("theme", theme);
}

const WORDS = { ready: "ready", loading: "loading…", unloaded: "not in memory: a message loads it", failed: "failed" };

// Which models there are, and how the chosen one does; its conversations are listed when it is there.
async function look() {
  clearTimeout(looking);
  const health = byId("health"), choice = byId("model");
  let wait = CALM_MS;
  try {
    const models = (await (await ask("/v1/models")).json()).data;
    const wanted = choice.value || localStorage.getItem("model");
    choice.replaceChildren(...models.map(({ id }) => element("option", { value: id }, id)));
    choice.value = models.some(({ id }) => id === wanted) ? wanted : models[0]?.id;
    const chosen = models.find(({ id }) => id === choice.value);
    const words = chosen ? chosen.status === "failed" ? chosen.reason : WORDS[chosen.status] : "no model is here: spolia pull NAME";
    if (chosen?.status === "loading") wait = LOADING_MS;
    if (chosen?.status === "ready" && health.textContent !== words) await modelIsReady(); else save();
    health.textContent = words;
  } catch (error) {
    health.textContent = error.message;
    if (error.code === "invalid_api_key") byId("settings").open = true;
    if (!error.code) wait = LOADING_MS; // nobody is there: it may be about to come back
  }
  looking = setTimeout(look, wait);
}

async function choose() {
  localStorage.setItem("model", byId("model").value);
  byId("health").textContent = "";
  await look();
}

function setKey() {
  const key = byId("key").value;
  if (key) sessionStorage.setItem("key", key); else sessionStorage.removeItem("key");
  byId("health").textContent = "";
  look();
}

setTheme(localStorage.getItem("theme") ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
byId("key").value = sessionStorage.getItem("key") ?? "";
byId("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
byId("show-chat").addEventListener("click", () => show("chat"));
byId("show-cache").addEventListener("click", () => show("cache"));
// The keyboard moves, the address does not: it says which view is open.
byId("skip").addEventListener("click", (event) => { event.preventDefault(); byId(byId("question").offsetParent ? "question" : "cache").focus(); });
byId("model").addEventListener("change", choose);
byId("key").addEventListener("change", setKey);
show(location.hash === "#/cache" ? "cache" : "chat");
startChat();
look();
