// Talks to the gateway: JSON, and server-sent events read with fetch, which can send an API key.

const STORED = "hexflow-key";

export class NeedsKey extends Error {}

export const key = {
  get: () => sessionStorage.getItem(STORED),
  set: (value) => sessionStorage.setItem(STORED, value),
  drop: () => sessionStorage.removeItem(STORED),
};

function headers() {
  return key.get() ? { authorization: `Bearer ${key.get()}` } : {};
}

export async function call(path, options = {}) {
  const answer = await fetch(path, { ...options, headers: headers(), cache: "no-store" });
  if (answer.status === 401 || (answer.status === 403 && path === "../api/mesh")) throw new NeedsKey();
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error?.message ?? `status ${answer.status}`);
  return body;
}

// Calls take(data) for every event until the stream ends or fails.
export async function follow(path, take, signal) {
  const answer = await fetch(path, { headers: headers(), cache: "no-store", signal });
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const line = part.split("\n").find((one) => one.startsWith("data: "));
      if (line) take(JSON.parse(line.slice(6)));
    }
  }
}
