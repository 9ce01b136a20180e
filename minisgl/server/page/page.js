// The page's behaviour. What a model or a client wrote becomes text nodes and never markup.

const POLL_MS = 500;
const RETRY_MS = 2000;
const EVICTED_MS = 1500; // how long a page that the tree gave up is shown as such
const MOST_CELLS = 1024; // of the page map; where there are more pages, a cell stands for several

const STATES = {
  private: { symbol: "R", name: "of one request" },
  cached: { symbol: "C", name: "cached, in use" },
  "cached idle": { symbol: "c", name: "cached, may be evicted" },
  evicted: { symbol: "×", name: "just evicted" },
  free: { symbol: "·", name: "free" },
};

const at = (id) => document.getElementById(id);

/** An element with classes and children; strings become text. */
function make(tag, className, ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

/** Ask the server. Throws an Error with the server's own words if it refuses. */
async function call(path, body, signal) {
  const headers = {};
  if (at("key").value) headers.authorization = `Bearer ${at("key").value}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const method = body === undefined ? "GET" : "POST";
  const answer = await fetch(path, { method, headers, signal, body: body && JSON.stringify(body) });
  if (answer.ok) return answer;
  let message = `HTTP status ${answer.status}`;
  try {
    message = (await answer.json()).error.message;
  } catch { /* then the status has to do */ }
  throw new Error(message);
}

// ------------------------------------------------------------------------------------------------ chat

const messages = [];
let running = null; // the AbortController of the answer that is being streamed

/** The data of each event of a stream, parsed, up to [DONE]. */
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the answer broke off");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

function addTurn(role, text) {
  const said = make("div", "said", text);
  const turn = make("div", `turn ${role}`, make("b", "", role === "user" ? "You" : "Model"), said);
  at("log").append(turn);
  at("log").scrollTop = at("log").scrollHeight;
  return { turn, said };
}

function addNote(turn, text, isBad) {
  turn.append(make("div", isBad ? "note bad" : "note", text));
  at("log").scrollTop = at("log").scrollHeight;
}

function setRunning(controller) {
  running = controller;
  at("send").disabled = at("clear").disabled = controller !== null;
  at("stop").disabled = controller === null;
  at("log").setAttribute("aria-busy", String(controller !== null)); // read out when it is whole
}

async function send(event) {
  event.preventDefault();
  const text = at("text").value.trim();
  if (!text || running) return;
  at("text").value = "";
  messages.push({ role: "user", content: text });
  addTurn("user", text);
  const { turn, said } = addTurn("assistant", "");
  const shown = said.appendChild(document.createTextNode(""));
  setRunning(new AbortController());
  const start = performance.now();
  let first = null;
  let usage = null;
  let reason = null;
  try {
    const body = {
      messages,
      stream: true,
      stream_options: { include_usage: true },
      max_tokens: Number(at("most").value) || undefined,
      temperature: at("temperature").value === "" ? undefined : Number(at("temperature").value),
    };
    for await (const chunk of events(await call("v1/chat/completions", body, running.signal))) {
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage ?? usage;
      const choice = chunk.choices?.[0];
      if (!choice) continue;
      reason = choice.finish_reason ?? reason;
      if (choice.delta.content) {
        first ??= performance.now();
        const log = at("log");
        const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 40; // unless the reader went up
        shown.appendData(choice.delta.content);
        if (follows) log.scrollTop = log.scrollHeight;
      }
    }
    addNote(turn, describe(usage, reason, start, first));
  } catch (error) {
    if (error.name === "AbortError") addNote(turn, "stopped");
    else addNote(turn, error.message, true);
  }
  if (shown.data) messages.push({ role: "assistant", content: shown.data });
  else messages.pop(); // nothing was answered: a next message would be the second of two in a row
  setRunning(null);
}

function describe(usage, reason, start, first) {
  const parts = [];
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    parts.push(`${usage.prompt_tokens} tokens in, ${cached} of them cached`, `${usage.completion_tokens} out`);
  }
  if (first !== null) {
    parts.push(`first after ${Math.round(first - start)} ms`);
    const seconds = (performance.now() - first) / 1000;
    if (usage && usage.completion_tokens > 1) {
      parts.push(`then ${Math.round((usage.completion_tokens - 1) / Math.max(seconds, 1e-3))} tokens/s`);
    }
  }
  if (reason) parts.push(`ended by ${reason}`);
  return parts.join(", ");
}

at("ask").addEventListener("submit", send);
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("ask").requestSubmit();
  }
});
at("stop").addEventListener("click", () => {
  running?.abort();
  at("text").focus();
});
at("clear").addEventListener("click", () => {
  messages.length = 0;
  at("log").replaceChildren();
  at("text").focus();
});

// ------------------------------------------------------------------------------------------------ live state

let isPaused = false;
let before = null; // { stats, time } of the last poll
const shownBefore = {}; // what a part of the page was last drawn from

function setState(text, isBad) {
  if (at("state").textContent !== text) at("state").textContent = text; // it is read out
  at("state").classList.toggle("bad", Boolean(isBad));
}

/** Draw only what has changed, so that a selection or a reader's place is not lost. */
function redraw(id, value, draw) {
  const key = JSON.stringify(value);
  if (shownBefore[id] === key) return;
  shownBefore[id] = key;
  at(id).replaceChildren(...draw(value));
}

async function poll() {
  let wait = POLL_MS;
  if (!isPaused && !document.hidden) {
    try {
      const stats = await (await call("live")).json();
      showLive(stats);
      setState(stats.heartbeat_age_s > 5 ? `the loop turned ${stats.heartbeat_age_s.toFixed(0)} s ago` : "live",
        stats.heartbeat_age_s > 5);
    } catch (error) {
      setState(`no live state: ${error.message}`, true);
      wait = RETRY_MS;
    }
  }
  setTimeout(poll, wait);
}

function showLive(stats) {
  const now = performance.now();
  const detail = stats.detail;
  const rate = before && now > before.time
    ? Math.max(0, stats.output_tokens - before.stats.output_tokens) / ((now - before.time) / 1000) : 0;
  const share = stats.prompt_tokens ? Math.round(100 * stats.cached_tokens / stats.prompt_tokens) : 0;
  const used = stats.num_pages - stats.num_free_pages - stats.num_cached_pages;
  redraw("numbers", [
    ["running", stats.num_running], ["waiting", stats.num_waiting], ["steps", stats.num_steps],
    ["tokens out / s", Math.round(rate)], ["tokens out", stats.output_tokens], ["prompt cached", `${share} %`],
    ["pages in use", used], ["preemptions", stats.num_preemptions],
  ], (rows) => rows.map(([name, value]) =>
    make("div", "", make("dt", "", name), make("dd", "", value.toLocaleString("en")))));
  redraw("batch", [detail.running ?? [], detail.waiting ?? []], drawBatch);
  showPages(stats, detail, now);
  redraw("tree", [detail.tree ?? [], at("as-text").checked, names.size], drawTree);
  before = { stats, time: now };
}

function drawBatch([runs, waits]) {
  if (!runs.length && !waits.length) return [make("p", "empty", "Nothing runs.")];
  const head = make("tr", "", ...[["row", ""], ["request", ""], ["tokens", ""], ["pages", "number"]].map(([name, kind]) => {
    const cell = make("th", kind, name);
    cell.scope = "col";
    return cell;
  }));
  const body = [...runs.map((r) => drawRequest(r, true)), ...waits.slice(0, 32).map((r) => drawRequest(r, false))];
  const parts = [make("table", "", make("thead", "", head), make("tbody", "", ...body))];
  if (waits.length > 32) parts.push(make("p", "more", `and ${waits.length - 32} more that wait`));
  return parts;
}

function drawRequest(request, isRunning) {
  const prompt = request.num_prompt_tokens;
  const out = request.num_output_tokens;
  const most = prompt + request.max_tokens;
  const cached = Math.min(request.num_cached_tokens ?? 0, prompt);
  const computed = Math.max(cached, Math.min(request.num_computed ?? 0, prompt));
  const isDecoding = isRunning && out > 0;
  const bar = make("div", "bar");
  for (const [state, tokens] of [["cached", cached], ["prefill", computed - cached], ["", prompt - computed], ["decode", out]]) {
    const part = make("i", state);
    part.style.width = `${(100 * tokens) / most}%`;
    bar.append(part);
  }
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label",
    `${prompt} prompt tokens, ${cached} of them cached, ${computed} computed; ${out} of at most ${request.max_tokens} new ones`);
  bar.title = bar.getAttribute("aria-label");
  const state = isDecoding ? "decode" : isRunning ? "prefill" : request.status === "preempted" ? "preempted" : "free";
  const symbol = { decode: "D", prefill: "P", preempted: "!", free: "…" }[state];
  const mark = make("span", `mark ${state}`, symbol);
  mark.title = { decode: "decode", prefill: "prefill", preempted: "preempted, waits", free: "waits" }[state];
  return make("tr", "",
    make("td", "row", isRunning ? `${request.row ?? ""} ` : "", mark),
    make("td", "name", shortId(request.id)),
    make("td", "line", bar),
    make("td", "number", String(request.pages?.length ?? 0)));
}

/** The end of an answer's id, which tells it from others, with its kind. */
function shortId(id) {
  return id.length > 14 ? `${id.split("-")[0].slice(0, 5)}…${id.slice(-6)}` : id;
}

let pageStates = []; // of each page from page 1 on, at the last poll
let evictedAt = new Map(); // page -> when the tree gave it up
let cells = [];

function statesOf(stats, detail) {
  const states = new Array(stats.num_pages + 1).fill("free");
  for (const node of detail.tree ?? []) {
    for (const page of node.pages) states[page] = node.refs ? "cached" : "cached idle";
  }
  for (const request of [...(detail.running ?? []), ...(detail.retiring ?? [])]) {
    for (const page of request.pages?.slice(request.num_shared_pages) ?? []) states[page] = "private";
  }
  for (const page of detail.in_transit ?? []) states[page] = "private";
  return states.slice(1);
}

function showPages(stats, detail, now) {
  const states = statesOf(stats, detail);
  states.forEach((state, k) => {
    if (pageStates[k]?.startsWith("cached") && !state.startsWith("cached")) evictedAt.set(k, now);
  });
  pageStates = [...states];
  for (const [k, time] of evictedAt) {
    if (now - time > EVICTED_MS || states[k]?.startsWith("cached")) evictedAt.delete(k);
    else states[k] = "evicted";
  }
  const group = Math.max(1, Math.ceil(states.length / MOST_CELLS));
  const num = Math.ceil(states.length / group);
  if (cells.length !== num) {
    cells = Array.from({ length: num }, () => make("i", "free", STATES.free.symbol));
    at("pages").replaceChildren(...cells);
  }
  cells.forEach((cell, k) => {
    const state = mostFrequent(states, k * group, Math.min((k + 1) * group, states.length));
    if (cell.className === state) return;
    cell.className = state;
    cell.textContent = STATES[state].symbol;
  });
  const counts = Object.fromEntries(Object.keys(STATES).map((state) => [state, 0]));
  for (const state of states) counts[state] += 1;
  const size = detail.page_size ? ` of ${detail.page_size} tokens` : "";
  const note = `${stats.num_pages} pages${size}${group > 1 ? `; each square stands for ${group} of them` : ""}`;
  if (at("pages-note").textContent !== note) at("pages-note").textContent = note;
  at("pages").setAttribute("aria-label",
    Object.entries(counts).map(([state, count]) => `${count} ${STATES[state].name}`).join(", "));
  redraw("legend", counts, () => Object.entries(STATES).map(([state, { symbol, name }]) =>
    make("li", "", make("span", `mark ${state}`, symbol), ` ${counts[state]} ${name}`)));
}

function mostFrequent(states, start, end) {
  if (end - start === 1) return states[start];
  const counts = {};
  let best = states[start];
  for (let k = start; k < end; k += 1) {
    counts[states[k]] = (counts[states[k]] ?? 0) + 1;
    if (counts[states[k]] > counts[best]) best = states[k];
  }
  return best;
}

// ------------------------------------------------------------------------------------------------ radix tree

const names = new Map(); // token ids, joined -> their text
const asked = new Set();

/** The text of an edge's tokens if it is known; otherwise it is asked for, and the next poll shows it. */
function nameOf(ids) {
  const key = ids.join(" ");
  if (!names.has(key) && !asked.has(key)) {
    asked.add(key);
    call("detokenize", { tokens: ids })
      .then((answer) => answer.json())
      .then((body) => names.set(key, body.prompt))
      .catch(() => asked.delete(key));
  }
  return names.get(key);
}

function drawTree([nodes, asText]) {
  const top = make("ul", "");
  const lists = [top]; // the list for children at each depth
  let num = 0;
  for (const node of nodes) {
    const text = asText && node.token_ids.length ? nameOf(node.token_ids) : undefined;
    const isRoot = node.depth === 0;
    if (!isRoot) num += 1;
    const label = isRoot ? `root${node.salt === null ? "" : ` of salt ${JSON.stringify(node.salt)}`}`
      : text === undefined ? node.token_ids.join(" ") : text.replaceAll("\n", "↵");
    const more = node.num_tokens > node.token_ids.length ? " …" : "";
    const facts = isRoot ? "" : ` ${node.num_tokens} tokens on ${node.pages.length} ${node.pages.length === 1 ? "page" : "pages"}` +
      `, ${node.refs} ${node.refs === 1 ? "lock" : "locks"}`;
    const mark = make("span", `mark ${node.refs ? "cached" : "cached idle"}`, node.refs ? "C" : "c");
    const children = make("ul", "");
    const item = make("li", "", ...(isRoot ? [] : [mark, " "]), make("code", "", label + more), make("span", "facts", facts), children);
    (lists[node.depth] ?? top).append(item);
    lists.length = node.depth + 1;
    lists.push(children);
  }
  if (!num) return [make("p", "empty", "Nothing is cached.")];
  for (const list of top.querySelectorAll("ul:empty")) list.remove();
  return [top];
}

at("pause").addEventListener("click", () => {
  isPaused = !isPaused;
  at("pause").setAttribute("aria-pressed", String(isPaused));
  at("pause").textContent = isPaused ? "Go on" : "Pause";
  if (isPaused) setState("paused");
});
at("flush").addEventListener("click", async () => {
  try {
    await call("flush_cache", {});
  } catch (error) {
    setState(error.message, true);
  }
});
at("as-text").addEventListener("change", () => before && showLive(before.stats));

async function showModel() {
  try {
    at("model").textContent = (await (await call("v1/models")).json()).data[0].id;
  } catch { /* the state says what is wrong */ }
}
at("key").addEventListener("change", showModel);
showModel();
poll();
