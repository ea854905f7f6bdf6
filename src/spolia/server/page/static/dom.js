// Making elements, and talking to the server. Text is always set as text: what a model says is never HTML.

export const byId = (id) => document.getElementById(id);

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// CSP forbids style attributes, but not what a script sets.
export function styled(made, styles) {
  Object.assign(made.style, styles);
  return made;
}

export async function ask(path, options = {}) {
  const key = byId("key").value;
  const headers = { ...(options.headers ?? {}), ...(key ? { authorization: `Bearer ${key}` } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    throw error.name === "AbortError" ? error : new Error("the server does not answer; is it running?");
  }
  if (response.ok) return response;
  const error = new Error(`${response.status} ${response.statusText}`);
  error.code = response.status;
  try { ({ message: error.message, code: error.code } = (await response.json()).error); } catch { /* not ours */ }
  throw error;
}

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const whole = (number) => Math.round(number).toLocaleString("en");
export const percent = (share) => (Number.isFinite(share) ? `${(100 * share).toFixed(share < 0.0995 || share > 0.9995 ? 1 : 0)}%` : "–");
