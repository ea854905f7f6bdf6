import { ask, byId, element } from "./dom.js";
import { startChat } from "./chat.js";
import { startCache, stopCache } from "./cache.js";

function show(view) {
  for (const name of ["chat", "cache"]) {
    byId(name).hidden = name !== view;
    byId(`show-${name}`).setAttribute("aria-pressed", String(name === view));
  }
  history.replaceState(null, "", `#/${view}`); // no id: the browser would move the keyboard there
  if (view === "cache") startCache(); else stopCache();
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  localStorage.setItem("theme", theme);
}

async function listModels() {
  const health = byId("health");
  try {
    const models = (await (await ask("/v1/models")).json()).data;
    byId("model").replaceChildren(...models.map((model) => element("option", { value: model.id }, model.id)));
    health.textContent = models.every((model) => model.max_model_len) ? "ready" : "loading…";
    if (health.textContent !== "ready") setTimeout(listModels, 1000);
  } catch (error) {
    health.textContent = error.message;
  }
}

setTheme(localStorage.getItem("theme") ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
byId("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
byId("show-chat").addEventListener("click", () => show("chat"));
byId("show-cache").addEventListener("click", () => show("cache"));
// The keyboard moves, the address does not: it says which view is open.
byId("skip").addEventListener("click", (event) => { event.preventDefault(); byId(byId("question").offsetParent ? "question" : "cache").focus(); });
byId("key").addEventListener("change", listModels);
listModels();
startChat();
show(location.hash === "#/cache" ? "cache" : "chat");
